"""Seconds of one training step, in parts that add up.

    step = ideal compute + recompute + tensor-parallel + experts + context-parallel
           + pipeline sends + host + bubble + exposed data-parallel + optimizer

A pipeline of stages r = 1..p that need tau_r seconds a micro-batch takes, for m micro-batches and v
virtual stages,

    m max(tau) + (sum(tau) - max(tau)) / v

the critical path of 1F1B and GPipe alike (Narayanan et al., arXiv:2104.04473, sec. 2.2). Units:
seconds.

Leaves out: data loading, logging, evaluation and checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import Real, pick
from cost_models.plan.plan import PlanTable
from cost_models.step_time.overlap import Hiding, at_the_end
from cost_models.step_time.parts import MICROBATCH_PARTS, RankSeconds, TimeParts
from cost_models.step_time.pipeline_bound import Floats, owners, pipeline_bound, sum_over_ranks


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

    Source: Narayanan et al. (arXiv:2104.04473), sec. 2.2, for the pipeline; each part's own
    formula.
    """
    each = np.stack([rank.microbatch for rank in ranks])
    slowest = np.argmax(each, axis=0)
    if bound is None:
        bound = _bound(ranks, positions, table)
    microbatches: Real = 1.0 * table.num_microbatches
    shared = core_share < 1.0
    bubble = np.maximum(0.0, bound - microbatches * np.max(each, axis=0))  # rounding
    if shared:
        bubble = _shared_cores_bubble(each, owners(positions), table, core_share, bubble)

    def seconds(name: str) -> Real:
        columns = [getattr(rank, name) for rank in ranks]
        if shared:  # the work of all ranks, one after another
            work: Real = microbatches * _sum_over_positions(columns, positions, table)
            return work / table.pipeline_parallel
        return microbatches * pick(columns, slowest)

    exposed, optimizer = at_the_end(ranks, table, hiding, on_gpu=on_gpu)
    parts = TimeParts(
        **{name: seconds(name) for name in MICROBATCH_PARTS},
        bubble=bubble,
        data_communication=exposed,
        optimizer=optimizer,
    )
    return parts, slowest


def _bound(
    ranks: Sequence[RankSeconds], positions: Sequence[Sequence[int]], table: PlanTable
) -> Real:
    """Lower bound of the seconds of the schedule."""
    owner = owners(positions)
    forward, backward, weights = (
        np.stack([getattr(rank, name) for rank in ranks])[owner]
        for name in ("forward_pass", "backward_pass", "weights")
    )
    return pipeline_bound(table, forward, backward, weights)


def _shared_cores_bubble(
    each: Floats, owner: NDArray[np.intp], table: PlanTable, core_share: float, bubble: Real
) -> Real:
    """Waits of a step where processes share cores; ``each``: seconds of a micro-batch by rank."""
    stages, longest = 1.0 * table.pipeline_parallel, np.max(each, axis=0)
    at_work = np.maximum(0.0, core_share * stages - 1.0) / np.maximum(1.0, stages - 1.0)
    mean = sum_over_ranks(each[owner]) / stages
    waits: Real = table.num_microbatches * (np.maximum(mean, core_share * longest) - mean)
    bubble = core_share * at_work * bubble
    return waits + bubble


def _sum_over_positions(
    columns: Sequence[Real], positions: Sequence[Sequence[int]], table: PlanTable
) -> Real:
    """Sum over all ranks of a pipeline."""
    weighted: Real = np.zeros(len(table))
    for alike, column in zip(positions, columns, strict=True):
        weighted = weighted + len(alike) * column
    return weighted
