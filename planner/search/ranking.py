"""How plans are ranked: by the simulated step, by the peak, or as a front of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cost_models.plan.plan import Plan, PlanTable
from cost_models.scenario import Scenario
from planner.request.objectives import Objective, pareto_front, sort_keys
from planner.search.finalists import Broken, Finalists, simulate, simulate_front, smallest_first

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
Ranked: TypeAlias = tuple[float, float, Plan]  # seconds, bytes, plan


@dataclass(frozen=True, slots=True)
class Ranking:
    """What is asked of a search: the first ``top`` by an objective, or a front."""

    scenario: Scenario
    objective: Objective
    top: int
    front: bool

    def finalists(
        self,
        table: PlanTable,
        rows: Rows,
        step: Floats,
        peak: Floats,
        *,
        broken: Broken,
        family: Rows | None = None,
    ) -> Finalists:
        """Rank some rows of a table; of rows of one ``family`` only the best is shown."""
        keys = (_rank_of_effort(table), *sort_keys(self.objective, step, peak))
        order = rows[np.lexsort([key[rows] for key in keys])]
        if self.front:
            return simulate_front(self.scenario, table, order, step, peak, broken=broken)
        rank = smallest_first if self.objective == "memory" else simulate
        return rank(
            self.scenario, table, order, step, peak, top=self.top, broken=broken, family=family
        )

    def merged(self, some: Sequence[Ranked], more: Sequence[Ranked]) -> list[Ranked]:
        """Rank what was found apart; among equals ``some`` come first."""
        every = [*some, *more]
        if self.front:
            seconds, peak = (np.array([one[i] for one in every], dtype=float) for i in (0, 1))
            return [every[row] for row in pareto_front(seconds, peak).tolist()] if every else []
        if self.objective == "memory":
            return sorted(every, key=lambda one: (one[1], one[0]))[: self.top]
        return sorted(every, key=lambda one: one[:2])[: self.top]

    def beaten(self, known: Sequence[Ranked]) -> Callable[[Floats, Floats], NDArray[np.bool_]]:
        """Return what says which plans are behind those that are known.

        It takes what a step and a peak come to at least.
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


def _rank_of_effort(table: PlanTable) -> NDArray[np.int64]:
    """Among equals, the plan that shards and splits less is the simpler one."""
    simpler: NDArray[np.int64] = (
        table.tensor_parallel * table.pipeline_parallel * 16
        + table.zero_stage * 4
        + table.sequence_parallel
        + table.recompute
    )
    return simpler
