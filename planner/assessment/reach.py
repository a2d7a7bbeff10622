"""Largest micro-batch size and longest sequence with which a plan still fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price_memory
from cost_models.scenario import Scenario
from hardware_profiles.record import Record
from planner.assessment.host_memory import host_codes
from planner.assessment.verdict import budget_bytes, plan_verdict_spread

MAX_SEQ_LEN: Final = 2**24
MAX_MICRO_BATCH: Final = 65_536
STEP: Final = 128  # tokens


def is_legal(scenario: Scenario, plan: Plan) -> bool:
    """Return whether the plan can exist on the scenario's cluster."""
    return not legality_codes(scenario, PlanTable.from_plans([plan]))[0]


def fits(scenario: Scenario, plan: Plan) -> bool:
    """Return whether a plan is legal and the upper end of its peak's interval is in the budget."""
    return load(scenario, plan) <= 1.0


def load(scenario: Scenario, plan: Plan) -> float:
    """Return the upper end of the peak's interval as a share of the budget.

    Infinity for plans that are illegal or do not fit into the host's memory.
    """
    return float(loads(scenario, PlanTable.from_plans([plan]))[0])


def loads(scenario: Scenario, table: PlanTable) -> NDArray[np.float64]:
    """Return ``load`` of every plan of a table."""
    found = np.full(len(table), np.inf)
    legal = np.flatnonzero(legality_codes(scenario, table) == 0)
    if len(legal):
        peaks, _, host = price_memory(scenario, table.rows(legal))
        held = host_codes(scenario.cluster, host) == 0
        found[legal] = np.where(held, load_of_peak(scenario, peaks), np.inf)
    return found


def load_of_peak(scenario: Scenario, peak: Any) -> Any:
    """Return the upper end of the interval of a predicted peak as a share of the budget."""
    return peak * (1.0 + plan_verdict_spread(scenario).above) / budget_bytes(scenario.cluster)


def with_seq_len(scenario: Scenario, seq_len: int) -> Scenario:
    """Return the scenario with sequences of another length."""
    return replace(scenario, workload=replace(scenario.workload, seq_len=seq_len))


def longest_sequence(
    scenario: Scenario, plan: Plan, highest: int, step: int = STEP, *, load_now: float | None = None
) -> int:
    """Return the longest sequence up to ``highest`` that fits, in steps of tokens; 0 if none.

    The search is exact because the peak never falls when the sequence gets longer. ``load_now``:
    the load of the plan with the scenario's sequences, if known.
    """

    def longer(units: int) -> float:
        if load_now is not None and units * step == scenario.workload.seq_len:
            return load_now
        return load(with_seq_len(scenario, units * step), plan)

    return step * largest(longer, highest // step, scenario.workload.seq_len // step)


def largest_micro_batch(
    scenario: Scenario, plan: Plan, highest: int = MAX_MICRO_BATCH, *, load_now: float | None = None
) -> int:
    """Return the largest micro-batch size that fits with the same num_microbatches; 0 if none.

    ``load_now``: the load of the plan itself, if known.
    """

    def larger(size: int) -> float:
        if load_now is not None and size == plan.micro_batch_size:
            return load_now
        batch = size * plan.num_microbatches * plan.data_parallel
        workload = replace(scenario.workload, global_batch_size=batch)
        return load(replace(scenario, workload=workload), replace(plan, micro_batch_size=size))

    return largest(larger, highest, plan.micro_batch_size)


def fewest_recomputed(scenario: Scenario, plan: Plan) -> int:
    """Return the fewest recomputed layers of every stage that fit (more never need more memory).

    0: none, or all, of the smallest stage's layers.
    """
    counts = np.arange(1, scenario.model.num_layers // plan.num_stages)
    some = replace(plan, recompute="full", recompute_every=0)
    table = PlanTable.from_plans([some]).rows(np.zeros_like(counts))
    over = loads(scenario, replace(table, recompute_layers=counts)) > 1.0
    fewest = int(counts[over].max(initial=0)) + 1
    return fewest if fewest <= len(counts) else 0


def largest(load: Callable[[int], float], highest: int, start: int = 1) -> int:
    """Return the largest number up to ``highest`` whose load is at most 1; 0 if none.

    The load must not fall when the number grows. The first trial is ``start``. The load is nearly
    linear, so the next trial is interpolated from the last two, or from the only one and a load of
    0; every fourth trial bisects or doubles the interval.

    >>> largest(lambda n: n / 1000.5, 10**6)
    1000
    """
    low, high, trial = 0, highest + 1, min(max(start, 1), highest)
    points: list[tuple[int, float]] = []
    tries = 0
    while high - low > 1:
        here = load(trial)
        low, high = (trial, high) if here <= 1.0 else (low, trial)
        points = [*points[-1:], (trial, here)] if here < math.inf else points
        tries += 1
        (n, a), (m, b) = ((0, 0.0), *points)[-2:] if points else ((0, 0.0), (0, 0.0))
        trial = min(max(2 * low, 1), (low + high) // 2)
        if tries % 4 and a != b:
            trial = math.floor(n + (1.0 - a) * (m - n) / (b - a)) + (low > 0 and low in (n, m))
        trial = min(max(trial, low + 1), high - 1)
    return low


class Reach(Record, frozen=True):
    """Largest micro-batch size and longest sequence of a plan, each with the other unchanged."""

    largest_micro_batch_size: int | None
    longest_seq_len: int | None  # tokens


def reach(scenario: Scenario, plan: Plan, peak: float) -> Reach:
    """Return the largest micro-batch size and the longest sequence of a plan that fits.

    ``peak``: predicted bytes of the plan itself.
    """
    now = load_of_peak(scenario, peak)
    return Reach(
        largest_micro_batch(scenario, plan, load_now=now) or None,
        longest_sequence(scenario, plan, MAX_SEQ_LEN, load_now=now) or None,
    )
