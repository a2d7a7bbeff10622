"""fit --inference: verdicts, reach and ways out that hold, defaults that are said, plain errors."""

import inspect
import json
import shlex
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest

import planner
from cost_models.pricing.prediction import MEMORY_PARTS
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError
from hardware_profiles.options import declared
from planner.assessment.verdict import verdict
from planner.cli.app import main
from planner.request.requests import ServingOptions
from planner.serving.answer import ServingAnswer
from planner.serving.command import vllm_options
from planner.serving.request import SHARED
from planner.serving.scenario import (
    PLAN_FIELDS,
    assess_serving,
    layouts,
    point_of,
    sequences_of,
    serving_interval,
    usual_layouts,
)
from tests.samples import CONFIGS, llama

NODE = "8xA100-80GB"


def serve(model: Any = "llama-3-8b", cluster: str = NODE, **options: Any) -> ServingAnswer:
    answer = planner.fit(model, cluster, inference=True, **options)
    assert isinstance(answer, ServingAnswer)
    return answer


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main(words)
    return capsys.readouterr().out


def layout(answer: ServingAnswer) -> tuple[int, int, int, int]:
    plan = answer.plan
    return (
        plan.data_parallel,
        plan.tensor_parallel,
        plan.pipeline_parallel,
        plan.expert_parallel,
    )


def test_defaults_are_documented_and_said() -> None:
    answer = serve()
    workload = answer.scenario.workload
    assert (workload.concurrency, workload.context_len) == (8, 8192)
    assert workload.weight_precision == workload.kv_precision == workload.precision == "bf16"
    assert layout(answer) == (8, 1, 1, 1)
    said = "; ".join(answer.assumptions)
    for words in (
        "context_len 8192 (default",
        "prefill_chunk 8192 (default",
        "precision bf16 (default",
        "weight_precision bf16 (default",
        "kv_precision bf16 (default",
        "data_parallel 8, tensor_parallel 1, pipeline_parallel 1 (default",
        "concurrency 8 (default: one sequence for each replica)",
    ):
        assert words in said


def test_what_is_given_is_not_an_assumption() -> None:
    answer = serve(
        llama(),
        concurrency=4,
        context_len=128,
        prompt_len=64,
        prefill_chunk=64,
        precision="bf16",
        weight_precision="int8",
        kv_precision="fp8",
        data_parallel=4,
        tensor_parallel=2,
        pipeline_parallel=1,
    )
    assert not [words for words in answer.assumptions if "(default" in words and "MLP" not in words]
    assert layout(answer) == (4, 2, 1, 1)
    assert sequences_of(answer.scenario, answer.plan) == 1


@pytest.mark.parametrize(
    ("model", "cluster", "options", "expected"),
    [
        ("llama-3-70b", NODE, {"concurrency": 8}, (4, 2, 1, 1)),
        ("llama-3-70b", NODE, {"concurrency": 64}, (2, 4, 1, 1)),
        ("llama-3-70b", "8xRTX4090", {"concurrency": 1, "weight_precision": "int8"}, (2, 4, 1, 1)),
        ("llama-3.1-405b", "2x8xH100-SXM", {"context_len": 8192}, (1, 8, 2, 1)),
        ("gpt2", NODE, {"tensor_parallel": 4}, (2, 4, 1, 1)),
        # latents are whole on every tensor-parallel rank: replicas that share experts do better
        ("deepseek-v3", "8xH200-SXM", {"concurrency": 8, "context_len": 8192}, (1, 8, 1, 1)),
        ("deepseek-v3", "8xH200-SXM", {"concurrency": 64, "context_len": 32768}, (8, 1, 1, 8)),
        ("gpt-oss-120b", "1xH100-SXM-80GB", {"context_len": 8192}, (1, 1, 1, 1)),
    ],
)
def test_the_smallest_replica_that_fits_is_taken(
    model: str, cluster: str, options: dict[str, Any], expected: tuple[int, ...]
) -> None:
    answer = serve(model, cluster, **options)
    assert layout(answer) == expected
    assert answer.verdict == "fits"


def test_smaller_replicas_than_the_one_taken_do_not_fit() -> None:
    answer = serve("llama-3-70b", concurrency=64)
    size = answer.plan.tensor_parallel * answer.plan.pipeline_parallel
    for plan in usual_layouts(answer.scenario, {}):
        if plan.tensor_parallel * plan.pipeline_parallel < size:
            assert not assess_serving(answer.scenario, plan).fits


def test_layouts_use_every_accelerator_and_each_is_one_of_them() -> None:
    answer = serve("mixtral-8x7b", concurrency=8)
    every = list(layouts(answer.scenario, {}))
    assert len(set(every)) == len(every) > 10
    for plan in every:
        assert plan.data_parallel * plan.tensor_parallel * plan.pipeline_parallel == 8


@pytest.mark.parametrize(
    ("model", "cluster", "options"),
    [
        ("llama-3-8b", NODE, {"concurrency": 64, "context_len": 4096}),
        ("gemma-2-27b", "2xA100-80GB", {"concurrency": 5, "context_len": 6000}),
        ("deepseek-v3", "8xH200-SXM", {"concurrency": 3, "context_len": 65_536}),
        ("mixtral-8x7b", "4xA100-80GB", {"concurrency": 7, "kv_precision": "int8"}),
        ("t5-large", "1xA100-40GB", {"concurrency": 4, "context_len": 512}),
    ],
)
def test_the_reach_is_the_last_that_fits(model: str, cluster: str, options: dict[str, Any]) -> None:
    answer = serve(model, cluster, **options)
    assert answer.verdict == "fits"

    def verdict(**changes: Any) -> str:
        workload = replace(answer.scenario.workload, **changes)
        scenario = replace(answer.scenario, workload=workload)
        return assess_serving(scenario, answer.plan).verdict

    most, longest = answer.reach["largest_concurrency"], answer.reach["longest_context_len"]
    assert most % answer.plan.data_parallel == 0
    assert verdict(concurrency=most) == "fits"
    assert verdict(concurrency=most + 1) != "fits"
    assert verdict(context_len=longest) == "fits"
    if longest != answer.scenario.model.max_seq_len:
        assert verdict(context_len=longest + 16) != "fits"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "cluster", "options"),
    [
        ("llama-3-70b", "2xA100-80GB", {"concurrency": 64}),
        ("mixtral-8x7b", "2xA100-80GB", {"concurrency": 32, "context_len": 32_768}),
        ("deepseek-v3", "8xH200-SXM", {"concurrency": 64, "tensor_parallel": 8}),
        ("llama-3-70b", "1xRTX4090", {"concurrency": 1}),
        ("bert-large", "1xT4", {"concurrency": 2000, "prefill_chunk": 1_000_000}),
        # nothing helps alone
        ("llama-3.1-405b", "1xT4", {"concurrency": 1000}),
        ("llama-2-13b", "1xA10G", {"concurrency": 100, "context_len": 40_000}),
    ],
)
def test_ways_out_fit_when_they_are_asked(
    model: str, cluster: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = serve(model, cluster, **options)
    assert answer.verdict == "does_not_fit"
    assert answer.ways_out
    assert len({way.options for way in answer.ways_out}) == len(answer.ways_out)
    for way in answer.ways_out:
        words = way.options.split()
        where = cluster if words[0].startswith("--") else words.pop(0)
        given = dict(zip(words[::2], words[1::2], strict=True))
        names = {
            "--dp": "data_parallel",
            "--tp": "tensor_parallel",
            "--pp": "pipeline_parallel",
            "--ep": "expert_parallel",
        }
        changes = {
            names.get(key, key[2:].replace("-", "_")): int(v) if v.isdigit() else v
            for key, v in given.items()
        }
        asked = {**options, **changes}
        if "data_parallel" not in changes:
            asked |= {name: getattr(way.plan, name) for name in PLAN_FIELDS}
        again = serve(model, where, **asked)
        assert again.verdict == "fits", way
        assert again.assessment.memory.peak_bytes == way.peak_bytes
        document = json.loads(json.dumps(again.to_dict()))
        of_cluster = document["cluster"] | {"name": ANY}  # 4xH100 or 1x4xH100
        assert json.loads(printed([*shlex.split(way.command)[1:], "--json"], capsys)) == (
            document | {"assumptions": ANY, "cluster": of_cluster}
        )


def test_a_tight_answer_has_ways_out_too() -> None:
    answer = serve(
        "deepseek-v3", "8xH200-SXM", concurrency=64, context_len=65_536,
        data_parallel=8, expert_parallel=8,
    )  # fmt: skip
    assert answer.verdict == "tight"
    assert answer.ways_out


def test_the_interval_is_of_both_kinds_of_parts() -> None:
    low, high = serving_interval(100.0, 10.0)
    assert (low, high) == pytest.approx((99.0 + 5.0, 101.0 + 15.0))
    assert [verdict(low, high, budget) for budget in (116.0, 110.0, 103.9)] == [
        "fits",
        "tight",
        "does_not_fit",
    ]


def test_published_formats_are_the_default() -> None:
    assert serve("gpt-oss-20b").scenario.workload.weight_precision == "mxfp4"
    assert serve("deepseek-r1", "8xH200-SXM").scenario.workload.weight_precision == "fp8"
    config = CONFIGS["llama"] | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    answer = serve(config)
    assert answer.scenario.workload.weight_precision == "int4"
    assert "weight_precision int4 (default: as the weights are published)" in answer.assumptions
    config = CONFIGS["llama"] | {"quantization_config": {"quant_method": "bitsandbytes"}}
    assert "quantization_config 'bitsandbytes' is not read" in "; ".join(serve(config).assumptions)


def test_seq_len_is_another_word_for_the_context() -> None:
    assert serve(seq_len=1000).assessment == serve(context_len=1000).assessment


def test_a_float_format_of_the_weights_is_that_of_the_computation() -> None:
    workload = serve(llama(), weight_precision="fp32").scenario.workload
    assert workload.precision == workload.kv_precision == "fp32"


def test_an_encoder_says_that_it_has_no_cache() -> None:
    answer = serve("bert-base", "1xT4", concurrency=4)
    assert answer.assessment.memory.parts["kv_cache"] == 0.0
    assert answer.reach == {}
    assert "keeps no cache" in "; ".join(answer.assumptions)
    assert "Cache" not in str(answer)
    assert vllm_options(answer.scenario, answer.plan) is None


def test_vllms_options_say_the_same() -> None:
    answer = serve(concurrency=64, context_len=4096, kv_precision="fp8", tensor_parallel=2)
    options = vllm_options(answer.scenario, answer.plan)
    assert options is not None
    words = options.split()
    said = dict(zip(words[::2], words[1::2], strict=True))
    share = float(said.pop("--gpu-memory-utilization"))
    assert said == {
        "--tensor-parallel-size": "2",
        "--data-parallel-size": "4",
        "--max-model-len": "4096",
        "--max-num-seqs": "16",
        "--max-num-batched-tokens": "8192",
        "--kv-cache-dtype": "fp8",
    }
    needed = answer.assessment.memory.peak_bytes / answer.assessment.budget.capacity
    assert needed <= share < needed + 0.01


def test_stages_of_ones_own() -> None:
    answer = serve(llama(), "2xA100-80GB", layers="2,6", context_len=4096, concurrency=64)
    assert layout(answer) == (1, 1, 2, 1)
    memory = answer.assessment.memory
    assert memory.limiting_stage == 1
    assert [served.stage for served in memory.stages] == [0, 1]
    assert max(served.peak_bytes for served in memory.stages) == memory.peak_bytes
    assert answer.to_dict()["layer_ranges"] == [[0, 2], [2, 8]]


def test_json_has_the_keys_of_fit_and_the_cache() -> None:
    served = serve(llama(), concurrency=16).to_dict()
    keys = "schema_version verdict model cluster workload plan memory time assumptions confidence"
    assert {*keys.split(), "ways_out", "reach"} <= set(served)
    keys = "peak_bytes low_bytes high_bytes budget_bytes budget_source margin_bytes limiting_stage"
    assert {*keys.split(), "moment", "stages", "parts"} <= set(served["memory"])
    assert {*MEMORY_PARTS, "kv_cache"} == set(served["memory"]["parts"])
    memory = served["memory"]
    assert sum(memory["parts"].values()) == pytest.approx(memory["peak_bytes"])
    assert memory["low_bytes"] < memory["peak_bytes"] < memory["high_bytes"]
    json.dumps(served, allow_nan=False)


def test_more_ranks_than_key_heads_can_serve() -> None:
    """8 key heads on 16 ranks: training refuses that, a server holds copies."""
    answer = serve("llama-3-70b", "2x8xA100-80GB", tensor_parallel=16, concurrency=4)
    assert answer.assessment.memory.kv_bytes_per_token == 80 * 2 * 128 * 2
    assert point_of(answer.scenario, answer.plan).tensor_parallel == 16


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero_stage": 3}, "--inference and --zero: only training has that"),
        ({"optimizer": "adamw", "lora": 8}, "--inference and --optimizer, --lora: only training"),
        ({"recompute": "full"}, "--inference and --recompute"),
        ({"concurrency": 0}, "concurrency = 0 (must be a whole number from 1"),
        ({"context_len": -5}, "context_len = -5"),
        ({"context_len": 9000, "seq_len": 100}, "--context-len 9000 and --seq-len 100"),
        ({"prefill_chunk": 1.5}, "prefill_chunk = 1.5"),
        ({"prompt_len": 9000}, "prompt_len = 9000 (must be a whole number from 1 to 8,192)"),
        ({"kv_precision": "fp4"}, "kv_precision = 'fp4' (must be one of bf16, fp16, fp32, fp8"),
        ({"weight_precision": "int3"}, "Did you mean int"),
        ({"weight_precision": "mxfp4"}, "llama-3-8b has no experts"),
        ({"precision": "fp8"}, "precision = 'fp8' (must be one of bf16, fp16, fp32)"),
        ({"tensor_parallel": 3}, "8 accelerators"),
        ({"tensor_parallel": 8, "data_parallel": 2}, "= 16, but there are 8 accelerators"),
        ({"tensor_paralel": 2}, "Did you mean tensor_parallel"),
        ({"layers": "1,2"}, "must add up to 32"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        serve(**options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_every_argument_of_training_is_refused() -> None:
    """A new one must not be passed over in silence."""
    arguments = inspect.signature(planner.fit).parameters.values()
    names = [a.name for a in arguments if a.kind is inspect.Parameter.KEYWORD_ONLY]
    known = {"inference", *SHARED, *declared(ServingOptions), *PLAN_FIELDS}
    training = set(names) - known
    assert len(training) > 15
    for name in training:
        with pytest.raises(InputError, match="--inference and --"):
            serve(**{name: 1})


def test_serving_options_need_inference() -> None:
    with pytest.raises(InputError, match=r"--concurrency, --kv-precision: needs --inference"):
        planner.fit("llama-3-8b", NODE, concurrency=4, kv_precision="fp8")


def test_learned_positions_end_somewhere() -> None:
    with pytest.raises(InputError, match="must be 1 to 1024"):
        serve("gpt2", context_len=2000)
    assert "longer than the 8192" in "; ".join(serve(context_len=9000).assumptions)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (["llama-3-8b", NODE, "--concurrency", "64"], 0, "FITS"),
        (["llama-3-70b", "1xA100-80GB"], 3, "Fixes"),
        (["deepseek-v3", "8xH200-SXM", "--concurrency=64", "--context-len=65536"], 4, "TIGHT"),
        (["gemma-2-27b", "1xA100-80GB", "--concurrency", "8"], 0, "184 KiB beyond the window"),
        (["mistral-7b", "1xA100-80GB"], 0, "nothing more beyond the window"),
        (["mixtral-8x7b", "2xA100-80GB", "--context-len", "4096"], 0, "active"),
        (["t5-11b", "1xA100-80GB", "--context-len", "512"], 0, "prompt and answer"),
        (["bert-base", "1xT4"], 0, "scores of every token"),
        (["gpt2", "here:1"], 0, "FITS"),
    ],
)  # fmt: skip
def test_the_command(
    arguments: list[str],
    code: int,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "here:1" in arguments:
        monkeypatch.setattr(
            "planner.request.executor_process.cluster_or_measure", lambda *_: parse_cluster("1xT4")
        )
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *arguments, "--inference", "-v"])
    printed = capsys.readouterr().out
    assert stopped.value.code == code
    assert shown in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 100


def test_the_command_prints_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "llama-3-8b", NODE, "--inference", "--json", "--tp", "2"])
    assert json.loads(capsys.readouterr().out)["plan"]["tensor_parallel"] == 2


@pytest.mark.parametrize(
    "options",
    [
        ["--zero", "3"],
        ["--explain"],
        ["-o", "moments.svg"],
        ["--mbs", "2"],
        ["--kv-precision", "x"],
    ],
)
def test_the_command_refuses_in_one_line(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "llama-3-8b", NODE, "--inference", *options])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("shardplan: ")
