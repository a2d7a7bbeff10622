"""How far a plan goes: the largest micro-batch and the longest sequence that fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price_memory
from cost_models.scenario import Scenario
from cost_models.uncertainty import memory_spread
from planner.assessment.host_memory import host_codes
from planner.assessment.verdict import budget_bytes

MAX_SEQ_LEN: Final = 2**24
MAX_MICRO_BATCH: Final = 65_536
STEP: Final = 128  # tokens


def is_legal(scenario: Scenario, plan: Plan) -> bool:
    """Return whether the plan can exist on the scenario's cluster."""
    return not legality_codes(scenario, PlanTable.from_plans([plan]))[0]


def fits(scenario: Scenario, plan: Plan) -> bool:
    """Return whether a plan is legal and fits with its whole interval."""
    return load(scenario, plan) <= 1.0


def load(scenario: Scenario, plan: Plan) -> float:
    """Return the peak as a share of the largest one that fits; infinity where it cannot be.

    At most 1: the upper end of the peak's interval is within the budget.
    """
    if not is_legal(scenario, plan):
        return math.inf
    peaks, host = price_memory(scenario, PlanTable.from_plans([plan]))
    if host_codes(scenario.cluster, host)[0]:
        return math.inf
    around, budget = memory_spread(scenario.software.name), budget_bytes(scenario.cluster)
    return float(peaks[0]) * (1.0 + around.above) / budget


def with_seq_len(scenario: Scenario, seq_len: int) -> Scenario:
    """Return the scenario with sequences of another length."""
    return replace(scenario, workload=replace(scenario.workload, seq_len=seq_len))


def longest_sequence(scenario: Scenario, plan: Plan, highest: int) -> int:
    """Return the longest sequence up to ``highest`` that fits, in steps of 128 tokens; 0 if none.

    The search is exact because the peak never shrinks with the sequence.
    """

    def longer(units: int) -> float:
        return load(with_seq_len(scenario, units * STEP), plan)

    return STEP * largest_load(longer, highest // STEP)


def largest_micro_batch(scenario: Scenario, plan: Plan) -> int:
    """Return the largest micro-batch size that fits with as many micro-batches; 0 if none."""

    def larger(size: int) -> float:
        batch = size * plan.num_microbatches * plan.data_parallel
        workload = replace(scenario.workload, global_batch_size=batch)
        return load(replace(scenario, workload=workload), replace(plan, micro_batch_size=size))

    return largest_load(larger, MAX_MICRO_BATCH)


def largest_load(loads: Callable[[int], float], highest: int) -> int:
    """Return the largest number up to ``highest`` whose load is at most 1; 0 if none.

    Loads never shrink with the number. They are nearly linear in it, so the next number to try is
    interpolated from the last two; every third one halves or doubles the interval.

    >>> largest_load(lambda n: n / 1000.5, 10**6)
    1000
    """
    if highest < 1 or (first := loads(1)) > 1.0:
        return 0
    low, high = 1, highest + 1
    points, tries = [(1, first)], 0
    while high - low > 1:
        tries += 1
        trial = min(2 * low, (low + high) // 2)
        if len(points) == 2 and tries % 3:
            (n, a), (m, b) = points
            if b != a:
                trial = math.floor(n + (1.0 - a) * (m - n) / (b - a)) + (low in (n, m))
                trial = min(max(trial, low + 1), high - 1)
        here = loads(trial)
        low, high = (trial, high) if here <= 1.0 else (low, trial)
        if here < math.inf:
            points = [points[-1], (trial, here)]
    return low


def largest(fitting: Callable[[int], bool], highest: int) -> int:
    """Return the largest number up to ``highest`` that fits (smaller ones do too); 0 if none."""
    if highest < 1 or not fitting(1):
        return 0
    low, high = 1, 2
    while high <= highest and fitting(high):
        low, high = high, high * 2
    high = min(high, highest + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fitting(middle) else (low, middle)
    return low


def reach(scenario: Scenario, plan: Plan) -> dict[str, Any]:
    """How far a plan that fits can go: largest micro-batch, longest sequence."""
    return {
        "largest_micro_batch_size": largest_micro_batch(scenario, plan) or None,
        "longest_seq_len": longest_sequence(scenario, plan, MAX_SEQ_LEN) or None,
    }
