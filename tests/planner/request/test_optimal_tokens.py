"""--compute-optimal: 20 tokens for each parameter, and what contradicts it."""

from typing import Any

import pytest

import planner
from hardware_profiles.errors import InputError

PLAN = {"data_parallel": 8, "zero_stage": 1, "recompute": "none", "micro_batch_size": 1}


def test_the_run_has_twenty_tokens_for_each_parameter() -> None:
    answer = planner.fit("llama-3.2-1b", "8xH100-SXM", compute_optimal=True, **PLAN)
    assert answer.job is not None
    assert answer.job.cost.tokens == 20 * answer.scenario.model.num_parameters
    same = planner.fit("llama-3.2-1b", "8xH100-SXM", tokens=answer.job.cost.tokens, **PLAN)
    assert same.job is not None
    assert same.job.cost == answer.job.cost
    assert "--compute-optimal" in answer.text().split("Next")[1]


def test_of_a_mixture_the_parameters_count_that_a_token_uses() -> None:
    plan = {"data_parallel": 32, "zero_stage": 3, "recompute": "full", "micro_batch_size": 1}
    answer = planner.fit("mixtral-8x7b", "4x8xH100-SXM", compute_optimal=True, **plan)
    assert answer.job is not None
    assert answer.job.cost.tokens == pytest.approx(20 * 12.88e9, rel=0.001)


def test_plan_takes_it_too() -> None:
    answer: Any = planner.plan(
        "llama-3.2-1b", "8xH100-SXM", fix="pp=1,tp=1", compute_optimal=True, top=1
    )
    tokens = 20 * answer.scenario.model.num_parameters
    assert answer.documents[0]["job"]["tokens"] == tokens


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": "300B"}, "--compute-optimal and --tokens 300B"),
        ({"find": "most-tokens", "days": 3}, "not with --find most-tokens"),
    ],
)
def test_contradictions_are_errors(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        planner.plan("gpt2", "8xA100-80GB", compute_optimal=True, **options)
    if "tokens" in options:
        with pytest.raises(InputError, match=words):
            planner.fit("gpt2", "8xA100-80GB", compute_optimal=True, **options)
