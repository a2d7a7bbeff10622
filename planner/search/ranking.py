"""Ranking of plans: by the simulated step, by the peak, or as a Pareto front of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cost_models.plan.plan import Plan, PlanTable
from cost_models.scenario import Scenario
from planner.request.choices import Objective
from planner.request.objectives import pareto_front, sort_keys
from planner.search.feasible import Broken
from planner.search.finalists import Finalists, simulate, simulate_front, smallest_first

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
Ranked: TypeAlias = tuple[float, float, Plan]  # seconds, bytes, plan


@dataclass(frozen=True, slots=True)
class CandidateBatch:
    """Legal plans that fit and may satisfy the constraints, with a lower bound on their steps."""

    table: PlanTable
    order: Rows  # rows to rank, the lowest bound first
    step: Floats  # seconds, lower bound, of every row
    peak: Floats  # bytes, of every row
    family: Rows | None = None  # only the best of the rows with the same number is ranked


@dataclass(frozen=True, slots=True)
class Ranking:
    """Order of the results of a search: the first ``top`` by an objective, or a Pareto front."""

    scenario: Scenario
    objective: Objective
    top: int
    front: bool

    def order(self, table: PlanTable, rows: Rows, step: Floats, peak: Floats) -> Rows:
        """Sort rows of a table by the bound on the objective; simpler plans first among ties."""
        keys = (_complexity(table), *sort_keys(self.objective, step, peak))
        return rows[np.lexsort([key[rows] for key in keys])]

    def rank(self, batch: CandidateBatch, broken: Broken) -> Finalists:
        """Simulate the rows of a batch that can be among the best; ``broken``: constraint test."""
        columns = self.scenario, batch.table, batch.order, batch.step, batch.peak
        if self.front:
            return simulate_front(*columns, broken=broken)
        rank = smallest_first if self.objective == "memory" else simulate
        return rank(*columns, top=self.top, broken=broken, family=batch.family)

    def merged(self, some: Sequence[Ranked], more: Sequence[Ranked]) -> list[Ranked]:
        """Merge two rankings; ties keep the order of ``some`` before ``more``."""
        every = [*some, *more]
        if self.front:
            seconds, peak = (np.array([one[i] for one in every], dtype=float) for i in (0, 1))
            return [every[row] for row in pareto_front(seconds, peak).tolist()] if every else []
        if self.objective == "memory":
            return sorted(every, key=lambda one: (one[1], one[0]))[: self.top]
        return sorted(every, key=lambda one: one[:2])[: self.top]

    def beaten(self, known: Sequence[Ranked]) -> Callable[[Floats, Floats], NDArray[np.bool_]]:
        """Return a test of which plans cannot beat the known ones.

        Its arguments are lower bounds on steps (seconds) and peaks (bytes).
        """
        if self.front and known:
            seconds, peaks = (np.array(column) for column in list(zip(*known, strict=True))[:2])
            order = np.argsort(seconds, kind="stable")
            lowest = np.concatenate([[np.inf], np.minimum.accumulate(peaks[order])])
            return lambda step, peak: (
                lowest[np.searchsorted(seconds[order], step, side="right")] <= peak
            )
        smallest, last = self.objective == "memory", np.inf
        if not self.front and len(known) >= self.top:
            worst = known[self.top - 1]
            last = worst[1] if smallest else worst[0]
        return lambda step, peak: (peak if smallest else step) > last


def _complexity(table: PlanTable) -> NDArray[np.int64]:
    """Return a sort key for ties: plans that shard and split less come first."""
    simpler: NDArray[np.int64] = (
        table.tensor_parallel * table.pipeline_parallel * 16
        + table.zero_stage * 4
        + table.sequence_parallel
        + table.recompute
    )
    return simpler
