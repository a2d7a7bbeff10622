"""Puts a cluster together from an accelerator and a kind of node, and says it back in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hardware_profiles.cluster.catalogue import link_latency, nodes, usual_node
from hardware_profiles.cluster.schema import (
    MAX_GPUS,
    Accelerator,
    Cluster,
    Figure,
    Level,
    Node,
    Tier,
)
from hardware_profiles.errors import InputError


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

    Without ``node``, the usual one of the accelerator gives links and network, and a note says so
    (one with as many accelerators where the usual one has fewer);
    ``network_bandwidth`` (bytes/s one way per accelerator) takes the place of the node's.
    """
    kind = node or _usual_node(accelerator, gpus_per_node)
    if kind is None:
        raise InputError(f"{accelerator.name}: is not in the catalogue; give the node as well")
    total = num_nodes * gpus_per_node
    if total > MAX_GPUS:
        raise InputError(
            f"{name or accelerator.name}: {total:,} accelerators are too many (at most "
            f"{MAX_GPUS:,})"
        )
    if kind.power is not None and kind.accelerator == accelerator.name:
        accelerator = replace(accelerator, power=kind.power)
    inner = _inner_tier(accelerator, kind, gpus_per_node, total)
    tiers = (
        (inner,)
        if inner.domain_size >= total
        else (inner, _network(kind, network_bandwidth, total))
    )
    if gpus_per_node > max(kind.gpus_per_node, kind.domain_size):
        notes += (f"{inner.name} is taken to reach all {gpus_per_node} of a node (usually fewer)",)
    if len(tiers) > 1 and node is None:
        notes += () if network_bandwidth is not None else (network_note(kind),)
        notes += _board_note(kind, gpus_per_node)
    notes += _host_note(accelerator, inner, gpus_per_node)
    return Cluster(
        name=name or f"{num_nodes}x{gpus_per_node}x{accelerator.words}",
        accelerator=accelerator,
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        tiers=tiers,
        notes=notes,
        host_memory=share_of(kind.host_memory, gpus_per_node / kind.gpus_per_node),
        nvme=share_of(kind.nvme, gpus_per_node / kind.gpus_per_node),
        host_links=kind.host_links,
    )


def _usual_node(accelerator: Accelerator, gpus_per_node: int) -> Node | None:
    usual = usual_node(accelerator)
    if usual is None or gpus_per_node <= max(usual.gpus_per_node, usual.domain_size):
        return usual
    as_large = (
        other
        for other in nodes()
        if other.accelerator == accelerator.name and other.gpus_per_node == gpus_per_node
    )
    return next(as_large, usual)


def _board_note(kind: Node, gpus_per_node: int) -> tuple[str, ...]:
    """Return a note on boards without a switch that have ``gpus_per_node`` accelerators."""
    boards = [
        board.name
        for board in nodes()
        if board.accelerator == kind.accelerator
        and board.gpus_per_node == gpus_per_node < kind.gpus_per_node
        and board.peer_bandwidth is not None
        and kind.peer_bandwidth is None
    ]
    if not boards:
        return ()
    return (
        f"links inside a node as in {kind.name}, through a switch (a board of {gpus_per_node} "
        f"without one is {boards[0]})",
    )


def _host_note(accelerator: Accelerator, inner: Tier, gpus_per_node: int) -> tuple[str, ...]:
    """Return a note on collectives through a host of which nothing is known."""
    share = accelerator.link_share
    if (
        gpus_per_node == 1
        or inner.name != accelerator.link
        or accelerator.host_memory_bandwidth is None
        or share is None
        or share.kind != "assumed"
    ):
        return ()
    bandwidth = inner.bandwidth.value
    return (
        f"{inner.name} at {share.value * bandwidth / 1e9:.2g} of {bandwidth / 1e9:.2g} GB/s: "
        "collectives without peer-to-peer, on an unknown host (bus_bandwidth under [link] in a "
        "cluster's file says what yours reaches)",
    )


def share_of(figure: Figure | None, share: float) -> Figure | None:
    """Return what belongs to the accelerators that are used of a whole server."""
    if figure is None or share >= 1.0:
        return figure
    return replace(figure, value=share * figure.value)


def _inner_tier(accelerator: Accelerator, node: Node, gpus_per_node: int, total: int) -> Tier:
    """Return the tier of the link inside a node, or inside the domain that spans nodes."""
    spans_nodes = node.domain_size > node.gpus_per_node
    link = node.link or accelerator.link
    return Tier(
        name=link,
        domain_size=_even_domain(node.domain_size, gpus_per_node, total)
        if spans_nodes
        else gpus_per_node,
        bandwidth=_joined(node.link_bandwidth or accelerator.link_bandwidth, node, total),
        latency=link_latency(link),
        peer_bandwidth=node.peer_bandwidth,
    )


def _joined(link: Figure, node: Node, total: int) -> Figure:
    """Return the links of a job on a torus: half as much where the ends of its axes are not joined.

    A line of chips moves in each direction what a ring moves over both: bytes that would go round
    the other way share its links. Leaves out slices of which one axis is joined (8 x 16).

    Source: jax-ml/scaling-book@0819a7d8c5: tpus.md (axes of 16 on v5e and v6e, of multiples of 4
    on v4 and v5p, have wraparounds; without them communication takes twice as long). Eight v5e
    scatter 23.8 GB of gradients in 230 ms, 90 GB/s of 180 (stored text id 63117887710).
    """
    return link if total >= node.torus_from else replace(link, value=link.value / 2.0)


def _even_domain(largest: int, gpus_per_node: int, total: int) -> int:
    """Return how many accelerators of a domain a job has: the same in each, in whole nodes.

    A job of 256 has 64 of each NVL72, so that its groups, powers of two, do not straddle two racks
    (as NVIDIA's own: "NVL64"); where no equal parts above half a domain are to be had, domains are
    filled.

    >>> _even_domain(72, 4, 256), _even_domain(72, 4, 144), _even_domain(72, 4, 64)
    (64, 72, 64)
    """
    for domains in range(1, total // gpus_per_node + 1):
        size = total // domains
        if 2 * size <= largest:
            break
        if size <= largest and total % domains == 0 and size % gpus_per_node == 0:
            return size
    return min(largest, total)


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


def describe(cluster: Cluster) -> str:
    """Describe a cluster in words.

    >>> from hardware_profiles.cluster.catalogue import find_accelerator
    >>> describe(build_cluster(find_accelerator("A100-80GB"), num_nodes=2, gpus_per_node=8))
    '2 nodes of 8 A100-SXM-80GB, NVLink3 300 GB/s inside, 25 GB/s per GPU between nodes'
    """
    if cluster.levels:
        return ", ".join([_machines(cluster), *map(_level_words, cluster.levels)])
    inner, *outer = cluster.tiers
    domains = inner.domain_size > cluster.gpus_per_node
    inside = f"inside domains of {inner.domain_size}" if domains and outer else "inside"
    between = "domains" if domains else "nodes"
    links = [f"{inner.name} {_gigabytes(inner)} {inside}"] if cluster.num_gpus > 1 else []
    unit = {"gpu": "GPU", "tpu": "chip", "cpu": "process"}[cluster.accelerator.device]
    links += [f"{_gigabytes(tier)} per {unit} between {between}" for tier in outer]
    return ", ".join([_machines(cluster), *links])


def _level_words(level: Level) -> str:
    """Describe the switches of a level and the bandwidth of their links."""
    sizes = sorted({level.above.count(switch) for switch in set(level.above)})
    many = "es" if level.name.endswith(("ch", "s")) else "s"
    what = f"{level.num_switches} {level.name}{many} of " if level.num_switches > 1 else ""
    what = what + _from_to(sizes) if what else f"one {level.name} above all"
    rates = sorted({float(f"{figure.value / 1e9:.3g}") for figure in level.bandwidth})
    rate = _from_to(rates)
    per = "for each accelerator" if level.per_accelerator else "a link"
    return f"{what} ({rate} GB/s {per})"


def _from_to(numbers: Sequence[float]) -> str:
    """Return one number, or the first and the last of several."""
    ends = dict.fromkeys((numbers[0], numbers[-1]))
    return " to ".join(f"{number:g}" for number in ends)


def _machines(cluster: Cluster) -> str:
    if cluster.accelerator.device == "cpu":
        many = "" if cluster.num_gpus == 1 else "es"
        return f"{cluster.num_gpus} CPU process{many} on {cluster.accelerator.name}"
    many = "" if cluster.num_nodes == 1 else "s"
    return (
        f"{cluster.num_nodes:,} node{many} of {cluster.gpus_per_node:,} {cluster.accelerator.words}"
    )


def _gigabytes(tier: Tier) -> str:
    return f"{float(f'{tier.bandwidth.value / 1e9:.3g}'):g} GB/s"
