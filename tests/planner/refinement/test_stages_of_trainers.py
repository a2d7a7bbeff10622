"""Stages of trainers with one number of recomputed layers, and under limits on memory."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cost_models.plan.plan import Plan, PlanTable
from cost_models.scenario import Scenario
from cost_models.uncertainty import verdict_spread
from cost_models.units import GIB
from planner.refinement.best_partition import stages_below
from planner.refinement.rank_prices import max_peak
from planner.refinement.stage_bounds import stage_candidates
from planner.refinement.stage_costs import peaks, simulated_step
from planner.request.constraints import parse_requirements
from planner.search.search import chooses_stages
from tests.planner.refinement.test_own_stages import (
    all_stages,
    plan_of,
    scenario_of,
    with_budget,
)
from tests.samples import llama, make_scenario

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1024}


def tight_pipeline(number: int) -> tuple[Scenario, Plan]:
    """A pipeline whose stages fit with some of their layers recomputed alone."""
    plan = replace(plan_of(3, 6, recompute="full"), micro_batch_size=8)
    scenario = scenario_of(
        llama(**SIZES, num_hidden_layers=8), plan, seq_len=2048, software="megatron-core"
    )
    whole = [max(peaks(scenario, plan, ranges)) for ranges in all_stages(8, 3)]
    without = replace(plan, recompute="none")
    none = [max(peaks(scenario, without, ranges)) for ranges in all_stages(8, 3)]
    share = (0.1, 0.4, 0.8)[number]
    most = (1.0 - share) * min(whole) + share * min(none)
    software = scenario.software.name
    return with_budget(scenario, most * (1.0 + verdict_spread(software).above)), plan


def best_with_one_number(scenario: Scenario, plan: Plan, most: float = np.inf) -> float:
    """Simulate every cut with every number of recomputed layers; seconds of the best that fits."""
    steps = [np.inf]
    for number, ranges in itertools.product(range(9), all_stages(8, 3)):
        own = replace(plan, recompute_layers=number) if number else replace(plan, recompute="none")
        longest = max(last - first for first, last in ranges)
        if number > longest:
            continue
        if number == longest:
            own = plan  # all
        if max(peaks(scenario, own, ranges)) <= max_peak(scenario, most):
            steps.append(simulated_step(scenario, own, ranges))
    return min(steps)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(3))
def test_one_number_for_all_stages_is_the_best_of_all(number: int) -> None:
    scenario, plan = tight_pipeline(number)
    table = PlanTable.from_plans([plan, replace(plan, recompute="none")])
    candidates = stage_candidates(table, recomputed="one_number")
    found, proven = stages_below(scenario, candidates, np.inf, recomputed="one_number")
    assert proven
    assert found is not None
    assert found.by_stage is None
    assert found.step == pytest.approx(best_with_one_number(scenario, plan), rel=1e-9)
    whole, _ = stages_below(scenario, candidates, np.inf, recomputed="given")
    assert whole is None or found.step <= whole.step


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recomputed", ["by_stage", "one_number"])
def test_stages_keep_a_limit_on_memory(recomputed: Any) -> None:
    scenario, plan = tight_pipeline(2)
    table = PlanTable.from_plans([plan, replace(plan, recompute="none")])
    candidates = stage_candidates(table, recomputed=recomputed)
    most = max_peak(tight_pipeline(0)[0])
    (limit,) = parse_requirements(f"memory<={most / GIB!r}GiB")
    free, _ = stages_below(scenario, candidates, np.inf, recomputed=recomputed)
    found, _ = stages_below(scenario, candidates, np.inf, recomputed=recomputed, require=[limit])
    assert free is not None
    assert found is not None
    assert max(peaks(scenario, found.plan, found.layer_ranges, found.by_stage)) <= most
    assert free.step < found.step
    if recomputed == "one_number":
        assert found.step == pytest.approx(best_with_one_number(scenario, plan, most), rel=1e-9)


def test_trainers_without_stages_of_their_own_have_none() -> None:
    for software, has_them in (
        ("shardplan", True),
        ("megatron-core", True),
        ("nemo", True),
        ("torchtitan", True),
        ("nanotron", False),
        ("megatron-2021", False),
    ):
        assert chooses_stages(make_scenario("llama-3-8b", software=software), ()) == has_them
