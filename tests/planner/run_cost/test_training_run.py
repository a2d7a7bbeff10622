from typing import Any

import pytest

from hardware_profiles.errors import InputError
from planner.run_cost.prices import AcceleratorCost
from planner.run_cost.training_run import (
    DAY,
    RunRequest,
    StepCost,
    affordable_tokens,
    cost_of_run,
    parse_run_request,
)

STEP = StepCost(
    seconds=2.0, tokens=1000, num_gpus=8, accelerator_cost=AcceleratorCost(3.6, 500.0, ())
)


def test_a_step_by_hand() -> None:
    assert STEP.dollars == pytest.approx(2.0 * 8 / 3600 * 3.6)
    assert STEP.joules == 2.0 * 8 * 500
    assert STEP.per_token("time") == 0.002
    assert StepCost(2.0, 1000, 8, AcceleratorCost(None, None, ())).per_token("cost") is None


def test_a_whole_run_by_hand() -> None:
    document = cost_of_run(parse_run_request("10k", "1000", None), STEP)
    assert document is not None
    assert document.steps == 10
    assert document.seconds == 20.0
    assert document.gpu_hours == pytest.approx(20 * 8 / 3600)
    assert document.dollars == pytest.approx(0.16)
    assert document.joules == 80_000
    assert document.within_budget is True
    assert document.within_days is None
    assert cost_of_run(parse_run_request(10_500, None, None), STEP).steps == 11  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("job", "steps"),
    [
        (RunRequest(budget=1.6), 100),
        (RunRequest(days=1.0), DAY / 2),
        (RunRequest(budget=1.6, days=1e-4), 4),
        (RunRequest(), None),
    ],
)
def test_what_a_budget_buys_and_not_a_step_more(job: RunRequest, steps: float | None) -> None:
    tokens = affordable_tokens(job, STEP)
    assert tokens == (None if steps is None else pytest.approx(steps * STEP.tokens))
    if tokens is not None:
        assert affordable_tokens(job, STEP, 0.9) == 0.9 * steps // 1 * STEP.tokens  # type: ignore[operator]
        for more, inside in ((0, True), (STEP.tokens, False)):
            document = cost_of_run(RunRequest(tokens + more, job.budget, job.days), STEP)
            assert document is not None
            flags = [document.within_budget, document.within_days]
            assert all(flag is not False for flag in flags) == inside


@pytest.mark.parametrize("given", ["0", "-5", "many", "1e99", "nan", "inf", "5X", "", "1..2"])
def test_a_bad_amount_is_one_line(given: Any) -> None:
    with pytest.raises(InputError, match="--tokens"):
        parse_run_request(given, None, None)


@pytest.mark.parametrize(
    ("given", "value"), [("300B", 3e11), ("1.5T", 1.5e12), ("5,000", 5000), (5, 5), ("$50", 50)]
)
def test_amounts_are_read(given: Any, value: float) -> None:
    assert parse_run_request(None, given, None).budget == value
