"""The cluster as a graph of links, and the link that a group of ranks sees.

Ranks are consecutive inside a node, node after node (in any order, on any tree: ``topology``). A
communication group has ``group_size`` (k) ranks that lie ``stride`` (s) apart; the ranks of a
cluster fall into such groups, block after block of k s ranks. Arguments are whole numbers or
columns of them; everything broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hardware_profiles.cluster.irregular_tree import levels_of_fields
from hardware_profiles.cluster.link_tree import (
    GroupLink,
    is_regular,
    neighbour_link,
    ring_link,
    tree_of,
)
from hardware_profiles.cluster.schema import (
    DEVICES,
    KINDS,
    MAX_GPUS,
    PRECISIONS,
    Accelerator,
    Cluster,
    Figure,
    Tier,
)
from hardware_profiles.fields import Fields

if TYPE_CHECKING:
    import networkx as nx  # heavy: imported where it is used

Count: TypeAlias = int | NDArray[np.integer[Any]]
Column: TypeAlias = NDArray[np.float64]
SMALLEST: Final = 1e-12  # a bandwidth, a rate or a size below this is a mistake


def group_link(
    cluster: Cluster, group_size: Count, stride: Count, world_size: Count | None = None
) -> tuple[Column, Column]:
    """Return bytes/s one way per rank and seconds per message of a ring over the slowest group.

        g = gcd(k s, D)              D accelerators of a tier's domain
        the group stays inside       if g = k s: whole blocks fill the domain
        members in a domain  m       = max(1, floor(g / s)), of the group with the fewest
        bandwidth                    = min over the tiers crossed of m · outer, and the inner link

    A ring enters and leaves every domain once. The other groups with members in the domain
    communicate at the same time, so a group has the outer bandwidth of its own members: m times
    that of one accelerator. The latency is that of the slowest tier crossed. ``world_size``: ranks
    of the job, by default all accelerators; a job that fits into a domain never leaves it.

    Derived here; checked against an enumeration of all groups on ``link_graph``. Exact if the ranks
    fill whole domains, otherwise never too fast. Leaves out: congestion between nodes, trees and
    in-network reduction.

    >>> from hardware_profiles.cluster.parse import parse_cluster
    >>> cluster = parse_cluster("2xDGX-A100-80GB")
    >>> bandwidth, _ = group_link(cluster, np.array([8, 16, 2, 2]), np.array([1, 1, 8, 4]))
    >>> (bandwidth / 1e9).tolist()
    [300.0, 200.0, 25.0, 300.0]
    """
    if not is_regular(cluster):
        bandwidth, latency, _ = _on_tree(ring_link, cluster, group_size, stride, world_size)
        return bandwidth, latency
    size, step = np.asarray(group_size), np.asarray(stride)
    inner = cluster.tiers[0]
    span = np.where(size > 1, size * step, 1)
    ranks = np.asarray(cluster.num_gpus if world_size is None else world_size)
    whole = ranks <= inner.domain_size
    members = np.where(whole, size, np.minimum(_members(span, step, inner.domain_size), size))
    bandwidth = mesh_bandwidth(inner, members)
    latency = np.full(bandwidth.shape, inner.latency.value)
    for domain, outer in pairwise(cluster.tiers):
        leaves = _leaves(span, ranks, domain.domain_size)
        members = _members(span, step, domain.domain_size)
        share = np.minimum(bandwidth, members * outer.bandwidth.value)
        bandwidth = np.where(leaves, share, bandwidth)
        latency = np.where(leaves, np.maximum(latency, outer.latency.value), latency)
    return bandwidth, latency


def mean_hop_latency(cluster: Cluster, group_size: Count, stride: Count) -> Column:
    """Return the mean seconds of a message over a ring's hops.

    A ring leaves a domain once for its m members there: 1/m of the hops are the outer tier's. NCCL
    uses the same model (src/graph/tuning.cc: inner and inter-node steps of a ring).

    >>> from hardware_profiles.cluster.parse import parse_cluster
    >>> cluster = parse_cluster("2xDGX-A100-80GB")
    >>> (1e6 * mean_hop_latency(cluster, np.array([8, 16, 2]), np.array([1, 1, 8]))).tolist()
    [3.4, 4.725, 14.0]
    """
    if not is_regular(cluster):
        return _on_tree(ring_link, cluster, group_size, stride, None)[2]
    size, step = np.asarray(group_size), np.asarray(stride)
    span = np.where(size > 1, size * step, 1)
    ranks = np.asarray(cluster.num_gpus)
    mean = slowest = np.full(span.shape, cluster.tiers[0].latency.value)
    for domain, outer in pairwise(cluster.tiers):
        leaves = _leaves(span, ranks, domain.domain_size)
        more = np.where(leaves, np.maximum(0.0, outer.latency.value - slowest), 0.0)
        mean, slowest = mean + more / _members(span, step, domain.domain_size), slowest + more
    return mean


def point_to_point_link(
    cluster: Cluster,
    distance: Count,
    group_size: Count | None = None,
    world_size: Count | None = None,
) -> tuple[Column, Column]:
    """Return bytes/s one way and seconds per message between ranks ``distance`` apart.

    The slowest pair of pipeline neighbours when all ranks send at once. The pipeline's
    ``group_size`` determines whether any pair leaves a domain: none does if whole groups (distance
    · group_size ranks) fill it. Without it, pairs are assumed to leave every domain.

    >>> from hardware_profiles.cluster.parse import parse_cluster
    >>> bandwidth, _ = point_to_point_link(parse_cluster("2xDGX-A100-80GB"), np.array([1, 8]))
    >>> (bandwidth / 1e9).tolist()
    [25.0, 25.0]
    """
    if not is_regular(cluster):
        size = np.asarray(1 if group_size is None else group_size)
        if group_size is None:  # a pipeline over all accelerators
            size = np.maximum(1, cluster.num_gpus // np.asarray(distance))
        bandwidth, latency, _ = _on_tree(neighbour_link, cluster, size, distance, world_size)
        return bandwidth, latency
    step = np.asarray(distance)
    inner = cluster.tiers[0]
    peer = inner.peer_bandwidth or inner.bandwidth
    size = np.asarray(cluster.num_gpus if group_size is None else group_size)
    span = np.where(size > 1, size * step, 1)
    ranks = np.asarray(cluster.num_gpus if world_size is None else world_size)
    shape = np.broadcast_shapes(span.shape, ranks.shape)
    bandwidth = np.full(shape, peer.value)
    latency = np.full(shape, (inner.peer_latency or inner.latency).value)
    for domain, outer in pairwise(cluster.tiers):
        leaves = _leaves(span, ranks, domain.domain_size)
        share = np.minimum(bandwidth, (outer.peer_bandwidth or outer.bandwidth).value)
        bandwidth = np.where(leaves, share, bandwidth)
        latency = np.where(leaves, np.maximum(latency, outer.latency.value), latency)
    return bandwidth, latency


def _on_tree(
    link: Callable[[Cluster, int, int, int], GroupLink],
    cluster: Cluster,
    group_size: Count,
    stride: Count,
    world_size: Count | None,
) -> tuple[Column, Column, Column]:
    """Return bandwidth, latency and mean hop latency of every group, once per distinct group."""
    ranks = cluster.num_gpus if world_size is None else world_size
    columns = np.broadcast_arrays(group_size, stride, ranks)
    shape = columns[0].shape
    rows, which = np.unique(
        np.stack([column.ravel() for column in columns]), axis=1, return_inverse=True
    )
    found = np.array([link(cluster, *row)[:3] for row in rows.T.tolist()]).reshape(-1, 3)
    bandwidth, latency, hop = found[which.ravel()].T
    return bandwidth.reshape(shape), latency.reshape(shape), hop.reshape(shape)


def _leaves(span: NDArray[Any], world_size: NDArray[Any], domain_size: int) -> NDArray[np.bool_]:
    """Return whether some group leaves its domain: blocks that do not fill it straddle its edge."""
    leaves: NDArray[np.bool_] = (np.gcd(span, domain_size) != span) & (world_size > domain_size)
    return leaves


def _members(span: NDArray[Any], step: NDArray[Any], domain_size: int) -> NDArray[Any]:
    """Return the fewest ranks of a group in one domain; see ``group_link``."""
    members: NDArray[Any] = np.maximum(1, np.gcd(span, domain_size) // step)
    return members


def mesh_bandwidth(tier: Tier, members: NDArray[Any]) -> Column:
    """Return bytes/s of the inner link; in a full mesh, of the links to the other members."""
    if tier.peer_bandwidth is None:
        return np.full(members.shape, tier.bandwidth.value)
    # a single member does not use the link, which therefore does not limit the group
    links = np.where(members > 1, (members - 1) * tier.peer_bandwidth.value, tier.bandwidth.value)
    return np.minimum(links, tier.bandwidth.value)


def link_graph(cluster: Cluster) -> nx.Graph[Any]:
    """Return the cluster as a networkx graph: accelerators below switches, tier above tier.

    Nodes are ``("accelerator", rank)`` and ``(tier name, index of the domain)`` with the attribute
    ``accelerators``, the number below them. Edges have ``bandwidth`` in bytes/s one way (the total
    of all accelerators below the edge) and ``latency`` in seconds. 131,072 accelerators take about
    half a second.

    >>> from hardware_profiles.cluster.parse import parse_cluster
    >>> graph = link_graph(parse_cluster("2xDGX-A100-80GB"))
    >>> len(graph), graph.edges[("NVLink3", 0), ("InfiniBand HDR", 0)]["bandwidth"]
    (19, 200000000000.0)
    """
    import networkx

    graph: nx.Graph[Any] = networkx.Graph(name=cluster.name)
    lower = [("accelerator", rank) for rank in range(cluster.num_gpus)]
    graph.add_nodes_from(lower, accelerators=1)
    tree = tree_of(cluster)
    names = [level.name for level in cluster.levels or cluster.tiers]
    for name, place, above, bandwidth, latency in zip(
        names, tree.places, tree.above, tree.bandwidth, tree.latency, strict=True
    ):
        switches = [(name, index) for index in range(max(above) + 1)]
        counts = np.bincount(np.array(above)[place], minlength=len(switches))
        for switch, count in zip(switches, counts.tolist(), strict=True):
            graph.add_node(switch, accelerators=count)
        for index, upper in enumerate(above):
            graph.add_edge(
                lower[index],
                switches[upper],
                bandwidth=float(bandwidth[index]),
                latency=float(latency[index]),
            )
        lower = switches
    return graph


# --- as plain values, for plan.json ---


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Return plain JSON values that hold every figure, so that a file stands alone."""
    plain: dict[str, Any] = asdict(cluster)
    del plain["rank_order"]  # a plan's, which stands beside it
    if not cluster.levels:
        del plain["levels"]
    plain["accelerator"]["aliases"] = list(cluster.accelerator.aliases)
    plain["tiers"] = list(plain["tiers"])
    plain["notes"] = list(cluster.notes)
    return plain


def cluster_from_fields(source: Fields) -> Cluster:
    """Read and check what ``cluster_to_dict`` made, edited by hand or not."""
    source.refuse_unknown(name for name in Cluster.__slots__ if name != "rank_order")
    num_nodes = source.integer("num_nodes", low=1, high=MAX_GPUS)
    gpus_per_node = source.integer("gpus_per_node", low=1, high=MAX_GPUS)
    if num_nodes * gpus_per_node > MAX_GPUS:
        raise source.wrong(
            "num_nodes", num_nodes, f"such that nodes times accelerators is at most {MAX_GPUS:,}"
        )
    return Cluster(
        name=source.text("name"),
        accelerator=_accelerator(source.sub("accelerator")),
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        tiers=_tiers(source, num_nodes * gpus_per_node),
        notes=_texts(source, "notes"),
        host_memory=_optional(source, "host_memory"),
        nvme=_optional(source, "nvme"),
        host_links=source.integer("host_links", 0, low=0, high=MAX_GPUS),
        levels=levels_of_fields(source, num_nodes * gpus_per_node, _figure),
    )


def _tiers(source: Fields, num_gpus: int) -> tuple[Tier, ...]:
    tiers = tuple(
        _tier(Fields(_mapping(source, "tiers", values), f"{source.where}: tiers[{index}]"))
        for index, values in enumerate(source.items("tiers"))
    )
    sizes = [tier.domain_size for tier in tiers]
    if not sizes or sizes != sorted(set(sizes)) or sizes[-1] != num_gpus:
        raise source.wrong(
            "tiers", sizes, f"domain sizes that grow from the innermost tier to all {num_gpus:,}"
        )
    return tiers


def _tier(source: Fields) -> Tier:
    source.refuse_unknown(Tier.__slots__)
    return Tier(
        name=source.text("name"),
        domain_size=source.integer("domain_size", low=1, high=MAX_GPUS),
        bandwidth=_figure(source, "bandwidth"),
        latency=_figure(source, "latency", low=0.0),
        peer_bandwidth=_optional(source, "peer_bandwidth"),
        peer_latency=_optional(source, "peer_latency", low=0.0),
    )


def _accelerator(source: Fields) -> Accelerator:
    source.refuse_unknown(Accelerator.__slots__)
    return Accelerator(
        name=source.text("name"),
        device=source.text("device", choices=DEVICES),
        architecture=source.text("architecture"),
        memory_capacity=_figure(source, "memory_capacity"),
        memory_bandwidth=_figure(source, "memory_bandwidth"),
        peak_flops=_peaks(source),
        achievable_flops=_rates(source.sub("achievable_flops", {})),
        link=source.text("link"),
        link_bandwidth=_figure(source, "link_bandwidth"),
        link_share=_optional(source, "link_share", high=1.0),
        usable_memory=_optional(source, "usable_memory"),
        host_bandwidth=_optional(source, "host_bandwidth"),
        power=_optional(source, "power"),
        price=_optional(source, "price"),
        compute_units=_optional(source, "compute_units"),
        kernel_launch=_optional(source, "kernel_launch"),
        score_seconds=_optional(source, "score_seconds"),
        core_share=_optional(source, "core_share"),
        aliases=_texts(source, "aliases"),
    )


def _peaks(source: Fields) -> dict[str, Figure]:
    peaks = _rates(source.sub("peak_flops"))
    if not peaks:
        raise source.wrong("peak_flops", {}, "at least one precision")
    return peaks


def _rates(source: Fields) -> dict[str, Figure]:
    source.refuse_unknown(PRECISIONS)
    return {precision: _figure(source, precision) for precision in source.values}


def _figure(source: Fields, key: str, *, low: float = SMALLEST, high: float = 1e30) -> Figure:
    entry = source.sub(key)
    entry.refuse_unknown(Figure.__slots__)
    return Figure(
        value=entry.number("value", low=low, high=high),
        kind=entry.text("kind", choices=KINDS),
        source=entry.text("source"),
    )


def _optional(
    source: Fields, key: str, *, low: float = SMALLEST, high: float = 1e30
) -> Figure | None:
    return _figure(source, key, low=low, high=high) if key in source else None


def _texts(source: Fields, key: str) -> tuple[str, ...]:
    texts = source.items(key, ())
    if not all(isinstance(text, str) for text in texts):
        raise source.wrong(key, texts, "a list of strings")
    return tuple(texts)


def _mapping(source: Fields, key: str, values: object) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise source.wrong(key, values, "a list of objects with keys")
    return values
