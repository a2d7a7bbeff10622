"""Questions of new users about ``fit``, with an expert's verdict, plan and first fix."""

from typing import Any

import pytest

from cost_models.memory.parts import PART_WORDS
from planner.api.fit import fit
from planner.assessment.assess import assess
from planner.cli.app import main
from planner.search.search import search
from planner.search.simplicity import complexity
from tests.samples import make_scenario


def code_of(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["fit", *words.split()])
    return int(ended.value.code or 0), capsys.readouterr().out


# question, largest peak in GiB that an expert would accept for its plan
FITS_ANYWAY = [
    ("llama-2-70b 8xA100-40GB --lora 16", 37.0),  # a 16-bit base of 129 GiB over eight cards
    # an encoder and a decoder, under tensor parallelism
    pytest.param("t5-11b 8xA100-40GB", 39.0, marks=pytest.mark.slow),
    pytest.param("deepseek-v3 32x8xH800-SXM", 79.0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("words", "most"), FITS_ANYWAY)
def test_a_plan_of_the_cluster_fits_where_the_default_does_not(
    words: str, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = code_of(f"{words} -v", capsys)
    assert code == 0
    verdict = next(line for line in text.splitlines() if line.startswith("FITS"))
    assert float(verdict.split("peak ")[1].split(" of")[0]) <= most
    assert "(searched: the simplest " in " ".join(text.split())


def test_given_parts_are_kept() -> None:
    answer: Any = fit("llama-2-70b", "8xA100-40GB", lora=16, tensor_parallel=8)
    assert answer.verdict == "fits"
    assert answer.plan.tensor_parallel == 8


def test_the_simplest_of_equally_fast_plans_comes_first() -> None:
    """A plain interleaved pipeline is within 1 % of zero-bubble schedules here."""
    scenario = make_scenario("llama-2-7b", "8xA100-40GB", seq_len=4096, global_batch_size=8)
    found = search(scenario, {"pipeline_parallel": 4}, top=10, distinct=10)
    first = found.simplest_first()
    assert complexity(first.plans[0]) <= complexity(found.plans[0])
    assert first.seconds[0] <= 1.01 * found.seconds[0]
    step = assess(scenario, first.plans[0]).time.step_seconds
    assert step == pytest.approx(first.seconds[0])
    assert set(first.plans) == set(found.plans)


PINNED = "llama-3-8b 8xA100-80GB --recompute none --micro-batch-size 16 --dp 8"


@pytest.mark.slow
def test_a_given_plan_that_does_not_fit_says_that_another_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, text = code_of(PINNED, capsys)
    assert code == 7
    assert "DOES NOT FIT" in text
    assert "FITS with another plan" in text


def test_a_smaller_batch_is_the_first_fix_of_a_large_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, text = code_of("llama-3.2-1b 1xRTX-3090 --micro-batch-size 8", capsys)
    assert code == 3
    (first,) = [line for line in text.splitlines() if line.startswith("Fixes ")]
    assert "--micro-batch-size 1 --global-batch-size 1" in first


@pytest.mark.parametrize("model", ["llama-3-70b", pytest.param("t5-11b", marks=pytest.mark.slow)])
def test_the_largest_term_is_the_largest_of_its_part(model: str) -> None:
    answer: Any = fit(model, "1xA100-40GB")
    line = " ".join(str(answer).split()).split("Largest ")[1].split(" Fixes ")[0]
    part, rest = line.split(": ", 1)
    terms = [term for term in answer.step_memory.terms if PART_WORDS[term.part] == part]
    assert max(terms, key=lambda term: term.size).name in rest
