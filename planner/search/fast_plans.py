"""Prices of the legal plans that may be among the best: steps first, then memory of the fast ones.

The memory of a plan takes several times as long to price as its step, and its step longer than the
bound of its family (``family_bounds``). So plans are taken in the order of that bound, FIRST of
them and then twice as many each time, until leaders are known that all others have to beat. With T
the seconds of a step and n recomputed layers:

    T(n) >= 2/3 T(all)
    T(n) >= T(0), less the communication that recomputation may hide at the ends of a step

Only the memory of plans that these bounds leave is priced; without leaders that of all.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.columnar.dictionary_encoding import decode
from cost_models.plan.plan import PlanTable
from cost_models.pricing.table import table_steps_and_ends
from planner.search.feasible import Codes, Feasible, verdicts_of
from planner.search.ranking import CandidateBatch
from planner.search.sources.partial_recompute import FULL, MOST_SAVED, peaks_without
from planner.search.sources.short_pieces import family_bounds
from planner.search.sources.source import Leaders

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
FIRST: Final = 20_000  # plans that are priced before leaders are known
SLOW: Final = 3  # in place of a verdict: the plan cannot be among the best


class FastPlans(Struct, frozen=True):
    """Legal plans that may be fast with any number of recomputed layers or of stages on a rank."""

    table: PlanTable
    step: Floats  # seconds
    peak: Floats  # bytes; infinity: not priced, since the plan is slow
    verdicts: Codes
    bound: Floats  # seconds, of all steps of the family


def fast_plans(
    leaders: Leaders,
    feasible: Feasible,
    legal: PlanTable,
    bound: Floats | None,
    enough: float,
    *,
    max_offset: int,
) -> FastPlans:
    """Price the plans that may beat some leaders, or plans among them.

    ``bound``: of the steps of their families in seconds, unless it is to be found; ``enough``:
    bytes above which a peak need not be exact; ``max_offset``: see ``peaks_without``; 0: no plan
    may recompute fewer layers.
    """
    scenario, ranking = feasible.scenario, leaders.ranking
    known, number = Leaders(ranking, [*leaders.plans]), len(legal)
    step, peak = np.zeros(number), np.full(number, np.inf)
    verdicts = np.full(number, SLOW, dtype=np.int8)
    if bound is None:
        bound = family_bounds(scenario, legal)[0]
    longest = known.longest(legal)
    left, size = np.argsort(bound, kind="stable"), FIRST
    while len(left):
        left = left[bound[left] <= longest[left]]
        end = len(left) if np.isfinite(longest).all() else size
        rows, left, size = np.sort(left[:end]), left[end:], 2 * size
        some = legal.rows(rows)
        step[rows], once = table_steps_and_ends(scenario, some)
        may = step[rows] <= longest[rows]
        if max_offset:
            full = decode(some.recompute) == FULL
            may |= full & (step[rows] * (1.0 - MOST_SAVED) <= longest[rows])
            none = peaks_without(some, np.arange(len(rows), dtype=float), max_offset)
            full = np.flatnonzero(~np.isnan(none))
            same = none[full].astype(np.intp)
            hidden = np.maximum(0.0, once[same] - once[full])
            may[full] &= step[rows[same]] - hidden <= longest[rows[full]]
        rows = rows[may]
        some = legal.rows(rows)
        peak[rows], verdicts[rows] = verdicts_of(scenario, some, enough)
        if len(left):
            rows = rows[(verdicts[rows] == 0) & (peak[rows] <= feasible.max_peak_at(0))]
            table, of = legal.rows(rows).plain(), (step[rows], peak[rows])
            order = ranking.order(table, np.flatnonzero(feasible.may_satisfy(table, *of)), *of)
            best = ranking.rank(CandidateBatch(table, order, *of), feasible.broken(table, of[1]))
            known.add(best.plans(table, of[1]))
            longest = known.longest(legal)
    rows = np.flatnonzero(bound <= longest)
    return FastPlans(legal.rows(rows), step[rows], peak[rows], verdicts[rows], bound[rows])
