import json
from typing import Any

import pytest

import planner
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError
from planner.answer.plan_answer import PlanAnswer
from planner.request.model import model_of
from planner.survey.answer import SurveyAnswer
from planner.survey.cases import WorkloadRequest
from planner.text.answer import json_text
from tests.samples import llama


def batch_of(*clusters: str, model: str = "llama-3.1-8b", **options: Any) -> int:
    request = WorkloadRequest(model_of(model), options, None)
    return request.common_batch([parse_cluster(name) for name in clusters]).size


def test_every_accelerator_of_every_cluster_gets_whole_sequences() -> None:
    size = batch_of("2x8xL40S", "3x8xH100-SXM", "8xH100-SXM")
    assert size % 48 == 0
    assert 2e6 < 4096 * size < 8e6  # tokens; the best batch for this model has 4.2 million
    assert batch_of("1024x8xL40S", "8xH100-SXM") == 8192  # a sequence for each is more than that


def test_the_batch_grows_with_the_run_and_with_shorter_sequences() -> None:
    clusters = [parse_cluster("8xH100-SXM")]
    sizes = [
        WorkloadRequest(model_of("llama-3.1-8b"), {"seq_len": length}, None, tokens).common_batch(
            clusters
        )
        for length, tokens in ((4096, 15e9), (4096, 15e12), (1024, 15e12))
    ]
    assert sizes[0].size < sizes[1].size
    assert sizes[2].size == 4 * sizes[1].size


def test_batches_are_compared_by_their_tokens_per_second() -> None:
    options = {"seq_len": 256, "fix": "pp=1,tp=1"}
    answer = planner.plan(llama(), "2xA100-80GB", global_batch_size="2..12", **options)
    assert isinstance(answer, SurveyAnswer)
    document = json.loads(json_text(answer.to_dict()))
    steps = {}
    for size in (2, 4, 8, 12):
        alone = planner.plan(llama(), "2xA100-80GB", global_batch_size=size, **options)
        assert isinstance(alone, PlanAnswer)
        steps[size] = alone.result.seconds[0]
    cases = {case["global_batch_size"]: case["best"] for case in document["cases"]}
    assert {size: best["time"]["step_seconds"] for size, best in cases.items()} == steps
    best = min(steps, key=lambda size: steps[size] / size)
    assert answer.scenario.workload.global_batch_size == best
    assert " batch " in str(answer)


@pytest.mark.parametrize("given", ["12..2", "a..b", "2..4..8", "0..4", "2-4", "-3"])
def test_a_wrong_range_of_batches_is_refused(given: str) -> None:
    with pytest.raises(InputError, match="global_batch_size = "):
        planner.plan(llama(), "2xA100-80GB", global_batch_size=given)


@pytest.mark.parametrize("find", ["fewest-gpus", "longest-sequence"])
def test_an_inverse_question_takes_one_batch(find: str) -> None:
    with pytest.raises(InputError, match="one size is expected"):
        planner.plan(llama(), "2xA100-80GB", global_batch_size="2..4", find=find)


@pytest.mark.slow
def test_cheap_accelerators_win_where_a_step_is_long_enough() -> None:
    """With a sequence for each accelerator, the network between L40S takes most of a step."""
    winners = []
    for batch in (None, 16):
        answer = planner.plan(
            "llama-3.1-8b", "16xL40S,8xH100-SXM", global_batch_size=batch, budget=10_000
        )
        assert isinstance(answer, SurveyAnswer)
        winners.append(answer.scenario.cluster.accelerator.name)
    assert winners == ["L40S", "H100-SXM-80GB"]
