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
    nvme = 30e12                         # bytes of local NVMe drives

    [[level]]                            # instead of link and network: an irregular tree of links
    name = "PCIe switch"                 # see ``levels.py``

    rank_order = [0, 2, 1, 3]            # optional, above the tables: the accelerator of each rank

``[link]`` and ``[network]`` may also hold a ``name``, and ``[link]`` a ``peer_bandwidth`` (bytes/s
to one single peer in a full mesh). A table ``[accelerator]`` has the keys of the files in
``accelerators/``: name, device, architecture, memory_capacity, memory_bandwidth, peak_flops, link,
link_bandwidth and, where they are known, link_share (of it, what large collectives reach),
usable_memory, achievable_flops, host_bandwidth, power, price (dollars an hour), compute_units,
kernel_launch.

A file that ``shardplan calibrate -o`` wrote holds one table [cluster] with every figure instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from hardware_profiles.cluster.build import build_cluster, network_note
from hardware_profiles.cluster.catalogue import (
    accelerator_from_table,
    link_latency,
    match_accelerator,
    usual_node,
)
from hardware_profiles.cluster.irregular_tree import levels_of_file, read_rank_order
from hardware_profiles.cluster.schema import (
    KINDS,
    MAX_GPUS,
    Accelerator,
    Cluster,
    Figure,
    Level,
    Node,
    Tier,
)
from hardware_profiles.errors import InputError
from hardware_profiles.fields import Fields, read_toml

_TABLES: Final = ("link", "network", "host", "level")
_KEYS: Final = ("nodes", "gpus_per_node", "accelerator", "rank_order", *_TABLES)
_HOST_KEYS: Final = ("memory", "nvme", "source", "kind")
_NETWORK_KEYS: Final = ("name", "bandwidth", "latency", "source", "kind")
_LINK_KEYS: Final = (*_NETWORK_KEYS, "domain_size", "peer_bandwidth")


def read_cluster_file(path: Path) -> Cluster:
    """Return the cluster of a TOML file; see the head of this file for what it holds."""
    source = Fields(read_toml(path, "a cluster"), str(path))
    if "cluster" in source:
        from hardware_profiles.cluster.links import (
            cluster_from_fields,  # numpy: only where it is needed
        )

        source.refuse_unknown(("cluster",))
        return replace(cluster_from_fields(source.sub("cluster")), name=str(path))
    source.refuse_unknown(_KEYS)
    num_nodes = source.integer("nodes", low=1, high=MAX_GPUS)
    gpus_per_node = source.integer("gpus_per_node", low=1, high=MAX_GPUS)
    link, network = source.sub("link", {}), source.sub("network", {})
    host = source.sub("host", {})
    host.refuse_unknown(_HOST_KEYS)
    link.refuse_unknown(_LINK_KEYS)
    network.refuse_unknown(_NETWORK_KEYS)
    accelerator, notes = _accelerator(source)
    levels = levels_of_file(source, num_nodes * gpus_per_node)
    several = num_nodes > 1 and not levels
    node = _node(accelerator, link, network, gpus_per_node, several=several)
    cluster = build_cluster(
        accelerator,
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        node=node,
        name=str(path),
        notes=notes,
    )
    cluster = replace(
        cluster,
        host_memory=_figure(host, "memory") or cluster.host_memory,
        nvme=_figure(host, "nvme") or cluster.nvme,
        rank_order=read_rank_order(source, cluster.num_gpus),
    )
    if levels:
        return with_levels(replace(cluster, notes=notes), levels)
    if "bandwidth" not in network and len(cluster.tiers) > 1:
        cluster = replace(cluster, notes=(*cluster.notes, network_note(node)))
    own = (link, network)
    tiers = tuple(_with_latency(tier, own[index]) for index, tier in enumerate(cluster.tiers))
    return replace(cluster, tiers=tiers)


def with_levels(cluster: Cluster, levels: tuple[Level, ...]) -> Cluster:
    """Return the cluster with an irregular tree of links in the place of its tiers."""
    from hardware_profiles.cluster.link_tree import (
        tiers_of_levels,  # numpy: only where it is needed
    )

    return replace(cluster, levels=levels, tiers=tiers_of_levels(levels, cluster.num_gpus))


def _accelerator(source: Fields) -> tuple[Accelerator, tuple[str, ...]]:
    """Return the accelerator, by name or by its figures, and the convention behind its name."""
    if isinstance(source.values.get("accelerator"), Mapping):
        return accelerator_from_table(source.sub("accelerator"), cited=str), ()
    found = match_accelerator(source.text("accelerator"))
    return found.entry, () if found.note is None else (found.note,)


def _node(
    accelerator: Accelerator, link: Fields, network: Fields, gpus_per_node: int, *, several: bool
) -> Node:
    """Return the kind of node that the file describes: the usual one with the file's changes."""
    usual = usual_node(accelerator)
    if usual is None and several and "bandwidth" not in network:
        raise InputError(f"{network.where}: bandwidth is missing (bytes/s one way per accelerator)")
    base = usual or Node(
        name=accelerator.name,
        accelerator=accelerator.name,
        gpus_per_node=gpus_per_node,
        network="network",
        network_bandwidth=accelerator.link_bandwidth,  # of one node: never used
        domain_size=gpus_per_node,
    )
    domain_size = link.integer("domain_size", None, low=gpus_per_node, high=MAX_GPUS)
    return replace(
        base,
        gpus_per_node=gpus_per_node if domain_size else base.gpus_per_node,
        domain_size=domain_size or base.domain_size,
        link=link.text("name", base.link),
        link_bandwidth=_figure(link, "bandwidth") or base.link_bandwidth,
        peer_bandwidth=_figure(link, "peer_bandwidth") or base.peer_bandwidth,
        network=network.text("name", base.network),
        network_bandwidth=_figure(network, "bandwidth") or base.network_bandwidth,
    )


def _with_latency(tier: Tier, source: Fields) -> Tier:
    latency = _figure(source, "latency") or link_latency(tier.name)
    return replace(tier, latency=latency)


def _figure(source: Fields, key: str) -> Figure | None:
    """Return a figure of the user's own, None where it is left out."""
    value = source.number(key, None, low=1e-12)
    if value is None:
        return None
    return Figure(
        value, source.text("kind", "assumed", choices=KINDS), source.text("source", source.where)
    )
