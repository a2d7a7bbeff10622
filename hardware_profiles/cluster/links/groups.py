"""The cluster as a graph of links, and the link that a group of ranks sees.

Ranks are consecutive inside a node, node after node (in any order, on any tree: ``topology``). A
communication group has ``group_size`` (k) ranks that lie ``stride`` (s) apart; the ranks of a
cluster fall into such groups, block after block of k s ranks. Arguments are whole numbers or
columns of them; everything broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hardware_profiles.cluster.links.tree import (
    GroupLink,
    is_regular,
    neighbour_link,
    ring_link,
    tree_of,
)
from hardware_profiles.cluster.schema import Cluster, Tier

if TYPE_CHECKING:
    import networkx as nx  # heavy: imported where it is used

Count: TypeAlias = int | NDArray[np.integer[Any]]
Column: TypeAlias = NDArray[np.float64]


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

    The slowest rank of a pipeline when all send at once: half of its messages are activations for
    the next rank, half gradients for the previous one, so that its bandwidth is the harmonic mean
    of the two links. Both leave a domain that does not hold two whole stages, or where there are no
    more than two stages; otherwise one does. The pipeline's ``group_size`` determines whether any
    message leaves a domain: none does if whole groups (distance · group_size ranks) fill it.
    Without it, messages are assumed to leave every domain.

    >>> from hardware_profiles.cluster.parse import parse_cluster
    >>> bandwidth, _ = point_to_point_link(parse_cluster("2xDGX-A100-80GB"), np.array([1, 8]))
    >>> (bandwidth / 1e9).tolist()
    [46.15384615384615, 25.0]
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
    bandwidth = near = np.full(shape, peer.value)
    latency = np.full(shape, (inner.peer_latency or inner.latency).value)
    for domain, outer in pairwise(cluster.tiers):
        leaves = _leaves(span, ranks, domain.domain_size)
        share = np.minimum(bandwidth, (outer.peer_bandwidth or outer.bandwidth).value)
        bandwidth = np.where(leaves, share, bandwidth)
        both = leaves & ((2 * step > domain.domain_size) | (size == 2))
        near = np.where(both, share, near)
        latency = np.where(leaves, np.maximum(latency, outer.latency.value), latency)
    return bandwidth * (2.0 * near / (bandwidth + near)), latency


def of_distinct_groups(
    formula: Callable[..., Sequence[float]], results: int, *columns: Count
) -> tuple[Column, ...]:
    """Return the columns of the ``results`` that a formula has for the numbers of a row.

    It is evaluated once per distinct row.
    """
    equal = np.broadcast_arrays(*columns)
    rows, which = np.unique(
        np.stack([column.ravel() for column in equal]), axis=1, return_inverse=True
    )
    found = np.array([formula(*row) for row in rows.T.tolist()]).reshape(-1, results)
    return tuple(column[which.ravel()].reshape(equal[0].shape) for column in found.T)


def _on_tree(
    link: Callable[[Cluster, int, int, int], GroupLink],
    cluster: Cluster,
    group_size: Count,
    stride: Count,
    world_size: Count | None,
) -> tuple[Column, ...]:
    """Return bandwidth, latency and mean hop latency of every group."""
    ranks = cluster.num_gpus if world_size is None else world_size

    def of_group(*group: int) -> tuple[float, ...]:
        return link(cluster, *group)[:3]

    return of_distinct_groups(of_group, 3, group_size, stride, ranks)


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
