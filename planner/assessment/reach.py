"""How far a plan goes: the largest micro-batch and the longest sequence that fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.scenario import Scenario
from cost_models.uncertainty import memory_spread
from planner.assessment.host_memory import host_codes
from planner.assessment.verdict import budget_bytes, verdict_codes

MAX_SEQ_LEN: Final = 2**24
MAX_MICRO_BATCH: Final = 65_536
STEP: Final = 128  # tokens


def is_legal(scenario: Scenario, plan: Plan) -> bool:
    """Return whether the plan can exist on the scenario's cluster."""
    return not legality_codes(scenario, PlanTable.from_plans([plan]))[0]


def fits(scenario: Scenario, plan: Plan) -> bool:
    """Return whether a plan is legal and fits with its whole interval."""
    if not is_legal(scenario, plan):
        return False
    priced = price(scenario, PlanTable.from_plans([plan]))
    around = memory_spread(scenario.software.name)
    peak = verdict_codes(priced.peak, budget_bytes(scenario.cluster), around)
    return not peak[0] and not host_codes(scenario.cluster, priced.host)[0]


def with_seq_len(scenario: Scenario, seq_len: int) -> Scenario:
    """Return the scenario with sequences of another length."""
    return replace(scenario, workload=replace(scenario.workload, seq_len=seq_len))


def longest_sequence(scenario: Scenario, plan: Plan, highest: int) -> int:
    """Return the longest sequence up to ``highest`` that fits, in steps of 128 tokens; 0 if none.

    Bisection is exact because the peak never shrinks with the sequence.
    """

    def longer(units: int) -> bool:
        return fits(with_seq_len(scenario, units * STEP), plan)

    return STEP * largest(longer, highest // STEP)


def largest_micro_batch(scenario: Scenario, plan: Plan) -> int:
    """Return the largest micro-batch size that fits with as many micro-batches; 0 if none."""

    def larger(size: int) -> bool:
        batch = size * plan.num_microbatches * plan.data_parallel
        workload = replace(scenario.workload, global_batch_size=batch)
        return fits(replace(scenario, workload=workload), replace(plan, micro_batch_size=size))

    return largest(larger, MAX_MICRO_BATCH)


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
