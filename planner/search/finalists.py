"""Ranking of plans by the simulated step, with branch and bound.

The closed form of a step is a lower bound on the simulated step (``pipeline_time``). Plans are
simulated in the order of that bound; once ``top`` of them are simulated and the next bound exceeds
the longest of the best steps, no remaining plan can be among the best. Constraints on results apply
to the simulated step: a plan that breaks one is dropped and excludes no other plan.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.simulated_steps import above, simulated_steps
from cost_models.scenario import Scenario
from hardware_profiles.progress import advance
from planner.request.objectives import pareto_front
from planner.search.distinct import Standing, degrees_of
from planner.search.feasible import Broken, nothing_broken

Rows = NDArray[np.intp]
Floats = NDArray[np.float64]
CHUNK: Final = 16  # plans whose ranks are priced together before they are simulated
FIRST: Final = 4  # if a single plan is ranked, those that are simulated first
Codes = NDArray[np.int16]


class Finalists(Struct, frozen=True):
    """Rows of a table, best first, with their simulated steps in seconds."""

    rows: Rows
    seconds: Floats
    simulated: int  # number of simulations; plans without a pipeline need none
    bounded_away: int  # not simulated: their bound is longer than the best steps
    # of rows whose simulated step breaks a constraint, the position (from 1) of the constraint
    broken: Codes = field(default_factory=lambda: np.zeros(0, dtype=np.int16))

    def plans(self, table: PlanTable, peak: Floats) -> list[tuple[float, float, Plan]]:
        """Return step seconds, peak bytes and plan of each row, best first."""
        ranked = zip(self.seconds.tolist(), self.rows.tolist(), strict=True)
        return [(seconds, float(peak[row]), table.plan(row)) for seconds, row in ranked]


def simulate(
    scenario: Scenario,
    table: PlanTable,
    order: Rows,
    step: Floats,
    peak: Floats,
    *,
    top: int,
    broken: Broken = nothing_broken,
    family: Rows | None = None,
) -> Finalists:
    """Rank rows that are sorted by ``step``, a lower bound; ties keep their order.

    ``family``: only the best of the rows with the same number is ranked.
    """
    best: list[tuple[float, float, int]] = []  # seconds, peak, position in the order
    dropped = [np.zeros(0, dtype=np.int16)]
    simulated = done = 0
    while done < len(order):
        longest = best[top - 1][0] if len(best) >= top else np.inf
        batch = order[done : done + (FIRST if top == 1 and not done else max(CHUNK, top))]
        batch = batch[step[batch] <= longest]
        if len(batch) == 0:
            break
        advance(done / max(1, int(np.searchsorted(step[order], longest, side="right"))))
        seconds, piped = _seconds(scenario, table, batch, step)
        simulated += piped
        codes = broken(batch, seconds)
        dropped.append(codes[codes > 0])
        stays = np.flatnonzero(codes == 0)
        columns = seconds[stays], peak[batch[stays]], done + stays
        best += zip(*(column.tolist() for column in columns), strict=True)
        best = _of_families(sorted(best), order, family)[:top]
        done += len(batch)
    rows = order[np.array([position for *_, position in best], dtype=np.intp)]
    left = len(order) - done
    found = np.array([s for s, *_ in best])
    return Finalists(rows, found, simulated, left, np.concatenate(dropped))


def simulate_distinct(
    scenario: Scenario,
    table: PlanTable,
    order: Rows,
    step: Floats,
    peak: Floats,
    *,
    top: int,
    distinct: int,
    broken: Broken = nothing_broken,
    family: Rows | None = None,
) -> Finalists:
    """Rank rows that are sorted by ``step``, and keep one of each of the best degrees.

    ``family``: only the best of the rows with the same number is ranked.
    """
    degrees = degrees_of(table.rows(order))
    left = np.arange(len(order))  # positions in the order
    known, seconds = left[:0], step[:0]
    dropped = [np.zeros(0, dtype=np.int16)]
    simulated = bounded_away = done = 0
    while len(left):
        advance(done / (done + len(left)))
        batch, left = left[: max(CHUNK, top)], left[max(CHUNK, top) :]
        done += len(batch)
        found, piped = _seconds(scenario, table, order[batch], step)
        simulated += piped
        codes = broken(order[batch], found)
        dropped.append(codes[codes > 0])
        known = np.concatenate([known, batch[codes == 0]])
        seconds = np.concatenate([seconds, found[codes == 0]])
        best = np.lexsort((known, peak[order[known]], seconds))
        if family is not None:
            best = best[np.sort(np.unique(family[order[known[best]]], return_index=True)[1])]
        known, seconds = known[best], seconds[best]
        kept = Standing(seconds, degrees[known], top, distinct).kept()
        known, seconds = known[kept], seconds[kept]
        limit = Standing(seconds, degrees[known], top, distinct).limit(degrees[left])
        waiting = len(left)
        left = left[step[order[left]] <= limit]
        bounded_away += waiting - len(left)
    return Finalists(order[known], seconds, simulated, bounded_away, np.concatenate(dropped))


def _of_families(
    best: list[tuple[float, float, int]], order: Rows, family: Rows | None
) -> list[tuple[float, float, int]]:
    """Return the first entry of every family."""
    if family is None:
        return best
    first: dict[int, tuple[float, float, int]] = {}
    for one in best:
        first.setdefault(int(family[order[one[2]]]), one)
    return list(first.values())


def _seconds(scenario: Scenario, table: PlanTable, rows: Rows, step: Floats) -> tuple[Floats, int]:
    """Return the simulated steps of some rows, and how many rows have a pipeline."""
    seconds = step[rows]
    piped = table.pipeline_parallel[rows] > 1
    if piped.any():
        found = simulated_steps(scenario, table.rows(rows[piped]))
        seconds[piped] = above(seconds[piped], found)
    return seconds, int(np.sum(piped))


def smallest_first(
    scenario: Scenario,
    table: PlanTable,
    order: Rows,
    step: Floats,
    peak: Floats,
    *,
    top: int,
    broken: Broken = nothing_broken,
    family: Rows | None = None,
) -> Finalists:
    """Rank rows that are sorted by ``peak``, then ``step``; equal peaks by the simulated step."""
    found: list[Finalists] = []
    done = known = 0
    while known < top and done < len(order):
        same = order[done : done + int(np.sum(peak[order[done:]] == peak[order[done]]))]
        done += len(same)
        if family is not None:
            taken = [family[each.rows] for each in found]
            same = same[~np.isin(family[same], np.concatenate([family[:0], *taken]))]
        found.append(
            simulate(
                scenario, table, same, step, peak, top=top - known, broken=broken, family=family
            )
        )
        known += len(found[-1].rows)
    return Finalists(
        np.concatenate([order[:0], *(each.rows for each in found)]),
        np.concatenate([step[:0], *(each.seconds for each in found)]),
        sum(each.simulated for each in found),
        len(order) - done + sum(each.bounded_away for each in found),
        np.concatenate([nothing_broken(order[:0], step[:0]), *(each.broken for each in found)]),
    )


def simulate_front(
    scenario: Scenario,
    table: PlanTable,
    order: Rows,
    step: Floats,
    peak: Floats,
    *,
    broken: Broken = nothing_broken,
) -> Finalists:
    """Return the Pareto front of simulated step and peak, the fastest first.

    A row is not simulated if a simulated row has no longer step than its bound and no larger peak;
    all others are simulated in the order of the bound.
    """
    left = order[np.argsort(step[order], kind="stable")]
    done: list[Rows] = [left[:0]]
    seconds: list[Floats] = [step[:0]]
    dropped = [np.zeros(0, dtype=np.int16)]
    simulated = bounded_away = 0
    while len(left):
        advance(1.0 - len(left) / len(order))
        batch, left = left[:CHUNK], left[CHUNK:]
        found, piped = _seconds(scenario, table, batch, step)
        simulated += piped
        codes = broken(batch, found)
        dropped.append(codes[codes > 0])
        done, seconds = [*done, batch[codes == 0]], [*seconds, found[codes == 0]]
        rows, known = np.concatenate(done), np.concatenate(seconds)
        if len(rows) == 0:
            continue
        by_time = np.argsort(known, kind="stable")
        lowest = np.minimum.accumulate(peak[rows][by_time])
        # smallest peak of the simulated rows whose step is no longer than a bound
        before = np.searchsorted(known[by_time], step[left], side="right")
        beaten = (before > 0) & (lowest[np.maximum(before, 1) - 1] <= peak[left])
        bounded_away += int(np.sum(beaten))
        left = left[~beaten]
    rows, known = np.concatenate(done), np.concatenate(seconds)
    front = pareto_front(known, peak[rows])
    codes = np.concatenate(dropped)
    return Finalists(rows[front], known[front], simulated, bounded_away, codes)
