"""Feasibility of plans: accelerator and host memory against their budgets, and constraints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cost_models.plan.plan import PlanTable
from cost_models.pricing.estimate import price
from cost_models.pricing.table import table_memory
from cost_models.scenario import Scenario
from cost_models.uncertainty import memory_spread
from planner.assessment.host_memory import host_codes
from planner.assessment.verdict import budget_bytes, most_bytes, verdict_codes
from planner.request.constraints import Constraint, broken_by_result, most_memory
from planner.request.objectives import results

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
NEAR: Final = 1e-9  # of the budget; closer peaks are recomputed in the summation order of one plan
# rows and their simulated steps -> 0, or the position (from 1) of a broken constraint
Broken = Callable[[NDArray[np.intp], Floats], NDArray[np.int16]]


def nothing_broken(rows: NDArray[np.intp], seconds: Floats) -> NDArray[np.int16]:
    """Return zeros: no constraint on results is broken."""
    return np.zeros(len(rows), dtype=np.int16)


@dataclass(slots=True)
class Feasible:
    """Tests of plans against one verdict, the largest allowed peak and constraints on results."""

    scenario: Scenario
    require: Sequence[Constraint]
    verdict: int  # position in VERDICTS
    seen_tight: bool = False  # whether a tested plan was tight

    @property
    def max_peak(self) -> float:
        """Largest peak in bytes that verdict and constraints allow."""
        return self.max_peak_at(self.verdict)

    def max_peak_at(self, verdict: int) -> float:
        """Return the largest peak in bytes that another verdict and the constraints allow."""
        budget, spread = (
            budget_bytes(self.scenario.cluster),
            memory_spread(self.scenario.software.name),
        )
        return most_memory(self.require, most_bytes(budget, spread, verdict))

    def fits(self, table: PlanTable) -> tuple[Flags, Floats]:
        """Return which plans have the verdict and an allowed peak, and all peaks in bytes."""
        peak, found = verdicts_of(self.scenario, table)
        self.seen_tight = self.seen_tight or bool(np.any(found == 1))
        return (found == self.verdict) & (peak <= self.max_peak), peak

    def may_satisfy(self, table: PlanTable, step: Floats, peak: Floats | None = None) -> Flags:
        """Return which plans may satisfy the constraints; ``step``: lower bound in seconds."""
        found = results(self.scenario, table, step, np.zeros(len(table)) if peak is None else peak)
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
    scenario: Scenario, table: PlanTable, enough: float = np.inf
) -> tuple[Floats, NDArray[np.int8]]:
    """Return peaks in bytes, and the worse of the verdicts on accelerator and host.

    ``enough``: bytes above which a peak need not be exact (``table_memory``).
    """
    peak, on_host = peaks_and_hosts(scenario, table, enough)
    spread = memory_spread(scenario.software.name)
    on_device = verdict_codes(peak, budget_bytes(scenario.cluster), spread)
    return peak, np.maximum(on_device, on_host)


def peaks_and_hosts(
    scenario: Scenario, table: PlanTable, enough: float = np.inf
) -> tuple[Floats, NDArray[np.int8]]:
    """Return peaks in bytes and verdict codes of the host of a node (``table_memory``)."""
    peak, host = table_memory(scenario, table, enough)
    near = np.flatnonzero(_at_a_border(scenario, peak))
    if len(near):
        peak[near] = price(scenario, table.rows(near).plain()).peak
    return peak, host_codes(scenario.cluster, host)


def _at_a_border(scenario: Scenario, peak: Floats) -> Flags:
    """Return whether rounding of a peak could change its verdict."""
    budget, spread = budget_bytes(scenario.cluster), memory_spread(scenario.software.name)
    ends = (1.0 + spread.above, 1.0 - spread.below)
    found: Flags = np.logical_or.reduce(
        [np.abs(peak * end - budget) <= NEAR * budget for end in ends]
    )
    return found
