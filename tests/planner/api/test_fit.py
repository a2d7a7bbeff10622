"""fit() and plan() from Python."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from cost_models.plan.plan import Plan
from cost_models.plan_file import read_plan_file, write_plan_file
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError, NoLegalPlanError
from planner.assessment.verdict import VERDICTS, budget_bytes
from tests.samples import examples, llama, make_scenario, with_memory

CLUSTER = "8xA100-80GB"


COMPLETE: dict[str, Any] = {
    "data_parallel": 8,
    "zero_stage": 0,
    "recompute": "none",
    "micro_batch_size": 1,
}


def fit(**options: Any) -> Any:
    return planner.fit(llama(), CLUSTER, seq_len=256, **options)


def test_defaults_are_documented_and_said() -> None:
    answer = fit()
    assert answer.plan.data_parallel == 8  # a small model
    said = "; ".join(answer.assumptions)
    for words in (
        "global_batch_size 8",
        "precision bf16",
        "optimizer adamw",
        "searched: the simpl",
    ):
        assert words in said


def test_shorter_targets_take_less_time_and_memory_and_longer_ones_more() -> None:
    def asked(**options: Any) -> Any:
        return planner.fit("t5-small", "1xA100-80GB", seq_len=512, micro_batch_size=64, **options)

    answers = [asked(), *(asked(target_seq_len=length) for length in (512, 128, 1024))]
    time, memory = (
        [of(answer.assessment) for answer in answers]
        for of in (lambda one: one.time.step_seconds, lambda one: one.memory.peak_bytes)
    )
    for plain, equal, short, long in (time, memory):
        assert short < equal < long
        assert equal == plain
    short = answers[2]
    assert "512 + 128 tokens" in short.text()
    assert "--target-seq-len 128" in short.text()


def test_what_is_given_is_not_an_assumption() -> None:
    answer = fit(
        global_batch_size=16,
        precision="fp16",
        optimizer="sgd",
        attention_kernel="eager",
        software="megatron",
        data_parallel=2,
        tensor_parallel=2,
        pipeline_parallel=2,
        zero_stage=1,
        sequence_parallel=False,
        recompute="full",
        micro_batch_size=2,
        num_microbatches=4,
    )
    assert answer.assumptions == parse_cluster(CLUSTER).notes + llama().assumptions or not [
        words for words in answer.assumptions if "(default" in words
    ]
    assert answer.plan == Plan(
        data_parallel=2,
        tensor_parallel=2,
        pipeline_parallel=2,
        zero_stage=1,
        recompute="full",
        micro_batch_size=2,
        num_microbatches=4,
    )
    assert answer.scenario.workload.precision == "fp16"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tensor_parallel": 4, "data_parallel": 2}, {"sequence_parallel": True}),
        ({"pipeline_parallel": 8, "data_parallel": 1}, {"num_microbatches": 8}),
        (
            {"pipeline_parallel": 2, "virtual_stages": 2, "data_parallel": 4},
            {"pipeline_schedule": "interleaved_1f1b"},
        ),
        (
            {
                "pipeline_parallel": 2,
                "pipeline_schedule": "interleaved_1f1b",
                "data_parallel": 4,
            },
            {"virtual_stages": 2},
        ),
        (
            {"pipeline_parallel": 2, "pipeline_schedule": "dualpipev", "data_parallel": 4},
            {"virtual_stages": 2, "num_microbatches": 4},
        ),
        (
            {"pipeline_parallel": 2, "pipeline_schedule": "zero_bubble", "data_parallel": 4},
            {"virtual_stages": 1, "num_microbatches": 2},
        ),
        ({"global_batch_size": 64}, {"num_microbatches": 8}),
        ({"global_batch_size": 64, "micro_batch_size": 4}, {"num_microbatches": 2}),
        ({"micro_batch_size": 4}, {"num_microbatches": 1}),
        ({"num_microbatches": 5}, {"micro_batch_size": 1}),
    ],
)
def test_the_rest_follows_from_what_is_given(
    options: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Data parallelism, ZeRO, recomputation and micro-batch size make a plan complete."""
    options = {**COMPLETE, **options}
    answer = fit(**options)
    assert {name: getattr(answer.plan, name) for name in expected} == expected
    assert {name: getattr(answer.plan, name) for name in options if hasattr(answer.plan, name)} == {
        name: value for name, value in options.items() if hasattr(answer.plan, name)
    }
    assert answer.plan.global_batch_size == answer.scenario.workload.global_batch_size


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"micro_batch_size": 0}, "plan: micro_batch_size = 0"),
        ({"micro_batch_size": -3}, "plan: micro_batch_size = -3"),
        ({"tensor_parallel": 3}, "does not divide the 8"),
        ({"tensor_parallel": 8}, "num_kv_heads = 4; legal values: 1, 2, 4"),
        ({"data_parallel": 3}, "8 ranks"),
        ({"tensor_paralel": 2}, "Did you mean tensor_parallel"),
        ({"global_batch_size": 4, "data_parallel": 8}, "global_batch_size"),
        ({"num_microbatches": 3, "global_batch_size": 16}, "= 24, but global_batch_size is 16"),
        (
            {
                **COMPLETE,
                "data_parallel": 4,
                "pipeline_parallel": 2,
                "num_microbatches": 1,
                "pipeline_schedule": "1f1b",
            },
            "num_microbatches >= 2 with pipeline_parallel = 2, got 1",
        ),
        ({"virtual_stages": 2, **COMPLETE}, "interleaved_zero_bubble need at least 2 of both"),
        ({"seq_len": 100, "tensor_parallel": 8}, "legal values"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        planner.fit(llama(), CLUSTER, **{"seq_len": 256, **options})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_least_recomputation_that_fits_is_taken() -> None:
    def fitted(seq_len: int, **options: Any) -> Any:
        return planner.fit(
            "llama-3-8b", "1x8xA100-80GB", seq_len=seq_len, micro_batch_size=1, **options
        )

    assert fitted(1024).plan.recompute == "none"
    reach = fitted(1024, recompute="none", data_parallel=8).reach
    assert reach is not None
    longest = reach.longest_seq_len
    more = fitted(longest + 16384, data_parallel=8)
    assert more.plan.recompute != "none"
    assert more.verdict == "fits"
    pinned = fitted(longest + 16384, recompute="none", data_parallel=8)
    assert pinned.verdict != "fits"


def test_recomputation_in_parts_lies_between_none_and_all() -> None:
    def fitted(**options: Any) -> Any:
        return planner.fit(
            "llama-3-8b", "1x8xA100-80GB", seq_len=1024, micro_batch_size=1, **options
        )

    plans = [fitted(recompute="none")]
    plans += [fitted(recompute="full", recompute_layers=n) for n in (8, 24)]
    plans += [fitted(recompute="full")]
    peaks = [answer.assessment.memory.peak_bytes for answer in plans]
    steps = [answer.assessment.time.step_seconds for answer in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert steps == sorted(steps)
    assert len(set(steps)) == len(steps)
    assert plans[1].assessment.time.parts.recompute == pytest.approx(
        plans[3].assessment.time.parts.recompute / 4
    )
    # which layers recompute is no question without recomputation
    counted = fitted(recompute_layers=8)  # with flash attention, selective would spare nothing
    assert counted.plan.recompute == "full"
    assert counted.assessment.memory.peak_bytes < fitted().assessment.memory.peak_bytes


def test_the_search_prices_recomputation_in_parts_where_it_is_pinned() -> None:
    fix = "recompute=full,recompute_layers=2,dp=8,tp=1,pp=1"
    found = planner.plan("llama-3-8b", "1x8xA100-80GB", seq_len=1024, fix=fix)
    assert found.best.recompute_layers == 2
    options = {**found.best.to_dict(), "micro_batch_size": found.best.micro_batch_size}
    again = planner.fit("llama-3-8b", "1x8xA100-80GB", seq_len=1024, global_batch_size=8, **options)
    assert again.assessment.time == found.assessments[0].time
    with pytest.raises(InputError, match="recompute_layers = 33"):
        planner.fit("llama-3-8b", "1x8xA100-80GB", recompute="full", recompute_layers=33)


def test_one_sequence_too_long_does_not_fit_and_the_longest_does() -> None:
    answer = fit(**COMPLETE)
    assert answer.reach is not None
    longest = answer.reach.longest_seq_len
    at = planner.fit(llama(), CLUSTER, seq_len=longest, **COMPLETE)
    over = planner.fit(llama(), CLUSTER, seq_len=longest + 128, **COMPLETE)
    assert at.verdict == "fits"
    assert over.verdict != "fits"


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    answer = planner.fit("llama-3.2-1b", CLUSTER, seq_len=2048, **COMPLETE)
    assert answer.reach is not None
    largest = answer.reach.largest_micro_batch_size
    for size, fits in ((largest, True), (largest + 1, False)):
        again = planner.fit(
            "llama-3.2-1b", CLUSTER, seq_len=2048, **{**COMPLETE, "micro_batch_size": size}
        )
        assert (again.verdict == "fits") == fits


def test_plan_returns_what_search_found_as_a_table() -> None:
    answer = planner.plan(llama(), CLUSTER, seq_len=256, global_batch_size=16, top=5)
    table = answer.table
    assert len(table) == 5
    assert table["step_seconds"][1:].is_monotonic_increasing  # the first: the simplest
    assert table["step_seconds"][0] <= 1.01 * table["step_seconds"].min()
    assert table.loc[0, "tensor_parallel"] == answer.best.tensor_parallel
    assert answer.plan_file(2).plan == answer.ranked[2].plan
    assert "<pre>" in answer._repr_html_()


def test_plan_takes_pins_as_text_and_as_a_mapping() -> None:
    text, mapping = (
        planner.plan(llama(), CLUSTER, seq_len=256, fix=fix)
        for fix in ("tp=2,zero=1", {"tensor_parallel": 2, "zero_stage": 1})
    )
    assert text.result.plans == mapping.result.plans
    assert text.best.tensor_parallel == 2


def test_fit_prices_the_best_plan_as_the_search_did() -> None:
    best = planner.plan(llama(), CLUSTER, seq_len=256, global_batch_size=16, top=1)
    plan = best.best
    again = planner.fit(llama(), CLUSTER, seq_len=256, global_batch_size=16, **plan.to_dict())
    assert again.assessment == best.assessments[0]


@pytest.mark.slow  # ways out are searched twice
def test_where_nothing_fits_the_error_names_the_smallest_plan() -> None:
    small = with_memory(make_scenario(), 1e8).cluster
    with pytest.raises(NoLegalPlanError, match="the smallest"):
        planner.plan(llama(), small, seq_len=256)
    answer = planner.fit(llama(), small, seq_len=256)
    assert answer.verdict == "does_not_fit"
    assert answer.assessment.margin_bytes < 0
    assert budget_bytes(small) == pytest.approx(0.97e8)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: planner.fit(None, "8xA100-80GB"), "model = None"),
        (lambda: planner.fit("llama-3-8b", 8), "cluster = 8"),
        (lambda: planner.fit("llama-3-8b", "8xA100-80GB", seq_len="x"), "seq_len = 'x'"),
        (lambda: planner.fit("llama-3-8b", "8xA100-80GB", precision=3), "precision = 3"),
        (lambda: planner.fit("llama-3-8b", "8xA100-80GB", software=7), "software = 7"),
        (lambda: planner.plan("llama-3-8b", "8xA100-80GB", top=0), "top = 0"),
        (lambda: planner.plan("llama-3-8b", "8xA100-80GB", fix=3), "fix = 3"),
    ],
)
def test_arguments_of_a_wrong_kind_are_named(call: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        call()


def test_a_path_and_the_values_of_a_config_are_models() -> None:
    folder = Path("examples/tiny-llama")
    values = json.loads((folder / "config.json").read_text())
    by_path = planner.fit(folder, "8xA100-80GB")
    by_values = planner.fit(values, "8xA100-80GB")
    assert (
        by_path.assessment
        == by_values.assessment
        == planner.fit(str(folder), "8xA100-80GB").assessment
    )
    assert planner.plan("gpt2", "8xA100-80GB", fix={"tensor_parallel": None}, top=1).result.plans


def test_adapters_are_priced_and_said() -> None:
    """A frozen base: 2 bytes a parameter and no optimizer, or 4 bits and scales."""
    whole = planner.fit("llama-3-8b", "1xA100-80GB", zero_stage=0)
    small = planner.fit("llama-3-8b", "1xA100-80GB", lora=16, recompute="full")
    four = planner.fit("llama-3-8b", "1xA100-80GB", qlora=16, recompute="full")
    parameters = whole.scenario.model.num_parameters
    trained = small.scenario.model.num_trainable_parameters
    assert whole.verdict == "does_not_fit"
    assert small.verdict == four.verdict == "fits"
    states = [a.assessment.memory.parts for a in (small, four)]
    assert states[0].weights == pytest.approx(2 * parameters + (2 + 4) * trained)
    assert states[0].optimizer == pytest.approx(8 * trained)
    assert states[1].weights < 0.45 * states[0].weights
    every = planner.fit("llama-3-8b", "1xA100-80GB", zero_stage=0, recompute="full")
    assert small.assessment.time.step_seconds < 0.9 * every.assessment.time.step_seconds
    assert "trained (lora, rank 16)" in str(small)
    assert any("frozen base" in line for line in small.assumptions)


def test_the_plan_of_an_adapter_comes_back_from_its_file(tmp_path: Path) -> None:
    answer = planner.plan("llama-3.2-1b", "2xA100-80GB", lora=8, seq_len=512, top=1)
    write_plan_file(tmp_path / "plan.json", answer.plan_file())
    file = read_plan_file(tmp_path / "plan.json")
    assert file.workload.adapter_rank == 8
    assert file.model == answer.scenario.model
    with pytest.raises(InputError, match="choose one of them"):
        planner.fit("llama-3.2-1b", "2xA100-80GB", lora=8, qlora=16)


def test_both_adapters_of_one_rank_are_those_on_a_base_in_4_bits() -> None:
    """A fix, ``--qlora 8``, is appended to ``--lora 8``."""
    options: dict[str, Any] = {"seq_len": 512, "zero_stage": 0}
    both = planner.fit("llama-3.2-1b", "2xA100-80GB", lora=8, qlora=8, **options)
    one = planner.fit("llama-3.2-1b", "2xA100-80GB", qlora=8, **options)
    assert both.assessment == one.assessment
    assert "--lora 8 --qlora 8 = --qlora 8" in str(both)


@pytest.mark.parametrize(
    ("device", "said"), [("gpu", "a host's cores update at"), ("cpu", "saves nothing")]
)
def test_offload_says_what_it_stands_on(device: Any, said: str) -> None:
    cluster = parse_cluster(CLUSTER)
    cluster = replace(cluster, accelerator=replace(cluster.accelerator, device=device))
    answer = planner.fit(llama(), cluster, seq_len=256, offload="optimizer")
    assert answer.plan.offload == "optimizer"
    assert any(said in words for words in answer.assumptions)
    assert not any("offload" in words for words in fit().assumptions)


@pytest.mark.slow
def test_pinned_offload_is_searched() -> None:
    options: dict[str, Any] = {"seq_len": 256, "global_batch_size": 8}
    found = planner.plan(llama(), CLUSTER, fix={"offload": "optimizer"}, **options)
    assert found.best.offload == "optimizer"
    assert planner.plan(llama(), CLUSTER, **options).best.offload == "none"


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("LLaMA-Factory", "hf-trainer+fsdp2"),
        ("TRL", "hf-trainer+fsdp2"),
        ("DeepSpeed", "torch-trainer+deepspeed-zero3"),
        ("unsloth", "hf-trainer-foak"),
    ],
)
def test_a_trainer_may_be_named_as_its_users_do(name: str, profile: str) -> None:
    answer = fit(software=name, zero_stage=3)
    assert answer.scenario.software.name == profile


def test_a_trainer_with_a_profile_for_each_zero_stage_takes_the_fastest_that_fits() -> None:
    free = fit(software="deepspeed")
    stages = [fit(software="deepspeed", zero_stage=one) for one in range(4)]
    steps = [one.assessment.time.step_seconds for one in stages if one.verdict == "fits"]
    assert free.verdict == "fits"
    assert free.assessment.time.step_seconds == min(steps)
    with pytest.raises(InputError, match="no-such-trainer"):
        fit(software="no-such-trainer")


@settings(max_examples=examples(10))
@given(
    part=st.sampled_from([{}, {"zero_stage": 1}, {"recompute": "full"}, COMPLETE]),
    software=st.sampled_from(["shardplan", "megatron"]),
    seq_len=st.sampled_from([256, 4096]),
    shares=st.lists(st.floats(0.3, 3.0), min_size=4, max_size=4),
)
def test_more_memory_never_lowers_the_verdict(
    part: dict[str, Any], software: str, seq_len: int, shares: list[float]
) -> None:
    """Also where more memory lets the search choose a faster plan."""
    asked = {"seq_len": seq_len, "software": software, **part}
    peak = planner.fit(llama(), CLUSTER, **asked).assessment.memory.peak_bytes
    verdicts = []
    for size in sorted(peak * share for share in shares):
        cluster = with_memory(make_scenario(cluster=CLUSTER), size).cluster
        answer = planner.fit(llama(), cluster, **asked)
        verdicts.append(VERDICTS.index(answer.assessment.verdict))
    assert verdicts == sorted(verdicts, reverse=True)
