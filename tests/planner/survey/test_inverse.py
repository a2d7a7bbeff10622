"""Inverse questions: the answer is that of trying every candidate forward."""

import json
from typing import Any

import pytest

import planner
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError, NoLegalPlanError
from planner.assessment import reach
from planner.request.constraints import parse_requirements
from planner.request.model import model_of
from planner.request.pins import parse_fixed
from planner.request.scenario import build_scenario
from planner.search.search import search
from planner.survey.inverse import InverseAnswer, sequence_step
from planner.text.answer import json_text
from tests.samples import CONFIGS, LLAMA, llama

LARGE = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "vocab_size": 32000,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 8,
    "max_position_embeddings": 10**6,
}
FIX = "pp=1,cp=1,recompute=full"


def find(what: str, model: Any = LARGE, cluster: Any = "4xA100-80GB", **options: Any) -> Any:
    answer = planner.plan(model, cluster, find=what, fix=options.pop("fix", FIX), top=1, **options)
    assert isinstance(answer, InverseAnswer)
    return answer


def fits(cluster: str, model: Any = LARGE, required: str | None = None, **options: Any) -> bool:
    """Whether the forward question has a plan that fits with its whole interval."""
    fixed = parse_fixed(options.pop("fix", FIX))
    question = build_scenario(model_of(model), parse_cluster(cluster), **options)
    found = search(question.scenario, fixed, require=parse_requirements(required), top=1)
    return any(reach.fits(question.scenario, plan) for plan in found.plans)


def test_the_fewest_accelerators_are_those_of_asking_every_number() -> None:
    options: dict[str, Any] = {"seq_len": 1024, "global_batch_size": 8}
    answer = find("fewest-gpus", cluster="4xA100-80GB", **options)
    smaller = [n for n in (1, 2, 4) if n < answer.value]
    assert fits(f"{answer.value}xA100-80GB", **options)
    assert smaller
    assert not any(fits(f"{n}xA100-80GB", **options) for n in smaller)
    assert answer.next_attempt is not None
    assert answer.next_attempt.value == smaller[-1]
    assert answer.best.world_size == answer.value
    assert "too large" in str(answer)


def test_of_named_clusters_the_smallest_is_found() -> None:
    options: dict[str, Any] = {"seq_len": 1024, "global_batch_size": 12}
    answer = find("fewest-gpus", cluster="1..4xA100-80GB", **options)
    assert [one.fits for one in answer.tried] == [False] * (answer.value - 1) + [True]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("required", [None, "memory<=40GiB"])
def test_the_longest_sequence_fits_and_the_next_does_not(required: str | None) -> None:
    options: dict[str, Any] = {"global_batch_size": 4, "require": required}
    answer = find("longest-sequence", **options)
    step = sequence_step(4)
    forward: dict[str, Any] = {"global_batch_size": 4, "required": required}
    assert answer.value % step == 0
    assert fits("4xA100-80GB", seq_len=answer.value, **forward)
    assert not fits("4xA100-80GB", seq_len=answer.value + step, **forward)
    assert answer.next_attempt.value == answer.value + step


@pytest.mark.slow
def test_learned_positions_end_a_sequence() -> None:
    answer = find("longest-sequence", CONFIGS["gpt2"], "2xA100-80GB", fix="", global_batch_size=2)
    assert answer.value == CONFIGS["gpt2"]["n_positions"]
    assert answer.next_attempt is None


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    answer = find("largest-micro-batch", seq_len=2048)
    for size, expected in ((answer.value, True), (answer.value + 1, False)):
        options: dict[str, Any] = {"seq_len": 2048, "global_batch_size": 4 * size}
        assert fits("4xA100-80GB", fix=f"{FIX},mbs={size}", **options) == expected
    assert answer.best.micro_batch_size == answer.value


def test_of_a_given_batch_the_divisors_are_tried() -> None:
    answer = find("largest-micro-batch", seq_len=2048, global_batch_size=192)
    assert 192 % answer.value == 0
    assert [one.fits for one in answer.tried] == [False] * (len(answer.tried) - 1) + [True]


def test_the_largest_model_of_a_family() -> None:
    names = "llama-3.2-1b,llama-3-8b,llama-3-70b"
    answer = find("largest-model", names, seq_len=1024, global_batch_size=4)
    assert answer.value == "llama-3-8b"
    assert answer.next_attempt.value == "llama-3-70b"
    assert not fits("4xA100-80GB", "llama-3-70b", seq_len=1024, global_batch_size=4)


def test_the_cheapest_cluster_and_the_most_tokens() -> None:
    options: dict[str, Any] = {"seq_len": 1024, "global_batch_size": 8, "price": "2,L40S=0.01"}
    clusters = "4xA100-80GB,8xL40S"
    cheapest = find("cheapest-cluster", cluster=clusters, **options)
    assert cheapest.value == "8xL40S"
    most = find("most-tokens", cluster=clusters, budget=100, **options)
    assert most.answer.ranked[0].scenario.cluster.name == "8xL40S"
    job = most.answer.documents[0]["job"]
    failing = job["with_failures"]  # what a budget buys is what is left beside failures
    step = most.answer.documents[0]["cost"]["dollars_per_step"] / failing["goodput"]
    assert failing["dollars"] <= 100 < failing["dollars"] + step
    assert failing["within_budget"]
    assert most.value == job["tokens"]


def test_the_document_is_json() -> None:
    document = json.loads(
        json_text(find("fewest-gpus", seq_len=1024, global_batch_size=4).to_dict())
    )
    assert document["find"] == "fewest-gpus"
    assert document["next"]["fits"] is False
    assert document["plans"]


@pytest.mark.parametrize(
    ("what", "options", "said"),
    [
        ("longest-sequence", {"seq_len": 5}, "leave it out"),
        ("largest-micro-batch", {"fix": "mbs=2"}, "do not pin it"),
        ("largest-micro-batch", {"require": "mbs<=2"}, "do not pin it"),
        ("most-tokens", {}, "needs --budget or --days"),
        ("fewest-gpus", {"pareto": "time,memory"}, "one at a time"),
        ("fewest-gpus", {"model": "gpt2,gpt2-xl"}, "largest-model"),
    ],
)
def test_bad_questions_are_one_line(what: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        find(what, options.pop("model", llama()), **options)


@pytest.mark.slow
def test_where_nothing_fits_the_smallest_candidate_says_why() -> None:
    with pytest.raises(NoLegalPlanError, match="not even 2 accelerators") as caught:
        find("fewest-gpus", "llama-3-70b", "2xA100-80GB", seq_len=1024)
    assert "too large" in str(caught.value)


@pytest.mark.slow
def test_where_nothing_is_in_time_the_smallest_change_is_named() -> None:
    options: dict[str, Any] = {"seq_len": 256, "global_batch_size": 8, "tokens": "1B"}
    with pytest.raises(NoLegalPlanError, match="not even 2 accelerators") as caught:
        find("fewest-gpus", llama(), "2xA100-80GB", days=1e-4, **options)
    (change,) = caught.value.document["changes"]
    assert change["instead_of"] == "--days 0.0001"
    assert "smallest change on 2xA100-80GB: --days " in str(caught.value)
    days = float(change["change"].removeprefix("--days "))
    assert find("fewest-gpus", llama(), "2xA100-80GB", days=days, **options).best


def test_the_largest_micro_batch_of_a_trainer_is_that_of_its_best_zero_stage() -> None:
    """Its stages are priced apart."""
    asked: dict[str, Any] = {"seq_len": 2048, "global_batch_size": 16, "to": "deepspeed"}
    answer = planner.plan("llama-3.2-1b", "2xRTX-4090", find="largest-micro-batch", **asked)
    assert isinstance(answer, InverseAnswer)
    assert answer.next_attempt is not None
    assert not answer.answer.fixed
    for size, has_plan in ((answer.value, True), (answer.next_attempt.value, False)):
        options = {**asked, "fix": {"micro_batch_size": size}, "require": "offload==none"}
        try:
            forward = planner.plan("llama-3.2-1b", "2xRTX-4090", **options)
        except NoLegalPlanError:
            assert not has_plan
        else:
            assert forward.assessments[0].fits == has_plan  # type: ignore[union-attr]
