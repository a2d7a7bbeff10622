"""Lower bounds of a pipeline's seconds for the micro-batches of a step, in closed form.

Symbols   p pipeline_parallel   v virtual_stages   m num_microbatches   r rank
          f, i, w  seconds of a rank's layers for one micro-batch: forward, gradients of inputs,
          deferred gradients of weights (0 where the backward pass is not split)
Units     seconds. Arrays of ranks are (p, rows), in the order of the ranks.

A rank r is busy m (f + i + w) seconds. In addition it waits

    head   for the first micro-batch to arrive
    gaps   between its first forward and its first backward pass, while the first micro-batch runs
           to the end of the pipeline and back, less the forward passes that the rank runs
           meanwhile; and again between its last forward and its last backward pass
    tail   for the last micro-batch's backward passes on the ranks before it

so the largest sum over the ranks is a lower bound of every order with these numbers of passes in
between (``schedules.actions``). It is exact for gpipe, and for 1f1b and its interleaved form with
equal stages or the slowest one last: the critical path of Narayanan et al. (arXiv:2104.04473, sec.
2.2). With i = w it gives the bubble of ZB-H1, (p - 1)(f + i - w) (Qi et al., arXiv:2401.10241,
table 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.arrays import Real, among
from cost_models.partition.schedules import SPLIT, SPLIT_CODES
from cost_models.plan.plan import SCHEDULES, PlanTable

Floats = NDArray[np.float64]


class Passes(Struct, frozen=True):
    """Seconds of every rank's passes, and the sizes of the pipelines; see the symbols."""

    f: Floats
    i: Floats
    w: Floats
    m: Floats
    p: int
    v: Floats

    @property
    def rank(self) -> Floats:
        """Ranks as a column."""
        column: Floats = np.arange(1.0 * self.p)[:, None]
        return column


def _before(x: Floats) -> Floats:
    """Sum over the ranks before each one."""
    return np.cumsum(x, axis=0) - x


def sum_over_ranks(x: Floats) -> Floats:
    """Return the sum over ranks, added in their order.

    ``np.sum`` adds the ranks of a single plan in another order than those of a table.
    """
    result: Floats = reduce(np.add, x)
    return result


def _after(x: Floats) -> Floats:
    """Sum over the ranks after each one."""
    result: Floats = sum_over_ranks(x) - np.cumsum(x, axis=0)
    return result


def gpipe_seconds(x: Passes) -> Floats:
    """Seconds of all forward passes, then all backward passes: a flow shop in each direction.

    sum f + (m - 1) max f + sum b + (m - 1) max b,  b = i + w

    Source: Huang et al., GPipe (arXiv:1811.06965), sec. 2.3; a flow shop with one job type. Leaves
    out: messages between stages that no pass hides.
    """
    backward = x.i + x.w
    once = sum_over_ranks(x.f + backward)
    again = np.max(x.f, axis=0) + np.max(backward, axis=0)
    result: Floats = once + (x.m - 1.0) * again
    return result


def in_turn_seconds(x: Passes, *, split: bool) -> Floats:
    """Seconds of 1f1b, ZB-H1 and their interleaved forms: warm-up, then alternating passes.

    The gaps are filled with warm-up + 1 forward passes, and with warm-up backward passes and their
    weight gradients; r + 1 weight gradients are left for the tail.
    """
    total = x.v * x.m
    per_round = x.m // np.maximum(1, x.m // x.p)
    hops = np.where((x.v == 1.0) | split, 1.0, 2.0)
    warm_up = np.minimum((x.v - 1) * per_round + hops * (x.p - 1.0 - x.rank), total)
    forwards = np.minimum(warm_up + 1.0, total)
    forward_gap = sum_over_ranks(x.f) - _before(x.f) / x.v + _after(x.i) / x.v
    first = np.maximum(0.0, forward_gap - forwards * x.f / x.v)
    backward_gap = _after(x.f) / x.v + sum_over_ranks(x.i) - (_before(x.i) + x.i) / x.v
    last = np.maximum(0.0, backward_gap - (forwards - 1.0) * (x.i + x.w) / x.v)
    # with few micro-batches both gaps are the same wait
    gaps = np.where(total > forwards, first + last, np.maximum(first, last))
    tail = _before(x.i) / x.v
    if split:
        tail = np.maximum(0.0, tail + (x.w[0] - (x.rank + 1.0) * x.w) / x.v)
    return _largest(x, gaps + tail)


def zbv_seconds(x: Passes) -> Floats:
    """Seconds of ZB-V: 2 p forward passes in the first gap; each stage is half a rank's layers."""
    r = x.rank
    first = np.maximum(0.0, _v_forward_gap(x) - x.p * x.f)
    last = np.maximum(0.0, _v_backward_gap(x) - 0.5 * ((x.p + r) * x.i + (x.p - r) * x.w))
    tail = np.maximum(0.0, 0.5 * (_before(x.i) + x.w[0] - (2.0 * r + 1.0) * x.w))
    return _largest(x, first + last + tail)


def dualpipev_seconds(x: Passes) -> Floats:
    """Seconds of DualPipeV: 2 p forward passes in the first gap (2 p + 1 on the last rank)."""
    r, turn = x.rank, x.rank == x.p - 1
    forwards = np.where(turn, 2.0 * x.p + 1.0, 2.0 * x.p)
    first = np.maximum(0.0, _v_forward_gap(x) - 0.5 * forwards * x.f)
    meanwhile = (r + 2.0) * (x.i + x.w) + (x.p - 1.0) * x.i + (x.p - 1.0 - r) * x.w
    last = np.maximum(0.0, _v_backward_gap(x) - 0.5 * meanwhile)
    tail = np.maximum(0.0, 0.5 * (_before(x.i) + x.w[0] - (r + 1.0) * x.w))
    return _largest(x, first + last + tail)


def _v_forward_gap(x: Passes) -> Floats:
    """Seconds from a rank's first forward pass to its first backward pass, in a V."""
    result: Floats = sum_over_ranks(x.f) - 0.5 * _before(x.f) + 0.5 * _before(x.i)
    return result


def _v_backward_gap(x: Passes) -> Floats:
    """Seconds from the end of a rank's last forward pass to its last backward pass, in a V."""
    result: Floats = 0.5 * _before(x.f) + sum_over_ranks(x.i) - 0.5 * (_before(x.i) + x.i)
    return result


def _largest(x: Passes, waits: Floats) -> Floats:
    """Largest sum of head, work and waits over the ranks."""
    result: Floats = np.max(_before(x.f) / x.v + x.m * (x.f + x.i + x.w) + waits, axis=0)
    return result


BOUNDS: Final[dict[str, Callable[[Passes], Floats]]] = {
    "gpipe": gpipe_seconds,
    "1f1b": lambda x: in_turn_seconds(x, split=False),
    "interleaved_1f1b": lambda x: in_turn_seconds(x, split=False),
    "zero_bubble": lambda x: in_turn_seconds(x, split=True),
    "interleaved_zero_bubble": lambda x: in_turn_seconds(x, split=True),
    "zbv": zbv_seconds,
    "dualpipev": dualpipev_seconds,
}


def pipeline_bound(table: PlanTable, forward: Floats, backward: Floats, weights: Floats) -> Floats:
    """Return a lower bound of the seconds of all micro-batches; rows share p.

    ``backward``: whole backward passes; ``weights``: the part of them that a split defers.
    """
    p = int(table.pipeline_parallel[0])
    seconds = np.empty(len(table))
    for code in sorted(set(table.pipeline_schedule.tolist())):
        rows = np.flatnonzero(table.pipeline_schedule == code)
        later = weights[:, rows] if SCHEDULES[code] in SPLIT and p > 1 else np.zeros((p, len(rows)))
        x = Passes(
            f=forward[:, rows],
            i=backward[:, rows] - later,
            w=later,
            m=1.0 * table.num_microbatches[rows],
            p=p,
            v=1.0 * table.virtual_stages[rows],
        )
        seconds[rows] = BOUNDS[SCHEDULES[code]](x) if p > 1 else x.m * sum_over_ranks(x.f + x.i)
    return seconds


def balanced_bound(table: PlanTable, whole: Real, forward: Real, stages: Real = 1.0) -> Real:
    """Return a lower bound of the seconds of all micro-batches for every division over the ranks.

    ``whole``: seconds of both passes of a micro-batch on all ranks together, t_1 + ... + t_p = T;
    ``forward``: the smallest share of a rank's seconds that its forward pass takes; ``stages``: v,
    the most stages on each rank.

    A rank r works m t_r seconds, after the first micro-batch has passed the ranks before it, a
    stage of each, and until the last one has passed them back; where the backward pass is split,
    weight gradients may follow, and only the forward passes, the share a v of each t, are sure to
    come before. The longest of these times is the shortest if all are equal (a = 1/v if the
    backward pass is not split):

        a (t_1 + ... + t_(r-1)) + m t_r  =  a T / (1 - (1 - a/m)^p)

    For gpipe, and for 1f1b with m > p, waits for the ranks after it come on top
    (``gpipe_seconds``, ``in_turn_seconds``), and equal ranks are the fastest: (m + p - 1) T / p.

    Source: derived from the critical path of Narayanan et al. (arXiv:2104.04473), sec. 2.2. Leaves
    out: messages between stages.

    >>> from cost_models.plan.plan import Plan
    >>> table = PlanTable.from_plans([Plan(pipeline_parallel=4, num_microbatches=8)])
    >>> float(balanced_bound(table, 4.0, 1.0 / 3.0)[0])
    11.0
    """
    p, m = 1.0 * table.pipeline_parallel, 1.0 * table.num_microbatches
    schedule = table.pipeline_schedule
    share = np.where(among(schedule, SPLIT_CODES), forward, 1.0) / stages
    unequal = share * whole / (1.0 - (1.0 - np.minimum(1.0, share / m)) ** p)
    full = (schedule == SCHEDULES.index("1f1b")) & (m > p)
    full = full | (schedule == SCHEDULES.index("gpipe"))
    bound: Real = np.where(full, (m + p - 1.0) / p * whole, unequal)
    return bound


def longest_stage(table: PlanTable, whole: Floats, most: Floats) -> Floats:
    """Return the most seconds of each rank's passes with which a pipeline may end after ``most``.

    The bounds of ``balanced_bound`` for one rank, if all together take at least ``whole``; an array
    (p, rows). Plans with one stage on each rank share p.
    """
    p, m = int(table.pipeline_parallel[0]), 1.0 * table.num_microbatches
    warm_up = p - 1.0 - np.arange(1.0 * p)[:, None]
    longest = np.broadcast_to(most / m, (p, len(table))).copy()
    in_turn = (table.pipeline_schedule == SCHEDULES.index("1f1b")) & (m > p)
    # before a rank, or twice after it, all others have passes; the first rank has all after it
    waits = np.where(warm_up == p - 1.0, 2.0, 1.0)
    rest = np.where(in_turn, m - warm_up - waits, m - 1.0)
    waits = np.where(in_turn, waits, 1.0)
    known = (in_turn | (table.pipeline_schedule == SCHEDULES.index("gpipe"))) & (rest > 0.0)
    bounded = (most - waits * whole) / np.where(known, rest, 1.0)
    result: Floats = np.where(known, np.minimum(longest, bounded), longest)
    return result


def owners(positions: Sequence[Sequence[int]]) -> NDArray[np.intp]:
    """Return, for every pipeline rank, the index of its contents.

    >>> owners([[0], [1, 2], [3]]).tolist()
    [0, 1, 1, 2]
    """
    order = np.argsort(np.concatenate([np.asarray(ranks_of) for ranks_of in positions]))
    return np.repeat(np.arange(len(positions)), [len(ranks_of) for ranks_of in positions])[order]
