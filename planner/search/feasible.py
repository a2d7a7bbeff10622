"""Feasibility of plans: accelerator and host memory against their budgets, and constraints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.arrays import Real
from cost_models.memory.allocator import most_over_typical, over_typical
from cost_models.plan.plan import PlanTable
from cost_models.pricing.estimate import price_memory
from cost_models.pricing.table import by_row, table_memory
from cost_models.scenario import Scenario
from cost_models.uncertainty import peak_interval
from hardware_profiles.progress import stages, tracked
from planner.assessment.host_memory import host_codes
from planner.assessment.verdict import budget_bytes, most_bytes, plan_verdict_spread, verdict_codes
from planner.request.constraints import Constraint, broken_by_result, most_memory
from planner.request.objectives import results

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Codes = NDArray[np.int8]
SIZES: Final = (3.0, 1.0)  # seconds, relative: all plans, those near the budget
AT_ONCE: Final = 5_000  # plans that are priced together without finding distinct rows
NEAR: Final = 1e-9  # of the budget; closer peaks are recomputed in the summation order of one plan
# rows and their simulated steps -> 0, or the position (from 1) of a broken constraint
Broken = Callable[[NDArray[np.intp], Floats], NDArray[np.int16]]


def nothing_broken(rows: NDArray[np.intp], seconds: Floats) -> NDArray[np.int16]:
    """Return zeros: no constraint on results is broken."""
    return np.zeros(len(rows), dtype=np.int16)


class Feasible(Struct):
    """Tests of plans against one verdict, the largest allowed peak and constraints on results."""

    scenario: Scenario
    require: Sequence[Constraint]
    verdict: int  # position in VERDICTS
    seen_tight: bool = False  # whether a tested plan was tight

    @property
    def max_peak(self) -> float:
        """Largest peak in bytes with which every plan has the verdict, or a better one."""
        return most_memory(self.require, self._most_bytes(self.verdict))

    def max_peak_at(self, verdict: int) -> float:
        """Return the largest peak in bytes of any plan with another verdict."""
        return most_memory(self.require, self._largest_bytes(verdict))

    def _largest_bytes(self, verdict: int) -> float:
        """Return the largest peak in bytes of any plan with a verdict, whatever is required."""
        most = self._most_bytes(verdict)
        return most * most_over_typical(self.scenario.software) if verdict > 0 else most

    def _most_bytes(self, verdict: int) -> float:
        spread = plan_verdict_spread(self.scenario)
        return most_bytes(budget_bytes(self.scenario.cluster), spread, verdict)

    def fits(self, table: PlanTable) -> tuple[Flags, Floats]:
        """Return which plans have the verdict and an allowed peak, and all peaks in bytes.

        Those of plans that are too large may be lower bounds.
        """
        peak, found = verdicts_of(self.scenario, table, self._largest_bytes(1), exact_if_all=False)
        self.seen_tight = self.seen_tight or bool(np.any(found == 1))
        return (found == self.verdict) & (peak <= self.max_peak_at(self.verdict)), peak

    def may_satisfy(self, table: PlanTable, step: Floats, peak: Floats | None = None) -> Flags:
        """Return which plans may satisfy the constraints; ``step``: lower bound in seconds."""
        if not self.require:
            return np.ones(len(table), dtype=np.bool_)
        peak = np.zeros(len(table)) if peak is None else peak
        found = results(self.scenario, table.plain(), step, peak)
        kept: Flags = broken_by_result(self.require, found, len(table), at_best=True) == 0
        return kept

    def broken(self, table: PlanTable, peak: Floats) -> Broken:
        """Return the test of simulated steps against the constraints on results."""
        if not any(constraint.of_result for constraint in self.require):
            return nothing_broken
        return lambda rows, seconds: broken_by_result(
            self.require, results(self.scenario, table.rows(rows), seconds, peak[rows]), len(rows)
        )


def verdicts_of(
    scenario: Scenario, table: PlanTable, enough: float = np.inf, *, exact_if_all: bool = True
) -> tuple[Floats, Codes]:
    """Return peaks in bytes, and the worse of the verdicts on accelerator and host.

    ``enough``: bytes above which a peak need not be exact (``table_memory``).
    """
    peak, on_device, on_host = device_and_host(scenario, table, enough, exact_if_all=exact_if_all)
    return peak, np.maximum(on_device, on_host)


def device_and_host(
    scenario: Scenario, table: PlanTable, enough: float = np.inf, *, exact_if_all: bool = True
) -> tuple[Floats, Codes, Codes]:
    """Return peaks in bytes, and the verdict codes of the accelerator and of a node's host."""
    if len(table) and by_row(scenario, table, of_memory=True):
        peak, typical, host = price_memory(scenario, table.plain())
    else:
        with stages(*SIZES, joint=True) as begin:
            begin()
            peak, host = table_memory(scenario, table, enough, exact_if_all=exact_if_all)
            typical = peak.copy()
            begin()
            rows = np.flatnonzero(_undecided(scenario, peak, most_over_typical(scenario.software)))
            ratio = over_typical(scenario.software, table.rows(rows).plain())
            rows = rows[_undecided(scenario, peak[rows], ratio)]
            for some in tracked(np.array_split(rows, -(-len(rows) // AT_ONCE) or 1)):
                peak[some], typical[some], _ = price_memory(scenario, table.rows(some).plain())
    budget, spread = (budget_bytes(scenario.cluster), plan_verdict_spread(scenario))
    codes = verdict_codes(*peak_interval(peak, typical, spread), budget)
    return peak, codes, host_codes(scenario.cluster, host)


def _undecided(scenario: Scenario, peak: Floats, ratio: Real) -> Flags:
    """Return whether rounding of a peak, or its typical free blocks, could change its verdict.

    ``ratio``: the largest of a peak to that with typical free blocks.
    """
    budget, spread = (budget_bytes(scenario.cluster), plan_verdict_spread(scenario))
    low, high = peak_interval(peak, peak / ratio, spread)
    near_the_top = np.abs(high - budget) <= NEAR * budget
    over = peak * (1.0 - spread.below) > budget * (1.0 - NEAR)
    found: Flags = near_the_top | (over & (low <= budget * (1.0 + NEAR)))
    return found
