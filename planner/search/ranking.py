"""Ranking of plans: by the simulated step, by the peak, or as a Pareto front of both.

The closed form of a step is a lower bound on the simulated step (``pipeline_time``). Plans are
simulated in the order of that bound; once ``top`` of them are simulated and the next bound exceeds
the longest of the best steps, no remaining plan can be among the best. Constraints on results apply
to the simulated step: a plan that breaks one is dropped and excludes no other plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
from msgspec import Struct, field
from msgspec.structs import astuple, replace
from numpy.typing import NDArray

from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.simulated_steps import above, simulated_steps
from cost_models.scenario import Scenario
from hardware_profiles.progress import advance
from planner.request.objectives import pareto_front, sort_keys
from planner.request.options.choices import Objective
from planner.search.distinct import Standing, degrees_of
from planner.search.feasible import Broken, nothing_broken

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
Codes = NDArray[np.int16]
Ranked: TypeAlias = tuple[float, float, Plan]  # seconds, bytes, plan
Beaten: TypeAlias = Callable[[PlanTable, Floats, Floats], NDArray[np.bool_]]
CHUNK: Final = 16  # plans whose ranks are priced together before they are simulated
FIRST: Final = 4  # if a single plan is ranked, those that are simulated first


class CandidateBatch(Struct, frozen=True):
    """Legal plans that fit and may satisfy the constraints, with a lower bound on their steps."""

    table: PlanTable
    order: Rows  # rows to rank, the lowest bound first
    step: Floats  # seconds, lower bound, of every row
    peak: Floats  # bytes, of every row
    family: Rows | None = None  # only the best of the rows with the same number is ranked


class Finalists(Struct, frozen=True):
    """Rows of a table, best first, with their simulated steps in seconds."""

    rows: Rows
    seconds: Floats
    simulated: int  # number of simulations; plans without a pipeline need none
    bounded_away: int  # not simulated: their bound is longer than the best steps
    # of rows whose simulated step breaks a constraint, the position (from 1) of the constraint
    broken: Codes = field(default_factory=lambda: np.zeros(0, dtype=np.int16))

    def plans(self, table: PlanTable, peak: Floats) -> list[Ranked]:
        """Return step seconds, peak bytes and plan of each row, best first."""
        ranked = zip(self.seconds.tolist(), self.rows.tolist(), strict=True)
        return [(seconds, float(peak[row]), table.plan(row)) for seconds, row in ranked]


class Ranking(Struct, frozen=True):
    """Order of the results of a search: the first ``top`` by an objective, or a Pareto front.

    ``distinct``: number of splits of the ranks of which a plan is kept in addition
    (``planner.search.distinct``); ``below``: of the first ``top`` only.
    """

    scenario: Scenario
    objective: Objective
    top: int
    front: bool
    distinct: int = 0  # not with the objective memory, nor with a front
    below: float = np.inf  # seconds; plans with longer steps are not wanted

    @property
    def by_step(self) -> bool:
        """Whether plans that are slower than enough others are not wanted."""
        return not self.front and self.objective != "memory"

    def order(self, table: PlanTable, rows: Rows, step: Floats, peak: Floats) -> Rows:
        """Sort rows of a table by the bound on the objective; simpler plans first among ties."""
        keys = (_complexity(table), *sort_keys(self.objective, step, peak))
        return rows[np.lexsort([key[rows] for key in keys])]

    def rank(self, batch: CandidateBatch, broken: Broken) -> Finalists:
        """Simulate the rows of a batch that can be among the best; ``broken``: constraint test."""
        if self.front:
            return _simulate_front(self.scenario, batch, broken)
        if self.distinct:
            return _simulate_distinct(self.scenario, batch, broken, self.top, self.distinct)
        rank = _smallest_first if self.objective == "memory" else _simulate
        return rank(self.scenario, batch, broken, self.top)

    def merged(self, some: Sequence[Ranked], more: Sequence[Ranked]) -> list[Ranked]:
        """Merge two rankings; ties keep the order of ``some`` before ``more``."""
        every = [one for one in (*some, *more) if one[0] < self.below]
        if self.front:
            seconds, peak = (np.array([one[i] for one in every], dtype=float) for i in (0, 1))
            return [every[row] for row in pareto_front(seconds, peak).tolist()] if every else []
        if self.objective == "memory":
            return sorted(every, key=lambda one: (one[1], one[0]))[: self.top]
        every.sort(key=lambda one: one[:2])
        if self.distinct:
            kept = self._standing(every).kept()
            return [one for one, stays in zip(every, kept.tolist(), strict=True) if stays]
        return every[: self.top]

    def longest(self, known: Sequence[Ranked], table: PlanTable) -> Floats:
        """Return the step in seconds that every plan has to beat; infinity: none."""
        if self.distinct:
            return np.minimum(self._standing(known).limit(degrees_of(table)), self.below)
        last = known[self.top - 1][0] if len(known) >= self.top else np.inf
        return np.full(len(table), min(last, self.below))

    def _standing(self, known: Sequence[Ranked]) -> Standing:
        seconds = np.array([one[0] for one in known])
        degrees = np.array([degrees_of(one[2]) for one in known], dtype=np.uint64)
        return Standing(seconds, degrees, self.top, self.distinct)

    def beaten(self, known: Sequence[Ranked]) -> Beaten:
        """Return a test of which plans cannot beat the known ones.

        Its arguments are the plans and lower bounds on steps (seconds) and peaks (bytes).
        """
        if self.front and known:
            seconds, peaks = (np.array(column) for column in list(zip(*known, strict=True))[:2])
            order = np.argsort(seconds, kind="stable")
            lowest = np.concatenate([[np.inf], np.minimum.accumulate(peaks[order])])
            return lambda table, step, peak: (
                lowest[np.searchsorted(seconds[order], step, side="right")] <= peak
            )
        if self.objective == "memory" and not self.front and len(known) >= self.top:
            largest = known[self.top - 1][1]
            return lambda table, step, peak: peak > largest
        if self.objective == "memory" or self.front:
            return lambda table, step, peak: np.zeros(len(table), dtype=np.bool_)
        return lambda table, step, peak: step > self.longest(known, table)


def _complexity(table: PlanTable) -> NDArray[np.int64]:
    """Return a sort key for ties: plans that shard and split less come first."""
    simpler: NDArray[np.int64] = (
        table.tensor_parallel * table.pipeline_parallel * 16
        + table.zero_stage * 4
        + table.sequence_parallel
        + table.recompute
    )
    return simpler


def _simulate(scenario: Scenario, batch: CandidateBatch, broken: Broken, top: int) -> Finalists:
    """Rank rows that are sorted by ``step``, a lower bound; ties keep their order."""
    table, order, step, peak, family = astuple(batch)
    best: list[tuple[float, float, int]] = []  # seconds, peak, position in the order
    dropped = [np.zeros(0, dtype=np.int16)]
    simulated = done = 0
    while done < len(order):
        longest = best[top - 1][0] if len(best) >= top else np.inf
        rows = order[done : done + (FIRST if top == 1 and not done else max(CHUNK, top))]
        rows = rows[step[rows] <= longest]
        if len(rows) == 0:
            break
        advance(done / max(1, int(np.searchsorted(step[order], longest, side="right"))))
        seconds, piped = _seconds(scenario, table, rows, step)
        simulated += piped
        codes = broken(rows, seconds)
        dropped.append(codes[codes > 0])
        stays = np.flatnonzero(codes == 0)
        columns = seconds[stays], peak[rows[stays]], done + stays
        best += zip(*(column.tolist() for column in columns), strict=True)
        best = _of_families(sorted(best), order, family)[:top]
        done += len(rows)
    rows = order[np.array([position for *_, position in best], dtype=np.intp)]
    left = len(order) - done
    found = np.array([s for s, *_ in best])
    return Finalists(rows, found, simulated, left, np.concatenate(dropped))


def _simulate_distinct(
    scenario: Scenario, batch: CandidateBatch, broken: Broken, top: int, distinct: int
) -> Finalists:
    """Rank rows that are sorted by ``step``, and keep one of each of the best degrees."""
    table, order, step, peak, family = astuple(batch)
    degrees = degrees_of(table.rows(order))
    left = np.arange(len(order))  # positions in the order
    known, seconds = left[:0], step[:0]
    dropped = [np.zeros(0, dtype=np.int16)]
    simulated = bounded_away = done = 0
    while len(left):
        advance(done / (done + len(left)))
        these, left = left[: max(CHUNK, top)], left[max(CHUNK, top) :]
        done += len(these)
        found, piped = _seconds(scenario, table, order[these], step)
        simulated += piped
        codes = broken(order[these], found)
        dropped.append(codes[codes > 0])
        known = np.concatenate([known, these[codes == 0]])
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


def _smallest_first(
    scenario: Scenario, batch: CandidateBatch, broken: Broken, top: int
) -> Finalists:
    """Rank rows that are sorted by ``peak``, then ``step``; equal peaks by the simulated step."""
    _, order, step, peak, family = astuple(batch)
    found: list[Finalists] = []
    done = known = 0
    while known < top and done < len(order):
        same = order[done : done + int(np.sum(peak[order[done:]] == peak[order[done]]))]
        done += len(same)
        if family is not None:
            taken = [family[each.rows] for each in found]
            same = same[~np.isin(family[same], np.concatenate([family[:0], *taken]))]
        found.append(_simulate(scenario, replace(batch, order=same), broken, top - known))
        known += len(found[-1].rows)
    return Finalists(
        np.concatenate([order[:0], *(each.rows for each in found)]),
        np.concatenate([step[:0], *(each.seconds for each in found)]),
        sum(each.simulated for each in found),
        len(order) - done + sum(each.bounded_away for each in found),
        np.concatenate([nothing_broken(order[:0], step[:0]), *(each.broken for each in found)]),
    )


def _simulate_front(scenario: Scenario, batch: CandidateBatch, broken: Broken) -> Finalists:
    """Return the Pareto front of simulated step and peak, the fastest first.

    A row is not simulated if a simulated row has no longer step than its bound and no larger peak;
    all others are simulated in the order of the bound.
    """
    table, order, step, peak, _ = astuple(batch)
    left = order[np.argsort(step[order], kind="stable")]
    done: list[Rows] = [left[:0]]
    seconds: list[Floats] = [step[:0]]
    dropped = [np.zeros(0, dtype=np.int16)]
    simulated = bounded_away = 0
    while len(left):
        advance(1.0 - len(left) / len(order))
        these, left = left[:CHUNK], left[CHUNK:]
        found, piped = _seconds(scenario, table, these, step)
        simulated += piped
        codes = broken(these, found)
        dropped.append(codes[codes > 0])
        done, seconds = [*done, these[codes == 0]], [*seconds, found[codes == 0]]
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
