"""Rows of suites of benchmarks and of projects: the settings of their own configurations."""

from typing import Any

import pytest

from planner.validation.measurement import measured_memory
from planner.validation.rows.case import Case, case_of
from planner.validation.rows.counts import not_understood
from planner.validation.rows.runs_file import Row

CELLS = {"seq_len": 2048, "gpu": "A100-80GB", "num_gpus": 8, "precision": "bf16"}


def case(**cells: Any) -> Case:
    return case_of(Row(line=2, **{**CELLS, **cells}))


@pytest.mark.parametrize(
    "name", ["qwen1.5_MoE-megatron", "qwen1.5_14B_MoE-megatron-pai", "qwen1.5_MoE"]
)
def test_flagperfs_mixture_of_qwen_has_eight_experts(name: str) -> None:
    found = case(framework="FlagPerf megatron", model=name)
    mixture = found.scenario.model.kinds[-1].feed_forward
    assert (mixture.num_experts, mixture.experts_per_token) == (8, 2)
    assert 7e9 < found.scenario.model.num_parameters < 8e9
    assert found.plan.expert_parallel == 1


def test_amps_pipelines_are_deepspeeds_of_2020() -> None:
    found = case(framework="AMP", model="gpt2-medium", precision="fp16", pipeline_parallel=2)
    pipeline = found.scenario.software.pipeline
    assert (pipeline.scatters_gradients, pipeline.sends_masks) == (False, True)
    assert found.scenario.workload.gradient_precision == "fp32"  # fp32_allreduce
    plain = case(framework="Megatron-LM v1.1.5", model="gpt2-medium", precision="fp16")
    assert not plain.scenario.software.pipeline.sends_masks
    assert plain.scenario.workload.gradient_precision == "auto"


def test_settings_of_mlperfs_submissions() -> None:
    lora = {"framework": "MLPerf v5.1", "model": "llama2_70b_lora", "precision": "fp8"}
    assert case(**lora, gpu="MI300X").plan.recompute == "full"
    assert case(**lora, gpu="MI300X").plan.recompute_layers == 21
    assert case(**lora, gpu="MI325X").plan.recompute == "none"
    bert = {"model": "bert", "seq_len": 512, "gpu": "H100"}
    assert case(framework="MLPerf v3.1", **bert).scenario.workload.optimizer == "lamb"
    assert case(framework="NVIDIA", **bert).scenario.workload.optimizer == "adamw"
    large = case(framework="MLPerf v5.1", model="llama31_405b", gpu="GB200", num_gpus=512)
    assert large.scenario.software.pipeline.stages == "ends"
    row = Row(line=2, framework="MLPerf v4.1, Dell PowerEdge XE9680", notes="SHARP=False")
    assert not not_understood(row)


@pytest.mark.parametrize(
    ("notes", "model", "cards", "expected"),
    [
        ("DGXH100_64x8x128x4x8_mbs2", "gpt3-175b", 512, (4, 8, 1, 2, 64, "fp8")),
        ("config_GB200_128x4x144xtp4pp8cp2_cg_fp4", "llama31_405b", 512, (4, 8, 2, 1, 144, "fp4")),
        ("config_DGXH100_1x8x4xtp4pp1cp1", "llama2_70b_lora", 8, (4, 1, 1, 1, 4, "fp8")),
    ],
)
def test_scripts_of_mlperf_give_ranks_and_batches(
    notes: str, model: str, cards: int, expected: tuple[Any, ...]
) -> None:
    gpu = "GB200" if "GB200" in notes else "H100"
    cells = {"framework": "MLPerf v5.1", "seq_len": 2048, "precision": None}
    found = case(**cells, model=model, gpu=gpu, num_gpus=cards, notes=notes)
    plan = found.plan
    ranks = plan.tensor_parallel, plan.pipeline_parallel, plan.context_parallel
    batch = plan.micro_batch_size, plan.num_microbatches, found.scenario.workload.precision
    assert (*ranks, *batch) == expected


def test_submissions_to_mlperf_are_in_8_bits_where_a_card_has_them() -> None:
    def precision(**cells: Any) -> str:
        cells = {"framework": "MLPerf v4.0", "precision": None, **cells}
        return str(case(**cells).scenario.workload.precision)

    lora = {"model": "llama2_70b_lora", "global_batch_size": 64}
    assert precision(**lora, gpu="H100") == "fp8"
    assert precision(**lora, gpu="A100") == "bf16"
    assert precision(**lora, gpu="H100", precision="bf16") == "bf16"
    assert precision(model="llama-2-7b", gpu="H100") == "bf16"
    assert case(framework="MLPerf v4.0", **lora, gpu="H200").plan.micro_batch_size == 1


@pytest.mark.parametrize(
    "cells",
    [
        {"node": "Jean-Zay-A100"},
        {"node": "Jean Zay", "gpu": "A100-80GB"},
        {"framework": "BigScience"},
        {"model": "GPT 200B", "framework": "tr11-200B-ml"},
        {"node": "Jean Zay, A100 partition (4 x Omni-Path 100 Gb/s)"},
        {"notes": "48 nodes of Jean-Zay"},
        {"framework": "Megatron-DeepSpeed (Jean Zay)"},
    ],
)
def test_a_site_that_words_name_has_its_own_nodes(cells: dict[str, Any]) -> None:
    usual = {"framework": "Megatron-DeepSpeed", "model": "bloom-7b1", "num_gpus": 16}
    found = case(**{**usual, **cells})
    assert found.scenario.cluster.tiers[-1].name == "Omni-Path"
    other = case(**{**usual, **cells, "gpu": "H100", "node": None})
    assert other.scenario.cluster.tiers[-1].name != "Omni-Path"


@pytest.mark.parametrize(
    ("cells", "each", "accelerator"),
    [
        ({"gpu": "GH200 (JUPITER)"}, 4, "GH200-96GB"),
        ({"gpu": "GH200", "notes": "on JUPITER"}, 4, "GH200-96GB"),
        ({"gpu": "GH200"}, 1, "GH200-96GB"),
        ({"gpu": "NVIDIA A100 custom 64GB (Leonardo)"}, 4, "A100-SXM-64GB"),
        ({"gpu": "A100-40GB (JUWELS Booster)"}, 4, "A100-SXM-40GB"),
        ({"gpu": "H100-80GB", "notes": "jupiter notebook"}, 8, "H100-SXM-80GB"),
    ],
)
def test_a_machine_that_words_name_has_its_own_nodes(
    cells: dict[str, Any], each: int, accelerator: str
) -> None:
    cluster = case(model="llama-2-7b", **{**cells, "num_gpus": 64}).scenario.cluster
    assert (cluster.gpus_per_node, cluster.accelerator.name) == (each, accelerator)


@pytest.mark.parametrize("notes", ["acc 4 mbs 2", "acc4", "acc=4", "batch_accumulation 4"])
def test_accumulation_by_its_short_name(notes: str) -> None:
    found = case(framework="nanotron", model="llama-2-7b", notes=notes)
    assert found.plan.num_microbatches == 4


def test_flagperfs_abbreviations_and_switches_are_read() -> None:
    unsaid = dict.fromkeys(("micro_batch_size", "global_batch_size", "seq_len"))
    cells = {"framework": "FlagPerf (megatron)", "model": "llama2-70b", "num_gpus": 32, **unsaid}
    found = case(**cells, notes="LBS=2, MPE=4096, GAS=8; TP8PP4")
    assert not not_understood(found.row)
    assert (found.plan.micro_batch_size, found.plan.num_microbatches) == (2, 8)
    assert found.scenario.workload.seq_len == 4096
    batch = case(**cells, notes="global_batchsize = 64; LBS 1; TP8 PP4")
    assert batch.scenario.workload.global_batch_size == 64
    mixture = case(**cells | {"model": "mixtral_8x7B"}, tensor_parallel=4)
    assert mixture.plan.recompute == "selective"
    scale = case(framework="FlagPerf", model="llava1.5_7b_continuetrain-flagscale")
    assert scale.plan.zero_stage == 1


def test_flagscale_shares_sequences_and_overlaps_nothing_unless_told() -> None:
    cells = {"model": "llama-3-8b", "tensor_parallel": 4, "global_batch_size": 64}
    for name in ("FlagScale", "FlagScale (Megatron-LM)"):
        found = case(framework=name, **cells)
        assert found.plan.sequence_parallel
        assert not found.scenario.software.overlap.data_parallel
        assert not found.scenario.software.overlap.weight_gathers
    told = case(framework="FlagScale", notes="overlap_grad_reduce, overlap_param_gather", **cells)
    assert told.scenario.software.overlap.data_parallel
    assert not case(framework="Megatron Core", **cells).plan.sequence_parallel


@pytest.mark.parametrize("words", ["mem", "GPU memory (mem)"])
def test_flagperfs_monitors_read_the_vendors_tool(words: str) -> None:
    row = Row(line=2, framework="FlagPerf", peak_memory_gib=60.0, memory_definition=words)
    found = measured_memory(row)
    assert found is not None
    assert found.kind == "device"


def test_flagperfs_fine_tuning_of_llama_trains_adapters() -> None:
    for name in ("FlagPerf", "FlagPerf pytorch"):
        workload = case(framework=name, model="llama2_7b_finetune", num_gpus=1).scenario.workload
        assert (workload.adapter, workload.adapter_rank) == ("lora", 8)
    whole = case(framework="FlagPerf (flagscale)", model="llama2_7b_finetune")
    assert whole.scenario.workload.adapter == "none"
