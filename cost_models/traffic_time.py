"""Seconds of collectives: all of one kind on one axis, and of a rank's whole traffic by axis.

Units: bytes, bytes/s, seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.collectives import (
    COLLECTIVE_START,
    all_reduce,
    pairwise_all_to_all,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    send,
)
from cost_models.columns import on_distinct_rows
from cost_models.communication import AXES, KINDS
from cost_models.plan import PlanTable
from cost_models.traffic import Traffic
from hardware_profiles.cluster import group_link, point_to_point_link
from hardware_profiles.schema import Cluster
from hardware_profiles.software import SoftwareProfile


def traffic_seconds(
    kind: str,
    traffic: Traffic,
    ranks: Count,
    bandwidth: Real,
    latency: Real,
    *,
    gloo: bool = False,
) -> Real:
    """Seconds of all collectives of one kind on one axis: bytes once, latency for each.

    gloo always takes a ring, and reduces everything everywhere to scatter it (torch:
    ProcessGroupGloo.cpp, reduce_scatter).
    """
    cost = {
        "all_reduce": ring_all_reduce if gloo else all_reduce,
        "all_gather": ring_all_gather,
        "reduce_scatter": ring_all_reduce if gloo else ring_reduce_scatter,
        "all_to_all": pairwise_all_to_all,
    }
    count = np.maximum(traffic.count, 1)
    mean = traffic.size / count
    one = (
        send(mean, bandwidth, latency)
        if kind == "send"
        else cost[kind](mean, ranks, bandwidth, latency)
    )
    one = one + (0.0 if gloo else COLLECTIVE_START)
    happens = np.greater(traffic.count, 0) & np.greater(ranks, 1)
    return np.where(happens, count * one, 0.0)


def axis_seconds(
    traffic: Mapping[tuple[str, str], Traffic],
    cluster: Cluster,
    software: SoftwareProfile,
    table: PlanTable,
) -> dict[str, Real]:
    """Seconds of all traffic of a rank in one step, by axis.

    The grid is (pipeline, replicate, shard, context, tensor), tensor fastest: a tensor group is
    contiguous, the ranks that share a model's shards (shard and context) stride over it, replicas
    over those, and pipeline neighbours are all of them apart. A layer's experts are shared by
    neighbours among the data (and, where these hold experts whole, tensor) ranks.
    """
    tensor, data, replicas = table.tensor_parallel, table.shard_ranks, table.dp_replicate
    measured = cluster.accelerator.device == "cpu"
    efficiency = 1.0 if measured else software.bus_efficiency
    ones = np.ones_like(tensor)
    between = np.where(table.expert_tensor_parallel, tensor, 1)
    layout = {
        "tensor": (tensor, ones),
        "data": (data, tensor),
        "replicate": (replicas, tensor * data),
        "secondary": (table.secondary_ranks, tensor),
        "expert": (table.expert_parallel, between),
        "expert_data": (np.maximum(1, table.expert_shard_ranks), between * table.expert_parallel),
        "context": (table.context_parallel, tensor),
        "world": (table.world_size, ones),
    }
    seconds: dict[str, Real] = {}
    for axis in AXES:
        total: Real = np.zeros(len(table))
        ranks: Count = 2 * ones
        if axis == "pipeline":
            bandwidth, latency = on_distinct_rows(point_to_point_link)(
                cluster, tensor * data * replicas, group_size=table.pipeline_parallel
            )
        else:
            ranks, stride = layout[axis]
            bandwidth, latency = on_distinct_rows(group_link)(cluster, ranks, stride)
        for kind in KINDS:
            if (axis, kind) in traffic:
                total = total + traffic_seconds(
                    kind,
                    traffic[axis, kind],
                    ranks,
                    efficiency * bandwidth,
                    latency,
                    gloo=measured,
                )
        seconds[axis] = total
    return seconds
