"""Savings are real: the whole search with the named options is at least as fast."""

from typing import Any

import pytest

import planner
from planner.advice.savings import LEAST, Saving
from planner.answer.plan_answer import PlanAnswer, saving_words
from planner.request.pins import parse_fixed
from tests.samples import llama


def answer_of(model: Any, cluster: str, **options: Any) -> PlanAnswer:
    answer = planner.plan(model, cluster, **options)
    assert isinstance(answer, PlanAnswer)
    return answer


def fastest(answer: PlanAnswer) -> float:
    """Return the shortest step: of the plans that tie for it, or of one with stages of its own."""
    assert answer.result.tie is not None
    return min(answer.result.tie.seconds, *(one.step.seconds for one in answer.ranked))


def asked_with(saving: Saving, model: Any, cluster: str, **options: Any) -> PlanAnswer:
    name, _, value = saving.options.removeprefix("--").partition(" ")
    if name == "on":
        return answer_of(model, value.partition(" ")[0], **options)
    given = parse_fixed(value) if name == "fix" else value
    return answer_of(model, cluster, **{**options, name.replace("-", "_"): given})


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["8xH100-SXM", pytest.param("16xL40S", marks=pytest.mark.slow)])
def test_the_search_with_a_saving_is_as_fast_as_said(cluster: str) -> None:
    answer = answer_of("llama-3.2-1b", cluster)
    assert answer.savings
    shares = [saving.share for saving in answer.savings]
    assert shares == sorted(shares, reverse=True)
    for saving in answer.savings:
        assert saving.share >= LEAST
        assert saving.seconds == pytest.approx((1.0 - saving.share) * fastest(answer))
        whole = asked_with(saving, "llama-3.2-1b", cluster)
        assert fastest(whole) <= saving.seconds * (1.0 + 1e-9)
        assert saving.changes_numerics == ("changes numerics" in saving_words(saving))
    assert f"Would save {100 * shares[0]:.1f} %" in str(answer)


def test_what_changes_numerics_says_so() -> None:
    answer = answer_of("llama-3.2-1b", "8xH100-SXM")
    exact = {saving.options for saving in answer.savings if not saving.changes_numerics}
    assert not any("quantised" in one or "8bit" in one or "bf16" in one for one in exact)


@pytest.mark.slow
def test_fewer_nodes_are_named_where_all_of_them_are_slower() -> None:
    """11 nodes do not divide 40 sequences, and leave a pipeline of 11 uneven stages; 10 do."""
    answer = answer_of("llama-3.2-1b", "11x1xL40S", global_batch_size=40)
    (fewer,) = (saving for saving in answer.savings if not saving.changes_numerics)
    assert fewer.options == "on 10x1xL40S (10 of 11 nodes)"


def test_pins_and_requirements_hold() -> None:
    answer = answer_of(llama(), "8xA100-80GB", global_batch_size=16, fix="zero=1", require="tp<=2")
    for saving in answer.savings:
        assert saving.plan.zero_stage == 1
        assert saving.plan.tensor_parallel <= 2
    assert not answer_of(llama(), "8xA100-80GB", objective="memory").savings
