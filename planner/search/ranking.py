"""Ranking of plans: by the simulated step, by the peak, or as a Pareto front of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.plan.plan import Plan, PlanTable
from cost_models.scenario import Scenario
from planner.request.objectives import pareto_front, sort_keys
from planner.request.options.choices import Objective
from planner.search.distinct import Standing, degrees_of
from planner.search.feasible import Broken
from planner.search.finalists import (
    Finalists,
    simulate,
    simulate_distinct,
    simulate_front,
    smallest_first,
)

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
Ranked: TypeAlias = tuple[float, float, Plan]  # seconds, bytes, plan
Beaten: TypeAlias = Callable[[PlanTable, Floats, Floats], NDArray[np.bool_]]


class CandidateBatch(Struct, frozen=True):
    """Legal plans that fit and may satisfy the constraints, with a lower bound on their steps."""

    table: PlanTable
    order: Rows  # rows to rank, the lowest bound first
    step: Floats  # seconds, lower bound, of every row
    peak: Floats  # bytes, of every row
    family: Rows | None = None  # only the best of the rows with the same number is ranked


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
        columns = self.scenario, batch.table, batch.order, batch.step, batch.peak
        if self.front:
            return simulate_front(*columns, broken=broken)
        if self.distinct:
            rank: Any = partial(simulate_distinct, distinct=self.distinct)
        else:
            rank = smallest_first if self.objective == "memory" else simulate
        found: Finalists = rank(*columns, top=self.top, broken=broken, family=batch.family)
        return found

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
