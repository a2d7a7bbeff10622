"""The quick search of ``fit`` against the search of all plans."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from cost_models.plan.plan import Plan
from planner.answer.plan_answer import PlanAnswer
from planner.assessment.assess import assess
from planner.search.first_plan import COMMON, first_plan, is_complete
from planner.search.search import search
from planner.search.simplicity import CLOSE, complexity, simplest_first
from tests.samples import make_scenario, with_memory

PINS: list[dict[str, Any]] = [
    {},
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2},
    {"micro_batch_size": 2, "recompute": "none"},
    {"zero_stage": 0},
    {"pipeline_parallel": 4, "pipeline_schedule": "zero_bubble"},
]


@pytest.mark.slow(seconds=20)
@settings(max_examples=20)
@given(st.sampled_from(PINS), st.floats(1.1e9, 1.25e9), st.sampled_from([8, 16]))
def test_a_plan_is_found_where_one_exists(pins: dict[str, Any], size: float, batch: int) -> None:
    scenario = make_scenario("llama", "4xA100-80GB", seq_len=2048, global_batch_size=batch)
    scenario = with_memory(scenario, size)
    every = search(scenario, pins, top=1)
    found = first_plan(scenario, pins)
    assert (found.plan is not None) == every.fits
    if found.plan is None:
        return
    assert all(getattr(found.plan, name) == value for name, value in pins.items())
    assessment = assess(scenario, found.plan)
    assert assessment.fits
    step, best = assessment.time.step_seconds, every.seconds[0]
    assert step >= best * (1.0 - 1e-9)
    common = search(scenario, {**COMMON, **pins}, top=1)
    if common.fits:  # recomputing less may be faster still
        assert step <= common.seconds[0] * (1.0 + CLOSE)


def test_no_plan_is_found_where_none_fits() -> None:
    pins = {"micro_batch_size": 2, "recompute": "none"}
    scenario = make_scenario("llama", "4xA100-80GB", seq_len=2048, global_batch_size=8)
    room, less = with_memory(scenario, 2.0e9), with_memory(scenario, 1.8e9)
    assert first_plan(room, pins).plan is not None
    assert first_plan(less, pins).plan is None
    assert not search(less, pins, top=1).fits


def test_the_simplest_comes_before_the_fastest_within_the_limit_only() -> None:
    plans = [
        Plan(2, pipeline_parallel=4, virtual_stages=2, pipeline_schedule="zbv"),
        Plan(8, zero_stage=3),
        Plan(4, tensor_parallel=2),
    ]
    assert simplest_first([1.0, 1.0 + 0.9 * CLOSE, 2.0], plans) == [1, 0, 2]
    assert simplest_first([1.0, 1.0 + 1.1 * CLOSE, 2.0], plans) == [0, 1, 2]
    assert simplest_first([], []) == []
    assert complexity(plans[1]) < complexity(plans[2]) < complexity(plans[0])


@pytest.mark.parametrize(
    "missing", ["data_parallel", "zero_stage", "recompute", "micro_batch_size"]
)
def test_a_plan_is_complete_with_four_fields(missing: str) -> None:
    given = {"data_parallel": 8, "zero_stage": 1, "recompute": "none", "micro_batch_size": 1}
    assert is_complete(given)
    assert not is_complete({name: value for name, value in given.items() if name != missing})


def test_one_card_trains_what_its_host_can_hold() -> None:
    """ZeRO-3 of one rank: the weights of 8 billion parameters come layer by layer."""
    found = planner.plan("llama-3-8b", "1xRTX-4090", seq_len=1024)
    assert isinstance(found, PlanAnswer)
    assert (found.best.zero_stage, found.best.offload) == (3, "weights")
    parts = found.assessments[0].memory.parts
    assert parts.gradients < 2**30  # of a layer: the others are on the host
