"""A cluster described in a TOML file.

    nodes = 4
    gpus_per_node = 8
    accelerator = "A100-SXM-80GB"        # of the catalogue, or a table [accelerator] with figures

    [link]                               # optional: inside a node, where it differs
    bandwidth = 300e9                    # bytes/s one way per accelerator
    latency = 3e-6                       # seconds a message
    domain_size = 8                      # accelerators within reach of it; may span nodes
    source = "our data sheet"            # where the figures come from; default: this file
    kind = "datasheet"                   # measured, published, datasheet or assumed (default)

    [network]                            # optional: between nodes
    bandwidth = 25e9                     # bytes/s one way per accelerator
    latency = 10e-6

    [host]                               # optional: what offloaded tensors may take of a node
    memory = 2e12                        # bytes of host memory
    memory_bandwidth = 205e9             # bytes/s of it, where accelerators have no peer-to-peer
    nvme = 30e12                         # bytes of local NVMe drives

    [[level]]                            # instead of link and network: an irregular tree of links
    name = "PCIe switch"                 # see ``irregular_tree.py``

    rank_order = [0, 2, 1, 3]            # optional, above the tables: the accelerator of each rank

``[link]`` and ``[network]`` may also hold a ``name`` ("NVLink3" for cards with a bridge), and
``[link]`` a ``peer_bandwidth`` (bytes/s to one single peer in a full mesh) and a ``bus_bandwidth``
(bytes/s that collectives reach inside a node: the column busbw of nccl-tests, all_reduce_perf with
all cards and large messages). A table ``[accelerator]`` has the keys of the files in
``accelerators/``: name, device, architecture, memory_capacity, memory_bandwidth, peak_flops, link,
link_bandwidth and, where they are known, link_share (of it, what large collectives reach),
usable_memory, achievable_flops, host_bandwidth, host_memory_bandwidth (bytes/s of a node's host
memory, where its accelerators have no peer-to-peer), power, price (dollars an hour), compute_units,
l2_cache, systolic_array, kernel_launch.

A file that ``shardplan calibrate -o`` wrote holds one table [cluster] with every figure instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from hardware_profiles.cluster.build import build_cluster, network_note
from hardware_profiles.cluster.catalogue import link_latency, match_accelerator, usual_node
from hardware_profiles.cluster.catalogue_files import accelerator_from_table
from hardware_profiles.cluster.cluster_json import cluster_from_dict
from hardware_profiles.cluster.irregular_tree import LevelTable, levels_of_file, read_rank_order
from hardware_profiles.cluster.schema import (
    MAX_GPUS,
    Accelerator,
    Cluster,
    Figure,
    Kind,
    Level,
    Node,
)
from hardware_profiles.errors import InputError
from hardware_profiles.fields import Line, Positive, convert, read_toml, tidied, wrong_value

_Count = Annotated[int, Meta(ge=1, le=MAX_GPUS)]


class _Host(Struct, frozen=True, forbid_unknown_fields=True):
    memory: Positive | None = None
    memory_bandwidth: Positive | None = None
    nvme: Positive | None = None
    source: Line | None = None
    kind: Kind = "assumed"


class _Network(Struct, frozen=True, forbid_unknown_fields=True):
    name: Line | None = None
    bandwidth: Positive | None = None
    latency: Positive | None = None
    source: Line | None = None
    kind: Kind = "assumed"


class _Link(_Network, frozen=True, forbid_unknown_fields=True):
    domain_size: _Count | None = None
    peer_bandwidth: Positive | None = None
    bus_bandwidth: Positive | None = None


class _Calibrated(Struct, frozen=True, forbid_unknown_fields=True):
    cluster: dict[str, Any]


class _ClusterFile(Struct, frozen=True, forbid_unknown_fields=True):
    nodes: _Count
    gpus_per_node: _Count
    accelerator: Line | dict[str, Any]
    rank_order: list[int] | None = None
    link: _Link | None = None
    network: _Network | None = None
    host: _Host = _Host()
    level: tuple[LevelTable, ...] = ()


def read_cluster_file(path: Path) -> Cluster:
    """Return the cluster of a TOML file; the keys are listed at the top of this module."""
    where = str(path)
    values = tidied(read_toml(path, "a cluster"))
    if "cluster" in values:
        calibrated = convert(values, _Calibrated, where)
        return replace(cluster_from_dict(calibrated.cluster, f"{where}: cluster"), name=where)
    file = convert(values, _ClusterFile, where)
    for key in ("link", "network") if file.level else ():
        if getattr(file, key) is not None:
            raise InputError(f"{where}: [{key}] and [[level]]: the levels are all links")
    link, network = file.link or _Link(), file.network or _Network()
    accelerator, notes = _accelerator(file.accelerator, f"{where}: accelerator")
    staged = _figure(file.host, file.host.memory_bandwidth, f"{where}: host")
    if accelerator.host_memory_bandwidth is not None and staged is not None:
        accelerator = replace(accelerator, host_memory_bandwidth=staged)
    if link.bus_bandwidth is not None:
        accelerator = _with_bus_bandwidth(accelerator, link, link.bus_bandwidth, f"{where}: link")
    levels = levels_of_file(file.level, file.nodes * file.gpus_per_node, where)
    several = file.nodes > 1 and not levels
    node = _node(accelerator, link, network, file.gpus_per_node, where, several=several)
    cluster = build_cluster(
        accelerator,
        num_nodes=file.nodes,
        gpus_per_node=file.gpus_per_node,
        node=node,
        name=where,
        notes=notes,
    )
    host_where = f"{where}: host"
    cluster = replace(
        cluster,
        host_memory=_figure(file.host, file.host.memory, host_where) or cluster.host_memory,
        nvme=_figure(file.host, file.host.nvme, host_where) or cluster.nvme,
        rank_order=read_rank_order(file.rank_order, where, cluster.num_gpus),
    )
    if levels:
        return with_levels(replace(cluster, notes=notes), levels)
    if network.bandwidth is None and len(cluster.tiers) > 1:
        cluster = replace(cluster, notes=(*cluster.notes, network_note(node)))
    own = ((link, f"{where}: link"), (network, f"{where}: network"))
    tiers = tuple(
        replace(tier, latency=_figure(table, table.latency, at) or link_latency(tier.name))
        for tier, (table, at) in zip(cluster.tiers, own, strict=False)
    )
    return replace(cluster, tiers=tiers)


def with_levels(cluster: Cluster, levels: tuple[Level, ...]) -> Cluster:
    """Return the cluster with an irregular tree of links in the place of its tiers."""
    from hardware_profiles.cluster.links.tree import (
        tiers_of_levels,  # numpy: only where it is needed
    )

    return replace(cluster, levels=levels, tiers=tiers_of_levels(levels, cluster.num_gpus))


def _accelerator(given: str | Mapping[str, Any], where: str) -> tuple[Accelerator, tuple[str, ...]]:
    """Return the accelerator, by name or by its figures, and the convention behind its name."""
    if not isinstance(given, str):
        return accelerator_from_table(given, where), ()
    found = match_accelerator(given)
    return found.entry, () if found.note is None else (found.note,)


def _with_bus_bandwidth(
    accelerator: Accelerator, link: _Link, reached: float, where: str
) -> Accelerator:
    """Return the accelerator with the file's link, of which collectives reach what was measured."""
    bandwidth = _figure(link, link.bandwidth, where) or accelerator.link_bandwidth
    if reached > bandwidth.value:
        allowed = f"at most the link's {bandwidth.value:g}"
        raise wrong_value(where, "bus_bandwidth", reached, allowed)
    measured = Figure(reached / bandwidth.value, "measured", link.source or where)
    return replace(
        accelerator,
        link=link.name or accelerator.link,
        link_bandwidth=replace(bandwidth, kind="measured"),
        link_share=measured,
    )


def _node(
    accelerator: Accelerator,
    link: _Link,
    network: _Network,
    gpus_per_node: int,
    where: str,
    *,
    several: bool,
) -> Node:
    """Return the kind of node that the file describes: the usual one with the file's changes."""
    usual = usual_node(accelerator)
    if usual is None and several and network.bandwidth is None:
        raise InputError(
            f"{where}: network: bandwidth is missing (bytes/s one way per accelerator)"
        )
    base = usual or Node(
        name=accelerator.name,
        accelerator=accelerator.name,
        gpus_per_node=gpus_per_node,
        network="network",
        network_bandwidth=accelerator.link_bandwidth,  # of one node: never used
        domain_size=gpus_per_node,
    )
    domain_size = link.domain_size
    if domain_size is not None and domain_size < gpus_per_node:
        allowed = f"a whole number from {gpus_per_node:,} to {MAX_GPUS:,}"
        raise wrong_value(f"{where}: link", "domain_size", domain_size, allowed)
    of_link, of_network = f"{where}: link", f"{where}: network"
    return replace(
        base,
        gpus_per_node=gpus_per_node if domain_size else base.gpus_per_node,
        domain_size=domain_size or base.domain_size,
        link=base.link if link.name is None else link.name,
        link_bandwidth=_figure(link, link.bandwidth, of_link) or base.link_bandwidth,
        peer_bandwidth=_figure(link, link.peer_bandwidth, of_link) or base.peer_bandwidth,
        network=base.network if network.name is None else network.name,
        network_bandwidth=_figure(network, network.bandwidth, of_network) or base.network_bandwidth,
    )


def _figure(table: _Host | _Network, value: float | None, where: str) -> Figure | None:
    """Return a figure of the user's own, None where it is left out."""
    if value is None:
        return None
    return Figure(value, table.kind, where if table.source is None else table.source)
