"""Seconds of collectives: by kind and axis, and of a rank's whole traffic by axis.

Units: bytes, bytes/s, seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from cost_models.arrays import Count, Real, holds
from cost_models.columnar.columns import on_distinct_rows
from cost_models.communication.link_columns import LinkColumns
from cost_models.communication.ring_and_tree import (
    COLLECTIVE_START,
    all_reduce,
    pairwise_all_to_all,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    send,
)
from cost_models.communication.traffic import Traffic
from cost_models.communication.volumes import AXES, KINDS
from cost_models.plan.plan import PlanTable
from cost_models.uncertainty import ASSUMED_HOST, ASSUMED_LINK
from hardware_profiles.cluster.catalogue import link_share
from hardware_profiles.cluster.links.groups import group_link, mean_hop_latency, point_to_point_link
from hardware_profiles.cluster.links.nvlink_domains import exchange_bandwidth
from hardware_profiles.cluster.links.tree import levels_in_nodes, with_bandwidths
from hardware_profiles.cluster.schema import Accelerator, Cluster, Figure, Tier
from hardware_profiles.software.trainer import SoftwareProfile

MAX_FUNCTIONS: Final = 64
# of a host's memory bandwidth, what 8 RTX 5090 without peer-to-peer write and read in an all-reduce
# of 28 GB/s each: 448 of 614 GB/s (NVIDIA/nccl, issue 1639)
STAGED_SHARE: Final = 0.73
# of what a ring reaches between nodes (0.94 of the line), an all-to-all of NCCL: 0.53 to 0.73 of
# the line, median 0.70, with 56 to 64 MiB a rank on 2 to 32 nodes of B300, 4 and 8 of H100
# (awslabs/awsome-distributed-ai@46793a8d: micro-benchmarks/expert-parallelism/
# ep-backend-comparison/RESULTS.md and RESULTS-p5.md: bus bandwidth of alltoall_perf over EFA, of
# which (n - m)/(n - 1) leaves a node with m of n ranks)
EXCHANGE_SHARE: Final = 0.75
# bytes/s of a node that NCCL reaches by TCP where the host's processors are the limit: 1.7 GB/s of
# 25 Gb/s (NVIDIA/nccl-tests, issue 83); slower lines are the limit themselves
TCP_BANDWIDTH: Final = 1.7e9
_FUNCTIONS: dict[Any, tuple[Callable[..., Any], Cluster, SoftwareProfile]] = {}


def traffic_seconds(
    kind: str,
    traffic: Traffic,
    ranks: Count,
    bandwidth: Real,
    latency: Real,
    *,
    hop: Real | None = None,
    gloo: bool = False,
) -> Real:
    """Seconds of all collectives of one kind on one axis: bytes once, latency for each.

    ``hop``: the mean latency of a ring's hops, by default the slowest. gloo always uses a ring, and
    implements reduce_scatter as an all-reduce (torch: ProcessGroupGloo.cpp, reduce_scatter).
    """
    cost = {
        "all_reduce": ring_all_reduce,
        "all_gather": ring_all_gather,
        "reduce_scatter": ring_all_reduce if gloo else ring_reduce_scatter,
        "all_to_all": pairwise_all_to_all,
    }
    count = np.maximum(traffic.count, 1)
    mean = traffic.size / count
    hop = latency if hop is None else hop
    if kind == "send":
        one = send(mean, bandwidth, latency)
    elif kind == "all_reduce" and not gloo:
        one = all_reduce(mean, ranks, bandwidth, latency, hop)
    else:
        one = cost[kind](mean, ranks, bandwidth, latency if kind == "all_to_all" else hop)
    one = one + (0.0 if gloo else COLLECTIVE_START)
    happens = np.greater(traffic.count, 0) & np.greater(ranks, 1)
    return np.where(happens, count * one, 0.0)


def achieved(cluster: Cluster, inside: float, between: float) -> Cluster:
    """Return the cluster with the bandwidths that large collectives reach.

    ``inside``: share of the bandwidth on the innermost tier, between the accelerators of a node or
    rack, unless that of the accelerator's own link is measured (``link_share``). ``between``: share
    on the network, less where the catalogue has a smaller one for that kind of link (TCP) and its
    bandwidth was not measured, but no less than ``TCP_BANDWIDTH`` of a node.
    """
    if _is_own_link(cluster.accelerator, cluster.tiers[0]):
        inside = _own_share(cluster, inside)

    def lowered(tier: Tier, share: float) -> Tier:
        def figure(nominal: Figure) -> Figure:
            return replace(nominal, value=share * nominal.value)

        peer = tier.peer_bandwidth
        return replace(
            tier,
            bandwidth=figure(tier.bandwidth),
            peer_bandwidth=None if peer is None else figure(peer),
        )

    innermost = cluster.gpus_per_node if cluster.levels else cluster.tiers[0].domain_size
    alone = innermost == 1  # one accelerator a node: network only
    each = cluster.gpus_per_node
    outer = [_network_share(tier.name, tier.bandwidth, between, each) for tier in cluster.tiers]
    shares = outer if alone else [inside, *outer[1:]]
    tiers = tuple(lowered(tier, share) for tier, share in zip(cluster.tiers, shares, strict=True))
    if not cluster.levels:
        return replace(cluster, tiers=tiers)
    levels = []
    for level, in_nodes in zip(cluster.levels, levels_in_nodes(cluster), strict=True):
        network = _network_share(level.name, level.bandwidth[0], between, each)
        levels.append(with_bandwidths(level, inside if in_nodes and not alone else network))
    return replace(cluster, tiers=tiers, levels=tuple(levels))


def _own_share(cluster: Cluster, usual: float) -> float:
    """Return the share of the accelerators' own link that collectives reach inside a node.

    Without peer-to-peer, every accelerator of the node writes what it sends to the host's memory,
    where the next one reads it. All transfer at once, whatever groups they form, and share what the
    memory can move: 2 n W of n accelerators with W bytes/s each. A measured share holds as it is.

    Leaves out: what hosts differ in (``ASSUMED_HOST``), as two sockets and PCIe switches.
    """
    chip = cluster.accelerator
    share = usual if chip.link_share is None else chip.link_share.value
    memory = chip.host_memory_bandwidth
    if memory is None or (chip.link_share is not None and chip.link_share.kind == "measured"):
        return share
    each = STAGED_SHARE * memory.value / (2 * cluster.gpus_per_node)
    return min(share, each / cluster.tiers[0].bandwidth.value)


def _is_own_link(chip: Accelerator, tier: Tier) -> bool:
    """Whether a tier is the accelerator's own link, or described as a slower one of its kind."""
    own, here = chip.link_bandwidth, tier.bandwidth
    slower = here.value < own.value and here.kind != "measured"
    return tier.name == chip.link and (slower or here.value == own.value)


def _network_share(link: str, bandwidth: Figure, usual: float, gpus_per_node: int) -> float:
    share = link_share(link)
    if share is None or bandwidth.kind == "measured":
        return usual
    slow = TCP_BANDWIDTH / (gpus_per_node * bandwidth.value)
    return min(usual, max(share.value, slow))


def links_may_differ(cluster: Cluster) -> float:
    """Return the factor by which links may be slower or faster than assumed; 1: none is assumed."""
    chip = cluster.accelerator
    if chip.device == "cpu" or cluster.num_gpus == 1:
        return 1.0
    inner, *outer = cluster.tiers
    figures: list[Figure | None] = [tier.bandwidth for tier in cluster.tiers]
    figures += [link_share(tier.name) for tier in (outer if inner.domain_size > 1 else [inner])]
    if inner.domain_size > 1 and _is_own_link(chip, inner):
        share = chip.link_share
        figures.append(share)
        if chip.host_memory_bandwidth and share is not None and share.kind == "assumed":
            return ASSUMED_HOST
    assumed = any(figure is not None and figure.kind == "assumed" for figure in figures)
    return ASSUMED_LINK if assumed else 1.0


def achieved_by(software: SoftwareProfile, cluster: Cluster) -> Cluster:
    """Return the cluster with the bandwidths that a trainer's collectives reach."""
    if cluster.accelerator.device == "cpu":  # measured
        return cluster
    communication = software.communication
    return achieved(cluster, communication.bus_efficiency, communication.network_efficiency)


def _on_cluster(
    formula: Callable[..., Any],
    cluster: Cluster,
    software: SoftwareProfile,
    options: Mapping[str, Any],
) -> Callable[..., Any]:
    """Return ``formula(cluster, *groups, **options)`` as a function of columns of groups.

    The same function for the same arguments, so that columns keep its results
    (``on_distinct_rows``).
    """
    key = (formula, id(cluster), id(software), *options.items())
    if key not in _FUNCTIONS:
        if len(_FUNCTIONS) >= MAX_FUNCTIONS:
            _FUNCTIONS.clear()
        reachable = achieved_by(software, cluster)

        def of_groups(*groups: Any) -> Any:
            return formula(reachable, *groups, **options)

        _FUNCTIONS[key] = on_distinct_rows(of_groups), cluster, software  # identities in the key
    return _FUNCTIONS[key][0]


def axis_groups(table: PlanTable) -> dict[str, tuple[Count, Count]]:
    """Return the size of the groups of each axis, and the stride between their ranks.

    The grid is (pipeline, replicate, shard, context, tensor), tensor fastest: a tensor group is
    contiguous, the ranks that share a model's shards (shard and context) stride over it, replicas
    over those, and pipeline neighbours are a whole stage apart. A layer's experts are shared by
    neighbours among the data ranks (and among the tensor ranks, if experts are not sharded over
    these).
    """
    tensor, data, replicas = table.tensor_parallel, table.shard_ranks, table.dp_replicate
    ones = np.ones_like(tensor)
    between = np.where(table.expert_tensor_parallel, tensor, 1)
    stage = tensor * table.data_parallel * table.context_parallel  # with all replicas
    return {
        "tensor": (tensor, ones),
        "data": (data, tensor),
        "replicate": (replicas, tensor * data),
        "secondary": (table.secondary_ranks, tensor),
        "expert": (table.expert_parallel, between),
        "expert_data": (np.maximum(1, table.expert_shard_ranks), between * table.expert_parallel),
        "context": (table.context_parallel, tensor),
        "pipeline": (table.pipeline_parallel, stage),
        "world": (table.world_size, ones),
    }


def axis_seconds(
    traffic: Mapping[tuple[str, str], Traffic],
    cluster: Cluster,
    software: SoftwareProfile,
    table: PlanTable,
    *,
    copies: int = 0,
    groups: tuple[int, int] = (1, 1),
    links: LinkColumns | None = None,
) -> dict[str, Real]:
    """Seconds of all traffic of a rank in one step, by axis.

    ``copies``: experts of a token, if it is sent to each node once; ``groups``: of experts, in all
    and for a token (``exchange_bandwidth``).
    ``links``: of each row, where these are on different clusters.

    An all-to-all of NCCL reaches ``EXCHANGE_SHARE`` of a ring's bandwidth between nodes; kernels
    that send a token to a node once are priced at all of it.
    """
    measured = cluster.accelerator.device == "cpu"
    if links is None:

        def of(formula: Callable[..., Any], *groups: Count, **options: Any) -> Any:
            return _on_cluster(formula, cluster, software, options)(*groups)
    else:
        of = links.of
    layout = axis_groups(table)
    seconds: dict[str, Real] = {}
    for axis in AXES:
        total: Real = np.zeros(len(table))
        own = {kind: traffic[axis, kind] for kind in KINDS if (axis, kind) in traffic}
        own = {kind: each for kind, each in own.items() if holds(each.count)}
        if not own:
            seconds[axis] = total
            continue
        ranks, stride = layout[axis]
        hop = None
        if axis == "pipeline":
            bandwidth, latency = of(point_to_point_link, stride, ranks)
            ranks = 2 * np.ones_like(stride)  # sender and receiver
        else:
            bandwidth, latency = of(group_link, ranks, stride)
            hop = of(mean_hop_latency, ranks, stride)
        for kind, each in own.items():
            reached = bandwidth
            if kind == "all_to_all":
                once = copies if axis == "expert" else 0
                share = 1.0 if once or measured else EXCHANGE_SHARE
                options = {"copies": once, "groups": groups, "share": share}
                reached = of(exchange_bandwidth, ranks, stride, **options)
            total = total + traffic_seconds(
                kind, each, ranks, reached, latency, hop=hop, gloo=measured
            )
        seconds[axis] = total
    return seconds
