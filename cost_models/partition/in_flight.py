"""Micro-batches in flight on a pipeline rank, and pending weight gradients, by schedule.

Symbols   p pipeline_parallel   v virtual_stages (stages on one rank)   m num_microbatches
          r rank in the pipeline   g micro-batches a round

Leaves out: parts of a pass; a micro-batch counts whole until its backward pass has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from cost_models.arrays import Count, Real, among, holds
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.partition.stages import PipelineRank
from cost_models.plan.plan import ONE_F_ONE_B, SCHEDULES, PlanTable
from hardware_profiles.software.trainer import SoftwareProfile

INTERLEAVED: Final = SCHEDULES.index("interleaved_1f1b")
InFlight = tuple[Real, Real]  # stage inputs in flight, stages with pending weight gradients


def in_flight_peaks(
    table: PlanTable, rank: PipelineRank, extra: Count | None = None
) -> list[InFlight]:
    """Return the points of a step at one of which a rank's memory is largest.

    Each is a pair, counted in stages (1/v of the rank's layers): stage inputs whose activations are
    kept, and stages of micro-batches whose weight gradients are pending. The rows of ``table``
    share the stages; schedules with fewer points repeat their last one. ``extra``: stages more, of
    at most all micro-batches, where the backward pass is whole (``overlapped_exchange_stages``).
    """
    schedule = table.pipeline_schedule
    microbatches, pipeline = table.num_microbatches, table.pipeline_parallel
    virtual, index = table.virtual_stages, rank.index
    none = np.zeros(len(table))

    def zero_bubble() -> tuple[InFlight, ...]:
        return peaks_zero_bubble(microbatches, pipeline, virtual, index)

    by_schedule: dict[str, Callable[[], tuple[InFlight, ...]]] = {
        "gpipe": lambda: ((in_flight_gpipe(microbatches) * virtual, none),),
        "1f1b": lambda: ((in_flight_1f1b(microbatches, pipeline, index), none),),
        "interleaved_1f1b": lambda: (
            (in_flight_interleaved(microbatches, pipeline, virtual, index), none),
        ),
        "zero_bubble": zero_bubble,
        "zbv": lambda: peaks_zbv(pipeline, index),
        "dualpipev": lambda: peaks_dualpipev(pipeline, index),
        "interleaved_zero_bubble": zero_bubble,
    }
    chosen, moments = [], []
    for name, points in by_schedule.items():
        rows = (schedule == SCHEDULES.index(name)) & (pipeline > 1)
        if holds(rows):
            chosen.append(rows)
            moments.append(points())
    found: list[InFlight] = []
    for number in range(max(map(len, moments), default=1)):
        of_each = [points[min(number, len(points) - 1)] for points in moments]
        # without a pipeline each micro-batch's backward pass ends before the next one starts
        flying, due = 1.0 * virtual, none
        if chosen:
            flying = np.select(chosen, [f for f, _ in of_each], flying)
            due = np.select(chosen, [d for _, d in of_each], 0.0)
        if extra is not None:
            whole = ~among(schedule, SPLIT_CODES) | (pipeline == 1)
            more = np.minimum(flying + extra, virtual * microbatches)
            flying = np.where(whole, more, flying)
        found.append((flying, due))
    return found


def overlapped_exchange_stages(table: PlanTable, software: SoftwareProfile) -> Count | None:
    """Stages in flight in addition where tokens travel to experts behind another micro-batch.

    One: the forward pass of the next micro-batch runs together with a backward pass. None: the
    trainer overlaps no exchange. Source: Megatron-LM core/pipeline_parallel/combined_1f1b.py;
    schedules.py, get_pp_rank_microbatches (one warm-up pass more with
    overlap_moe_expert_parallel_comm).

    >>> from cost_models.plan.plan import Plan
    >>> from hardware_profiles.software.trainer import software_profile
    >>> table = PlanTable.from_plans([Plan(expert_parallel=8), Plan()])
    >>> overlapped_exchange_stages(table, software_profile("nemo+overlapped-experts")).tolist()
    [1, 0]
    """
    overlap = software.overlap
    if not (overlap.expert_exchange_between_nodes or overlap.expert_exchange_inside_nodes):
        return None
    return np.where(np.greater(table.expert_parallel, 1), 1, 0)


def weight_gradients_pending_at_end(table: PlanTable, rank: PipelineRank) -> Real:
    """Micro-batches with pending weight gradients when a stage's last ones are computed.

    One stage for one stage a rank; with several stages the others' are pending as well, at most r +
    1.
    """
    split = among(table.pipeline_schedule, SPLIT_CODES) & (table.pipeline_parallel > 1)
    stages = np.where(np.equal(rank.num_stages, 1), 1.0, rank.index + 1.0)
    return np.where(split, stages / rank.num_stages, 0.0)


def late_rank(table: PlanTable) -> Count:
    """Return the pipeline rank from which on ranks of equal contents may need the most memory.

        1F1B, interleaved   the first one with fewer than m micro-batches in flight: at its peak it
                            has the gradients of finished ones, which earlier ranks do not have yet
        split backward      p: the last one has the most pending weight gradients
        others              0: no later rank needs more

    Of the earlier ranks the first one needs the most. Interleaved: (v - 1) g + 2 (p - 1 - r) + 1 <
    v m. Shapes: a column.

    Source: derived from the orders of ``schedules.actions``; the tests compare it with the peaks of
    all ranks.
    """
    schedule, pipeline = table.pipeline_schedule, table.pipeline_parallel
    microbatches, virtual = table.num_microbatches, table.virtual_stages
    inputs = virtual * microbatches - (virtual - 1) * _per_round(microbatches, pipeline)
    return np.select(
        [schedule == ONE_F_ONE_B, schedule == INTERLEAVED, among(schedule, SPLIT_CODES)],
        [pipeline - microbatches + 1, pipeline - inputs // 2, pipeline],
        0,
    )


def _per_round(num_microbatches: Count, pipeline_parallel: Count) -> Count:
    """Micro-batches a round of interleaved schedules: g = m / max(1, floor(m / p))."""
    rounds = np.maximum(1, np.floor_divide(num_microbatches, pipeline_parallel))
    return np.floor_divide(num_microbatches, rounds)


def in_flight_gpipe(num_microbatches: Count) -> Real:
    """Micro-batches whose activations a rank keeps under GPipe: all m of them.

    Source: Huang et al., GPipe (arXiv:1811.06965), sec. 2.3.
    """
    return np.multiply(1.0, num_microbatches)


def in_flight_1f1b(num_microbatches: Count, pipeline_parallel: Count, rank: int) -> Real:
    """Micro-batches in flight under 1F1B: min(m, p - r).

    Source: Narayanan et al. (arXiv:2104.04473), sec. 2.2.1 (PipeDream-Flush).

    >>> float(in_flight_1f1b(16, 4, 0)), float(in_flight_1f1b(16, 4, 3))
    (4.0, 1.0)
    """
    return np.multiply(1.0, np.minimum(num_microbatches, np.subtract(pipeline_parallel, rank)))


def in_flight_interleaved(
    num_microbatches: Count, pipeline_parallel: Count, virtual_stages: Count, rank: int
) -> Real:
    """Stage inputs in flight under interleaved 1F1B, counted in stages (1/v of a rank's layers).

        warm-up  min(v m, (v - 1) g + 2 (p - 1 - r)),
        g = m / max(1, floor(m / p)) micro-batches a round
        in flight  min(v m, warm-up + 1)

    Source: Narayanan et al. (arXiv:2104.04473), sec. 2.2.2; the warm-up of torch's
    ScheduleInterleaved1F1B (rounds of g micro-batches).
    """
    per_round = _per_round(num_microbatches, pipeline_parallel)
    total = np.multiply(virtual_stages, num_microbatches)
    warm_up = (np.subtract(virtual_stages, 1)) * per_round + 2 * (
        np.subtract(pipeline_parallel, 1) - rank
    )
    flying: Real = np.multiply(1.0, np.minimum(total, warm_up + 1))
    return flying


def peaks_zero_bubble(
    num_microbatches: Count, pipeline_parallel: Count, virtual_stages: Count, rank: int
) -> tuple[InFlight, ...]:
    """Points of largest memory under ZB-H1 (v = 1) and its interleaved form, counted in stages.

        (w + 1, r)   and   (w, r + 1)    w = (v - 1) g + p - 1 - r warm-up passes

    Source: Qi et al. (arXiv:2401.10241), sec. 3.1: as many micro-batches as the first rank of 1F1B;
    the order of torch's ScheduleInterleavedZeroBubble (rounds of g micro-batches, m >= p).

    >>> [(float(f), float(d)) for f, d in peaks_zero_bubble(8, 4, 1, 2)]
    [(2.0, 2.0), (1.0, 3.0)]
    """
    per_round = _per_round(num_microbatches, pipeline_parallel)
    warm_up = np.multiply(1.0, np.subtract(virtual_stages, 1)) * per_round
    warm_up = warm_up + np.subtract(pipeline_parallel, 1.0 + rank)
    late = 0.0 * warm_up + rank
    return (warm_up + 1.0, late), (warm_up, late + 1.0)


def peaks_zbv(pipeline_parallel: Count, rank: int) -> tuple[InFlight, ...]:
    """Points of largest memory under ZB-V, counted in stages (half a rank's layers).

        (2 p, 0)   (2 p - 1, 1)   (p - 1 - r, 2 r + 1) at the end        m >= 2 p - 1

    Source: Qi et al. (arXiv:2401.10241), sec. 6: p micro-batches of a rank's layers on every rank.

    >>> [(float(f), float(d)) for f, d in peaks_zbv(4, 1)]
    [(8.0, 0.0), (7.0, 1.0), (2.0, 3.0)]
    """
    stages = np.multiply(2.0, pipeline_parallel)
    none = np.zeros_like(stages)
    end = np.subtract(pipeline_parallel, 1.0 + rank)
    return (stages, none), (stages - 1.0, none + 1.0), (end, none + 2.0 * rank + 1.0)


def peaks_dualpipev(pipeline_parallel: Count, rank: int) -> tuple[InFlight, ...]:
    """Points of largest memory under DualPipeV, counted in stages (half a rank's layers).

        (2 p + 1, 0)   (2 p - 1, 1) except on the last rank   (p - 1 - r, r + 1) at the end

    Source: DeepSeek-AI (arXiv:2412.19437), table 2: p + 1 micro-batches; torch's ScheduleDualPipeV.

    >>> [(float(f), float(d)) for f, d in peaks_dualpipev(4, 1)]
    [(9.0, 0.0), (7.0, 1.0), (2.0, 2.0)]
    """
    stages = np.multiply(2.0, pipeline_parallel)
    none = np.zeros_like(stages)
    end = np.subtract(pipeline_parallel, 1.0 + rank)
    turns = np.where(end > 0, 1.0, 0.0)
    return (stages + 1.0, none), ((stages - 1.0) * turns, turns), (end, none + rank + 1.0)
