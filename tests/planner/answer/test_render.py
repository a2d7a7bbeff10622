import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest

import planner
from cost_models.memory.parts import PART_WORDS
from cost_models.plan.plan import Plan
from cost_models.step_time.parts import TIME_WORDS
from planner.answer.plan_answer import against_best, tight_words
from planner.answer.ranked_table import ranked_table, runner_up
from planner.cli.listings.listing import model_text, models_text
from planner.cli.outputs import coloured
from planner.text.bars import BUDGET, part_bars
from planner.text.paragraphs import LINES, MOMENT_WORDS
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
    found["experts"] = lambda: planner.plan("mixtral-8x7b", "2x8xH100-SXM", fix="ep=8,pp=2", top=5)
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


@pytest.mark.parametrize("columns", [60, 80, 100])
@pytest.mark.sampled(3)
@EACH
def test_lines_fit_into_a_terminal(
    answer: Any, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for verbose in (False, True):
        lines = answer.text(verbose=verbose).splitlines()
        # commands and names are never broken, so that they can be copied
        long = [line for line in lines if len(line) > columns and len(line.split()) > 3]
        assert not long
    assert all(line == line.rstrip() or not line.strip() for line in lines[:3])
    assert "nan" not in str(answer).lower().split()
    assert "np.float64" not in str(answer)


@pytest.mark.sampled(4)
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
    assert "short by" in does_not
    assert "Largest" in does_not
    assert "Step" not in does_not  # of a plan that cannot run


@pytest.mark.parametrize("name", ["fit llama 8xA100-80GB", "does not fit", "plan", "one plan"])
def test_a_screen_has_at_most_15_lines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert len(str(answer_to(name)).splitlines()) <= LINES


@pytest.mark.parametrize("name", ["fit llama 8xA100-80GB", "does not fit", "plan"])
def test_details_are_shown_where_they_are_wanted(name: str) -> None:
    answer = answer_to(name)
    short, long = str(answer), answer.text(verbose=True)
    assert "(default: " not in short
    assert "(default: " in long
    for label in ("\nAssumed ", "\nConfidence "):
        assert label in long
    assert "\nAssumed " in short
    assert "\nConfidence " not in short


@pytest.mark.parametrize(("word", "colour"), [("FITS", 32), ("TIGHT", 33), ("DOES NOT FIT", 31)])
def test_verdicts_are_coloured(word: str, colour: int) -> None:
    text = f"model\n{word}  peak 3 of 4 GiB\nNo FITS within a line"
    assert coloured(text) == text.replace(f"\n{word}", f"\n\x1b[{colour}m\x1b[1m{word}\x1b[0m", 1)


def test_parts_have_the_same_names_with_and_without_zero() -> None:
    for stage in (0, 1, 3):
        answer = planner.fit("llama-3-8b", "8xA100-80GB", zero_stage=stage)
        text = answer.text(verbose=True)
        for part in ("weights", "optimizer states", "CUDA and allocator"):
            assert f"\n  {part} " in text


def test_every_moment_and_every_part_of_a_step_has_words() -> None:
    from cost_models.memory.ledger import MOMENTS
    from cost_models.pricing.prediction import TIME_PARTS

    assert set(MOMENT_WORDS) == set(MOMENTS)
    assert set(TIME_WORDS) == set(TIME_PARTS)


def test_bars_are_as_long_as_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parts = {"weights": 5e9, "gradients": 0.0, "optimizer": 1e10, "logits": 2.5e10}
    lines = part_bars(parts, 2e10)
    names = [PART_WORDS[name] for name in ("logits", "optimizer", "weights")]
    assert [line.split("  ")[1] for line in lines] == [*names, "total"]
    filled = [line.count("█") for line in lines]
    assert filled[0] + filled[1] + filled[2] == pytest.approx(filled[3] + 1, abs=2)
    assert filled[0] == pytest.approx(2.5 * filled[1], abs=2)
    assert len({line.index(BUDGET) for line in lines}) == 1  # one line from top to bottom
    assert len({len(line) for line in lines}) == 1
    within = part_bars(parts, 1e11)
    assert all("█" not in line.split(BUDGET)[1] for line in within)


def test_small_parts_share_a_bar() -> None:
    parts = {"weights": 5e10, "gradients": 1e8, "optimizer": 1e10, "logits": 1e8, "runtime": 5e9}
    assert len(part_bars(parts, 8e10)) == 6
    lines = part_bars(parts, 8e10, 4)
    assert len(lines) == 5
    assert "gradients, logits" in lines[3]
    parts = {"weights": 3e10, "activations": 2.5e10, "logits": 2e10, "runtime": 1e10}
    parts |= {"optimizer": 4e10, "gradients": 3.5e10}
    assert part_bars(parts, 2e11, 3)[2].startswith("  weights, … ")  # the longest bar has a name


def test_the_best_plan_is_marked_and_columns_line_up() -> None:
    answer = planner.plan(llama(), "8xA100-80GB", global_batch_size=16, top=5)
    lines = ranked_table(answer.assessments)
    assert 2 < len(lines) <= 6
    assert [line[0] for line in lines] == [" ", "✔", *[" "] * (len(lines) - 2)]
    assert len({len(line) for line in lines}) == 1


def test_plans_with_the_same_figures_share_a_row() -> None:
    answer = planner.plan("llama-3-8b", "2x8xH100-SXM", top=4, fix="tp=1,pp=1,cp=1")
    first, second, *_ = answer.assessments
    assert {first.plan.zero_stage, second.plan.zero_stage} == {1, 2}
    assert first.memory.peak_bytes == second.memory.peak_bytes
    lines = ranked_table(answer.assessments)
    assert len(lines) < 5
    assert " 1-2 " in lines[1]
    assert runner_up(answer.assessments[:2]) is None
    assert runner_up(answer.assessments) not in (None, first, second)
    for column in (" tp ", " pp ", " vp ", " sp ", " cp ", " cp method ", " schedule "):
        assert column not in lines[0]


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_tables_fit_into_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = ranked_table(answer_to("experts").assessments)
    assert max(map(len, lines)) <= columns
    assert " GiB " in lines[0]
    assert " step" in lines[0]


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
    from planner.cli.listings.listing import model_listing, one_model

    listed = [line.split() for line in models_text(model_listing()).splitlines()]
    assert listed[0] == ["preset", "parameters", "layers", "as", "in"]
    assert ["dbrx", "131.60", "B", "mixtral"] in listed  # which has a family of its own elsewhere
    names = [line[0] for line in listed]
    assert {
        ("llama-13b", "llama-30b"),
        ("llama-3-8b", "llama-3-70b"),
        ("mixtral-8x7b", "mixtral-8x22b"),
        ("gpt2-medium", "gpt2-large"),
    } <= set(pairwise(names))
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


def test_what_the_runner_up_costs_and_saves_adds_up() -> None:
    def seconds(number: str, unit: str) -> float:
        return float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]

    text = planner.plan(llama(), "8xA100-80GB", global_batch_size=64, top=12)
    best, *others = [one.assessment for one in text.ranked]
    compared = 0
    for other in others:
        slower = other.time.step_seconds - best.time.step_seconds
        words = against_best(best, other, verbose=True)
        figures = [
            seconds(*found) for found in re.findall(r"([\d.]+) (s|ms|µs) (?:more|less)", words)
        ]
        if slower > 0.0 and len(figures) == 2:
            costs, saves = figures
            assert costs - saves == pytest.approx(slower, abs=0.01 * costs)
            compared += 1
        elif slower > 0.0 and figures:
            assert figures[0] < 1.1 * slower, words
    assert compared > 0
