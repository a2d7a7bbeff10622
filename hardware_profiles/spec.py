"""From what a user types to a Cluster.

    8xA100-80GB            one node of eight
    16x8xH100-SXM          16 nodes of eight; total and nodes are always said back (``describe``)
    A100-80GB:8            the same as 8xA100-80GB
    32xp5.48xlarge         32 instances of a known kind of node; one without the number
    gb200-nvl72            one rack of 18 nodes of 4 in one NVLink domain; 2xgb200-nvl72
    cluster.toml           see ``cluster_file.py``
    here, here:8           this machine's GPUs, or 8 CPU processes on it

``NxNAME`` is one node (or one NVLink domain, one TPU pod) where N fits into the usual one of that
accelerator; where it does not, the number of nodes has to be said: nothing is guessed. The network
between nodes is that of the usual kind of node, entered in ``Cluster.notes`` as an assumption,
unless an instance or a file says more.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from hardware_profiles.catalogue import (
    link_latency,
    match_accelerator,
    match_node,
    usual_node,
)
from hardware_profiles.errors import InputError
from hardware_profiles.schema import MAX_GPUS, Accelerator, Cluster, Figure, Node, Tier

EXAMPLES: Final = (
    "8xA100-80GB (one node), 16x8xH100-SXM (16 nodes of 8), 32xp5.48xlarge, gb200-nvl72, "
    "a .toml file, here"
)
_COUNT: Final = re.compile(r"([+-]?[\d.,_]+)\s*[x*\u00d7]\s*(?=\S)", re.IGNORECASE)
_AFTER: Final = re.compile(r"^(?P<name>.*[^:\s])\s*:\s*(?P<count>[+-]?\d+)$")


def parse_cluster(text: str) -> Cluster:
    """Return the cluster that a user's words stand for; see the head of this file.

    >>> cluster = parse_cluster("16x8xH100-SXM")
    >>> cluster.num_nodes, cluster.gpus_per_node, cluster.accelerator.name
    (16, 8, 'H100-SXM-80GB')
    >>> parse_cluster("16xH100-SXM")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hardware_profiles.errors.InputError: 16xH100-SXM: nodes of H100-SXM-80GB usually hold 8...
    """
    words = text.strip()
    if not words:
        raise InputError(f"a cluster is expected, such as {EXAMPLES}")
    if words.lower() == "here" or words.lower().startswith("here:"):
        return _here(words)
    if words.lower().endswith(".toml") or os.sep in words:
        from hardware_profiles.cluster_file import read_cluster_file

        return read_cluster_file(Path(words))
    counts, name = _counts(words)
    if node := match_node(name):
        return _of_nodes(words, counts, node.entry, node.note)
    found = match_accelerator(name)
    num_nodes, gpus_per_node = _layout(words, counts, name, found.entry)
    notes = () if found.note is None else (found.note,)
    return build_cluster(
        found.entry, num_nodes=num_nodes, gpus_per_node=gpus_per_node, name=words, notes=notes
    )


def build_cluster(
    accelerator: Accelerator,
    *,
    num_nodes: int,
    gpus_per_node: int,
    node: Node | None = None,
    network_bandwidth: Figure | None = None,
    name: str | None = None,
    notes: tuple[str, ...] = (),
) -> Cluster:
    """Return a cluster of equal nodes.

    Without ``node``, the usual one of the accelerator gives links and network, and a note says so;
    ``network_bandwidth`` (bytes/s one way per accelerator) takes the place of the node's.
    """
    kind = node or usual_node(accelerator)
    if kind is None:
        raise InputError(f"{accelerator.name}: is not in the catalogue; give the node as well")
    total = num_nodes * gpus_per_node
    _check_size(name or accelerator.name, total)
    inner = _inner_tier(accelerator, kind, gpus_per_node, total)
    tiers = (
        (inner,)
        if inner.domain_size >= total
        else (inner, _network(kind, network_bandwidth, total))
    )
    if gpus_per_node > max(kind.gpus_per_node, kind.domain_size):
        notes += (f"{inner.name} is taken to reach all {gpus_per_node} of a node (usually fewer)",)
    if len(tiers) > 1 and node is None and network_bandwidth is None:
        notes += (network_note(kind),)
    return Cluster(
        name=name or f"{num_nodes}x{gpus_per_node}x{accelerator.name}",
        accelerator=accelerator,
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        tiers=tiers,
        notes=notes,
    )


def describe(cluster: Cluster) -> str:
    """Say back in words what a cluster is.

    >>> describe(parse_cluster("2x8xA100-80GB"))
    '2 nodes of 8 A100-SXM-80GB, NVLink3 300 GB/s inside, 25 GB/s per GPU between nodes'
    """
    inner, *outer = cluster.tiers
    domains = inner.domain_size > cluster.gpus_per_node
    inside = f"inside domains of {inner.domain_size}" if domains and outer else "inside"
    between = "domains" if domains else "nodes"
    links = [f"{inner.name} {_gigabytes(inner)} {inside}"] if cluster.num_gpus > 1 else []
    links += [f"{_gigabytes(tier)} per {_unit(cluster)} between {between}" for tier in outer]
    return ", ".join([_machines(cluster), *links])


def _machines(cluster: Cluster) -> str:
    if cluster.accelerator.device == "cpu":
        many = "" if cluster.num_gpus == 1 else "es"
        return f"{cluster.num_gpus} CPU process{many} on {cluster.accelerator.name}"
    many = "" if cluster.num_nodes == 1 else "s"
    return (
        f"{cluster.num_nodes:,} node{many} of {cluster.gpus_per_node:,} {cluster.accelerator.name}"
    )


def _gigabytes(tier: Tier) -> str:
    return f"{float(f'{tier.bandwidth.value / 1e9:.3g}'):g} GB/s"


def _unit(cluster: Cluster) -> str:
    return {"gpu": "GPU", "tpu": "chip", "cpu": "process"}[cluster.accelerator.device]


# --- reading the words ---


def _counts(words: str) -> tuple[tuple[int, ...], str]:
    """Return the numbers before (or after) the name, and the name."""
    counts: list[int] = []
    position = 0
    while found := _COUNT.match(words, position):
        counts.append(_number(words, found.group(1)))
        position = found.end()
    name = words[position:].strip()
    if not counts and (after := _AFTER.match(name)):
        counts, name = [_number(words, after.group("count"))], after.group("name")
    named = re.fullmatch(r"[\w.\- :]+", name) and re.search(r"[a-wyz]", name, re.IGNORECASE)
    if not named or len(counts) > 2:
        raise InputError(f"{words!r} is no cluster. Write it as {EXAMPLES}")
    return tuple(counts), name


def _number(words: str, digits: str) -> int:
    """Return a count from 1 to MAX_GPUS."""
    whole = digits.isascii() and digits.isdigit() and len(digits) <= 12
    if not whole or not 1 <= int(digits) <= MAX_GPUS:
        shown = digits if len(digits) <= 20 else digits[:17] + "..."
        raise InputError(f"{words[:60]}: {shown} must be a whole number from 1 to {MAX_GPUS:,}")
    return int(digits)


def _check_size(words: str, total: int) -> None:
    if total > MAX_GPUS:
        raise InputError(f"{words}: {total:,} accelerators are too many (at most {MAX_GPUS:,})")


def _layout(
    words: str, counts: tuple[int, ...], name: str, accelerator: Accelerator
) -> tuple[int, int]:
    """Return nodes and accelerators per node."""
    if len(counts) == 2:
        return counts[0], counts[1]
    if not counts:
        raise InputError(f"{words}: how many? Write 8x{name} for one node of 8, 2x8x{name} for two")
    usual = usual_node(accelerator)
    (count,) = counts
    if usual is None or count <= usual.gpus_per_node:
        return 1, count
    num_nodes, left = divmod(count, usual.gpus_per_node)
    if count <= usual.domain_size and not left:
        return num_nodes, usual.gpus_per_node
    several = (
        f"Write {num_nodes}x{usual.gpus_per_node}x{name} for {num_nodes} nodes, or "
        if not left
        else "Write "
    )
    raise InputError(
        f"{words}: nodes of {accelerator.name} usually hold {usual.gpus_per_node}. "
        f"{several}1x{count}x{name} if one node really holds {count}"
    )


def _of_nodes(words: str, counts: tuple[int, ...], node: Node, note: str | None) -> Cluster:
    """Return a cluster of a known kind of node."""
    if len(counts) > 1:
        raise InputError(
            f"{words}: {node.name} says already that a node holds {node.gpus_per_node}; "
            f"write {counts[0]}x{node.name}"
        )
    units = counts[0] if counts else 1
    return build_cluster(
        match_accelerator(node.accelerator).entry,
        num_nodes=units * node.nodes,
        gpus_per_node=node.gpus_per_node,
        node=node,
        name=words,
        notes=() if note is None else (note,),
    )


def _here(words: str) -> Cluster:
    from hardware_profiles.here import describe_here
    from hardware_profiles.measurement import MAX_PROCESSES

    _, _, digits = words.partition(":")
    if words.lower() == "here":
        return describe_here(None)
    if not (digits.isascii() and digits.isdigit() and 1 <= int(digits[:9]) <= MAX_PROCESSES):
        raise InputError(f"{words}: here:N takes a whole number from 1 to {MAX_PROCESSES:,}")
    return describe_here(int(digits[:9]))


# --- links ---


def _inner_tier(accelerator: Accelerator, node: Node, gpus_per_node: int, total: int) -> Tier:
    """Return the tier of the link inside a node, or inside the domain that spans nodes."""
    spans_nodes = node.domain_size > node.gpus_per_node
    link = node.link or accelerator.link
    return Tier(
        name=link,
        domain_size=min(node.domain_size, total) if spans_nodes else gpus_per_node,
        bandwidth=node.link_bandwidth or accelerator.link_bandwidth,
        latency=link_latency(link),
        peer_bandwidth=node.peer_bandwidth,
    )


def _network(node: Node, bandwidth: Figure | None, total: int) -> Tier:
    return Tier(
        name=node.network,
        domain_size=total,
        bandwidth=bandwidth or node.network_bandwidth,
        latency=link_latency(node.network),
    )


def network_note(node: Node) -> str:
    """Return the assumption taken where nobody named the network between nodes."""
    share = node.network_bandwidth
    return (
        f"network between nodes as in {node.name}: {node.network}, {share.value / 1e9:g} GB/s per "
        f"accelerator ({share.kind}: {share.source})"
    )
