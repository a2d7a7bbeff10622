"""Seconds of a step of a module of unknown layers: a roofline over the operators of its trace.

    pass       sum over operators of max(FLOP / R, bytes / beta), and exposed launch time
    data       ZeRO 0 all-reduces the gradients once a step; 1 gathers weights and
               reduce-scatters gradients once; 2 reduce-scatters at every micro-batch; 3 also
               gathers every block twice, parameters outside of blocks once a micro-batch

Symbols   R FLOP/s of a typical large matmul   beta memory bandwidth [bytes/s]
Units     seconds; every argument may be a column of a plan table.

Source: Williams, Waterman, Patterson, Roofline, CACM 52 (2009); torch's FSDP2 for the traffic.
Leaves out: lower rates of kernels of other shapes (convolutions as matmuls of equal FLOP), fusion.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.communication.seconds import axis_seconds
from cost_models.communication.traffic import Traffic
from cost_models.compute.elementwise import optimizer_seconds
from cost_models.compute.kernel_launch import host_wait
from cost_models.compute.rates import Rates, rates
from cost_models.plan.plan import PlanTable
from cost_models.plan.recompute import RECOMPUTE
from cost_models.plan.workload import Workload
from cost_models.step_time.optimizer_update import update_accesses
from cost_models.step_time.overlap import Hiding, exposed_data_seconds
from cost_models.step_time.parts import RankSeconds, TimeParts
from cost_models.traced.memory import BlockSizes
from cost_models.traced.module import OUTSIDE, Operators, TracedModule
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.software.trainer import SoftwareProfile

GATHERS_A_BLOCK: Final = 2.0  # under ZeRO-3: before its forward and before its backward pass


def traced_time(
    module: TracedModule,
    workload: Workload,
    cluster: Cluster,
    software: SoftwareProfile,
    table: PlanTable,
) -> TimeParts:
    """Return the seconds of a step in parts; shapes: columns of the table's length."""
    rate = rates(cluster.accelerator, module.precision, software).of_unknown_shapes
    sizes = BlockSizes.of(module, np.where(table.zero_stage == 0, 1, table.dp_shard))
    zeros = np.zeros(len(table))
    forward, again, backward, waits_forward, waits_backward = (zeros.copy() for _ in range(5))
    for code in np.unique(table.recompute):
        rows = table.recompute == code
        count = table.micro_batch_size[rows]
        plain, one = module.passes["none"], module.passes[RECOMPUTE[int(code)]]
        ahead, back = (pass_seconds(o, count, rate) for o in (one.forward, one.backward))
        forward[rows], backward[rows] = ahead, pass_seconds(plain.backward, count, rate)
        again[rows] = back - backward[rows]
        groups = np.where(table.data_parallel[rows] > 1, len(module.blocks) + 1.0, 0.0)
        around = rate.operator * software.host.group_operators * groups
        waits_forward[rows] = host_wait(_starting(one.forward, rate) + around, ahead, rate)
        waits_backward[rows] = host_wait(_starting(one.backward, rate) + around, back, rate)
    traffic = axis_seconds(_traffic(module, sizes, table), cluster, software, table)
    elements = sum((g.elements(sizes.ranks, trainable=True) for g in module.blocks), start=zeros)
    elements = elements + module.outside.elements(sizes.ranks, trainable=True)
    seconds = RankSeconds(
        compute=forward + backward,
        recompute=again,
        host=waits_forward + waits_backward,
        tensor_communication=zeros,
        pipeline_communication=zeros,
        backward=backward + again + waits_backward,
        host_backward=waits_backward,
        weights=zeros,
        data_communication=traffic["data"],
        replica_communication=traffic["replicate"],
        optimizer=optimizer_seconds(elements, rate, update_accesses(workload, software))
        + software.host.step_operators * rate.operator,
    )
    exposed = exposed_data_seconds(
        seconds, table, Hiding.of(software), on_gpu=not rate.host_is_device
    )
    times = table.num_microbatches
    parts = dict.fromkeys(TimeParts.__struct_fields__, zeros) | {
        "compute": times * seconds.compute,
        "recompute": times * seconds.recompute,
        "host": times * seconds.host,
        "data_communication": exposed,
        "optimizer": seconds.optimizer,
    }
    return TimeParts(**parts)


def pass_seconds(operators: Operators, rows: Count, rate: Rates) -> Real:
    """Seconds of all operators of one pass, each bound by its FLOP or its bytes."""
    total: Real = np.zeros(np.shape(rows))
    work, moved = operators.flops, operators.bytes
    for kind, count in enumerate(operators.count):
        flops = work.constant[kind] + work.per_row[kind] * np.multiply(1.0, rows)
        size = moved.constant[kind] + moved.per_row[kind] * np.multiply(1.0, rows)
        total = total + count * np.maximum(flops / rate.matmul, size / rate.memory)
    return total


def pass_flops(operators: Operators, rows: float) -> float:
    """FLOP of one pass over ``rows`` rows."""
    kinds = zip(operators.count, operators.flops.constant, operators.flops.per_row, strict=True)
    return sum(count * (constant + each * rows) for count, constant, each in kinds)


def _starting(operators: Operators, rate: Rates) -> float:
    return rate.operator * sum(operators.count)


def _traffic(
    module: TracedModule, sizes: BlockSizes, table: PlanTable
) -> dict[tuple[str, str], Traffic]:
    """Bytes of whole tensors in a rank's collectives in one step, by axis and kind."""
    zero, times = table.zero_stage, 1.0 * table.num_microbatches
    shards = sizes.ranks > 1
    groups = len(module.blocks) + 1
    weights = sizes.ranks * sizes.total("weight_shards")
    outside = sizes.ranks * sizes.weight_shards[OUTSIDE]
    gradients = sizes.ranks * sizes.total("gradient_shards")
    each = times * (GATHERS_A_BLOCK * (weights - outside) + outside)
    gathers = np.where(zero >= 3, times * (GATHERS_A_BLOCK * (groups - 1) + 1), groups)
    reductions = np.where(zero >= 2, times, 1.0)
    copies = np.where(zero == 0, table.data_parallel, table.dp_replicate) > 1
    alone = zero == 0  # all data ranks are replicas
    replicas = np.where(copies, reductions, 0.0) * groups
    size = np.where(copies, reductions, 0.0) * sizes.total("gradient_shards")
    nothing = np.zeros(len(table))
    return {
        ("data", "all_gather"): Traffic(
            np.where(shards, gathers, 0), np.where(shards, np.where(zero >= 3, each, weights), 0.0)
        ),
        ("data", "reduce_scatter"): Traffic(
            np.where(shards, reductions * groups, 0), np.where(shards, reductions * gradients, 0.0)
        ),
        ("data", "all_reduce"): Traffic(
            np.where(alone, replicas, 0), np.where(alone, size, nothing)
        ),
        ("replicate", "all_reduce"): Traffic(
            np.where(alone, 0, replicas), np.where(alone, nothing, size)
        ),
    }
