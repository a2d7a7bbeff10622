"""Seconds of one training step, in parts that add up.

    step = ideal compute + recompute + tensor-parallel + experts + context-parallel
           + pipeline sends + host + bubble + exposed data-parallel + optimizer

A pipeline of stages r = 1..p that need tau_r seconds a micro-batch takes, for m micro-batches and v
virtual stages,

    m max(tau) + (sum(tau) - max(tau)) / v

the critical path of 1F1B and GPipe alike (Narayanan et al., arXiv:2104.04473, sec. 2.2). Units:
seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cost_models.arrays import Real, pick
from cost_models.plan.plan import PlanTable
from cost_models.step_time.overlap import Hiding, at_the_end
from cost_models.step_time.parts import RankSeconds, TimeParts
from cost_models.step_time.pipeline_bound import owners, pipeline_bound, sum_over_ranks


def step_seconds(
    ranks: Sequence[RankSeconds],
    positions: Sequence[Sequence[int]],
    table: PlanTable,
    hiding: Hiding,
    *,
    on_gpu: bool,
    core_share: float = 1.0,
    bound: Real | None = None,
) -> tuple[TimeParts, Real]:
    """Return the parts of a step of a whole pipeline, and the index of the slowest rank.

    ``positions``: the pipeline ranks that each of ``ranks`` stands for. The bubble is the time of
    the schedule (``bound``, or the lower bound ``pipeline_bound``) less the time of the slowest
    rank. ``core_share`` below one: processes share cores, and a waiting one leaves its cores to the
    others. With s of a core each, c = s p of p stages work at a time, and cores idle only at the
    start and the end, while fewer than c stages have work (mean(tau), with tau at s of a core):

        m max(mean(tau), s max(tau)) + s (c - 1)/(p - 1) bubble
    """
    each = np.stack([rank.microbatch for rank in ranks])
    slowest = np.argmax(each, axis=0)
    microbatches = 1.0 * table.num_microbatches
    longest = np.max(each, axis=0)
    owner = owners(positions)
    if bound is None:
        forward, backward, weights = (
            np.stack([getattr(rank, name) for rank in ranks])[owner]
            for name in ("forward_pass", "backward_pass", "weights")
        )
        bound = pipeline_bound(table, forward, backward, weights)
    bubble = np.maximum(0.0, bound - microbatches * longest)  # rounding
    if core_share < 1.0:
        summed = sum_over_ranks(each[owner])
        stages = 1.0 * table.pipeline_parallel
        at_work = np.maximum(0.0, core_share * stages - 1.0) / np.maximum(1.0, stages - 1.0)
        mean = summed / stages
        waits = microbatches * (np.maximum(mean, core_share * longest) - mean)
        bubble = waits + core_share * at_work * bubble

    def of_slowest(name: str) -> Real:
        columns = [getattr(rank, name) for rank in ranks]
        if core_share < 1.0:  # the work of all ranks, one after another
            weighted: Real = np.zeros(len(table))
            for ranks_of, column in zip(positions, columns, strict=True):
                weighted = weighted + len(ranks_of) * column
            return microbatches * weighted / table.pipeline_parallel
        return microbatches * pick(columns, slowest)

    exposed, optimizer = at_the_end(ranks, table, hiding, on_gpu=on_gpu)
    parts = TimeParts(
        compute=of_slowest("compute"),
        recompute=of_slowest("recompute"),
        host=of_slowest("host"),
        tensor_communication=of_slowest("tensor_communication"),
        expert_communication=of_slowest("expert_communication"),
        context_communication=of_slowest("context_communication"),
        pipeline_communication=of_slowest("pipeline_communication"),
        bubble=bubble,
        data_communication=exposed,
        optimizer=optimizer,
    )
    return parts, slowest
