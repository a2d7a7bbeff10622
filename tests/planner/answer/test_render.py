from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

import planner
from cost_models.plan.plan import Plan
from planner.answer.text import TIME_WORDS, bars, ranked_table, tight_words
from planner.cli.listing import model_text, models_text
from planner.text.paragraphs import MOMENT_WORDS, WIDTH
from tests.samples import CONFIGS, llama, make_scenario, sample_model

CLUSTERS = ["1xA100-80GB", "8xA100-80GB", "2x8xH100-SXM"]


Question = Callable[[], Any]


def questions() -> dict[str, Question]:
    found: dict[str, Question] = {
        f"fit {name} {cluster}": partial(_fit, name, cluster)
        for name in CONFIGS
        for cluster in CLUSTERS
    }
    found["does not fit"] = lambda: planner.fit("llama-3-8b", "1xA100-80GB")
    pipeline = {"pipeline_parallel": 4, "pipeline_schedule": "gpipe"}
    found["pipeline"] = lambda: planner.fit(llama(), "8xA100-80GB", **pipeline)
    found["plan"] = lambda: planner.plan(llama(), "2x8xH100-SXM", global_batch_size=64)
    found["one plan"] = lambda: planner.plan(llama(), "1xA100-80GB", global_batch_size=1, top=1)
    return found


def _fit(name: str, cluster: str) -> Any:
    return planner.fit(sample_model(name), cluster)


QUESTIONS = questions()
EACH = pytest.mark.parametrize("answer", QUESTIONS, indirect=True)


@cache  # asked when a test needs it, not while tests are collected
def answer_to(name: str) -> Any:
    return QUESTIONS[name]()


@pytest.fixture
def answer(request: pytest.FixtureRequest) -> Any:
    return answer_to(request.param)


@pytest.mark.sampled(3)
@EACH
def test_lines_fit_into_a_terminal(answer: Any) -> None:
    lines = str(answer).splitlines()
    # commands and names are never broken, so that they can be copied
    long = [line for line in lines if len(line) > WIDTH and len(line.split()) > 3]
    assert not long
    assert all(line == line.rstrip() or not line.strip() for line in lines[:3])
    assert "nan" not in str(answer).lower().split()
    assert "np.float64" not in str(answer)


@EACH
def test_json_holds_plain_finite_values(answer: Any) -> None:
    text = json.dumps(answer.to_dict(), allow_nan=False)
    assert json.loads(text)["schema_version"] == 1


def test_verdicts_are_said_in_capitals_with_the_margin() -> None:
    fits = str(planner.fit(llama(), "8xA100-80GB"))
    assert "\nFITS " in fits
    assert "margin" in fits
    assert "Maximum" in fits
    does_not = str(answer_to("does not fit"))
    assert "\nDOES NOT FIT " in does_not
    assert "short of" in does_not
    assert "Largest" in does_not


def test_every_moment_and_every_part_of_a_step_has_words() -> None:
    from cost_models.memory.peak import MOMENTS
    from cost_models.pricing.prediction import TIME_PARTS

    assert set(MOMENT_WORDS) == set(MOMENTS)
    assert set(TIME_WORDS) == set(TIME_PARTS)


def test_bars_are_as_long_as_their_share() -> None:
    lines = bars({"half": 5e9, "all": 1e10, "none": 0.0, "more": 3e10}, 1e10)
    assert [line.count("█") for line in lines] == [20, 40, 40]


def test_the_best_plan_is_marked_and_columns_line_up() -> None:
    answer = planner.plan(llama(), "8xA100-80GB", global_batch_size=16, top=5)
    lines = ranked_table(answer.assessments)
    assert len(lines) == 6
    assert [line[0] for line in lines] == [" ", "✔", " ", " ", " ", " "]
    assert len({len(line) for line in lines}) == 1


def test_columns_that_few_plans_need_are_shown_where_one_does() -> None:
    """Two plans that differ in what leaves the accelerator would look the same."""
    answer = planner.plan(llama(), "2xA100-80GB", global_batch_size=2, top=2)
    usual, changed = answer.assessments
    assert "offload" not in ranked_table([usual])[0]
    other: dict[str, Any] = {
        "offload": "optimizer",
        "expert_parallel": 2,
        "expert_tensor_parallel": False,
    }
    table = ranked_table([usual, replace(changed, plan=replace(changed.plan, **other))])
    for name in ("offload", "ep", "etp"):
        assert f" {name} " in table[0]
    assert " optimizer " in table[2]
    assert "none" in table[1]


def test_model_listings_say_parts_and_flops() -> None:
    from planner.cli.listing import model_listing, one_model

    assert "llama-3-8b" in models_text(model_listing())
    text = model_text(one_model("mixtral-8x7b"))
    assert "active" in text
    assert "experts" in text
    assert "forward" in text


@pytest.mark.parametrize(("offload", "names"), [("none", True), ("optimizer", False)])
def test_a_tight_plan_names_the_option_that_may_find_one_that_fits(
    offload: str, names: bool
) -> None:
    scenario = make_scenario("llama", "1xRTX-4090", global_batch_size=1)
    assert ("--allow offload" in tight_words(scenario, Plan(offload=offload))) == names
