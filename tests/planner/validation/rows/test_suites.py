"""Rows of suites of benchmarks and of projects: the settings of their own configurations."""

from __future__ import annotations

from typing import Any

import pytest

from planner.validation.measurement import measured_memory
from planner.validation.rows.case import Case, case_of
from planner.validation.rows.counts import not_understood
from planner.validation.rows.runs_file import Row

CELLS = {"seq_len": 2048, "gpu": "A100-80GB", "num_gpus": 8, "precision": "bf16"}


def case(**cells: Any) -> Case:
    return case_of(Row(line=2, **{**CELLS, **cells}))


def test_flagscale_is_flagperfs_megatron() -> None:
    found = case(framework="FlagPerf (flagscale)", model="llama2_7b_finetune")
    assert not found.scenario.software.overlap.data_parallel
    assert not found.scenario.software.overlap.weight_gathers


@pytest.mark.parametrize(
    "name", ["qwen1.5_MoE-megatron", "qwen1.5_14B_MoE-megatron-pai", "qwen1.5_MoE"]
)
def test_flagperfs_mixture_of_qwen_has_eight_experts(name: str) -> None:
    found = case(framework="FlagPerf megatron", model=name)
    mixture = found.scenario.model.kinds[-1].feed_forward
    assert (mixture.num_experts, mixture.experts_per_token) == (8, 2)
    assert 7e9 < found.scenario.model.num_parameters < 8e9
    assert found.plan.expert_parallel == 1


def test_flagperfs_mixtral_shares_experts_across_nodes() -> None:
    cells = {"framework": "FlagPerf Megatron", "model": "mixtral_8x7B", "tensor_parallel": 4}
    assert case(**cells, num_gpus=32).plan.expert_parallel == 8
    assert case(**cells, num_gpus=32, expert_parallel=2).plan.expert_parallel == 2
    assert case(**cells, num_gpus=8).plan.expert_parallel == 2  # data ranks that there are


def test_settings_of_flagperfs_cases() -> None:
    llava = case(framework="FlagPerf", model="llava1.5_7b-deepspeed", micro_batch_size=16)
    assert llava.plan.recompute == "full"
    piped = case(framework="FlagPerf", model="llama2_7b-megatron-deepspeed", tensor_parallel=2)
    assert piped.scenario.workload.attention_kernel == "flash"
    assert (piped.plan.zero_stage, piped.plan.sequence_parallel) == (1, False)
    aquila = case(framework="FlagPerf", model="aquila2_7b-flagscale", tensor_parallel=2)
    assert not aquila.plan.sequence_parallel


@pytest.mark.parametrize("framework", ["AMP", "AMP (NeurIPS 2022)", "AMP + DeepSpeed"])
def test_amp_plans_for_megatron(framework: str) -> None:
    cells = {"gpu": "T4", "precision": "fp16", "pipeline_parallel": 4}
    found = case(framework=framework, model="gpt2-medium", **cells)
    assert found.scenario.software.name == "megatron-2021+unfused-megatron"
    assert found.scenario.workload.attention_kernel == "eager"
    assert found.plan.recompute == "none"


@pytest.mark.parametrize("framework", ["PyTorch AMP", "AMP, own loop", "AMP (Lightning)"])
def test_automatic_mixed_precision_is_no_planner(framework: str) -> None:
    found = case(framework=framework, model="gpt2-medium")
    assert "megatron" not in found.scenario.software.name


@pytest.mark.parametrize(
    ("cells", "graphs"),
    [
        ({"model": "llama2_70b_lora", "gpu": "GB200", "framework": "MLPerf v5.0"}, "layers"),
        ({"model": "llama2_70b_lora", "gpu": "B200", "framework": "MLPerf v4.1"}, "none"),
        ({"model": "llama2_70b_lora", "gpu": "H200", "framework": "MLPerf v5.0"}, "none"),
        ({"model": "llama2_70b_lora", "gpu": "H100", "notes": "CUDA graphs"}, "layers"),
        ({"model": "llama31_8b", "gpu": "H200"}, "iteration"),
        ({"model": "llama31_8b", "gpu": "MI355X"}, "none"),
        ({"model": "llama31_8b", "gpu": "B200", "notes": "cuda graph off"}, "none"),
        ({"model": "llama31_405b", "gpu": "GB200", "notes": "CUDA graphs"}, "iteration"),
        ({"model": "llama31_405b", "gpu": "H100"}, "none"),
    ],
)
def test_graphs_of_mlperfs_submissions(cells: dict[str, Any], graphs: str) -> None:
    found = case(**{"framework": "MLPerf v5.1", "precision": "fp8", "num_gpus": 512, **cells})
    assert found.scenario.software.host.cuda_graphs == graphs


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
    ("cells", "synchronous"),
    [
        ({"model": "BLOOM-176B"}, True),
        ({"model": "GPT", "notes": "tr11-176B-ml"}, True),
        ({"model": "BLOOM-176B", "framework": "Megatron-DeepSpeed 2024"}, False),
        ({"model": "bloom-7b1", "precision": "fp16"}, False),
        ({"model": "llama-2-7b"}, False),
    ],
)
def test_bigsciences_models_run_under_its_fork(cells: dict[str, Any], synchronous: bool) -> None:
    sizes = {"num_layers": 70, "hidden_size": 14336, "num_heads": 112, "vocab_size": 250880}
    sized = {**sizes, **cells} if cells["model"] == "GPT" else cells
    found = case(**{"framework": "Megatron-DeepSpeed", "num_gpus": 384, **sized})
    assert found.scenario.software.host.synchronous is synchronous


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
    ("framework", "kernel", "shared"),
    [
        ("MLPerf v3.0, Megatron-DeepSpeed", "eager", False),
        ("MLPerf Training 3.0 (Intel)", "eager", False),
        ("MLPerf v3.1 (Habana)", "flash", True),
    ],
)
def test_habanas_gpt_runs_under_megatron_deepspeed(
    framework: str, kernel: str, shared: bool
) -> None:
    cells = {"gpu": "Gaudi2", "num_gpus": 384, "tensor_parallel": 8, "pipeline_parallel": 8}
    found = case(framework=framework, model="GPT-3 175B", **cells)
    assert "deepspeed-bf16-optimizer" in found.scenario.software.name
    assert found.scenario.workload.attention_kernel == kernel
    assert (found.plan.recompute, found.plan.sequence_parallel) == ("selective", shared)


def test_a_counted_node_of_one_kind_is_that_kind() -> None:
    cells = {"framework": "AMP", "model": "gpt2-medium", "gpu": "V100-16GB", "num_gpus": 16}
    for node in ("4x p3.8xlarge", "4 x AWS p3.8xlarge", "p3.8xlarge"):
        cluster = case(**cells, precision="fp16", node=node).scenario.cluster
        assert (cluster.gpus_per_node, cluster.tiers[-1].name) == (4, "AWS"), node


def test_words_of_suites_in_a_models_name() -> None:
    found = case(framework="FlagPerf", model="llama1_13B-paddle TP2PP4SH1SP1")
    plan = found.plan
    assert (plan.tensor_parallel, plan.pipeline_parallel, plan.data_parallel) == (2, 4, 1)
    llava = case(framework="FlagPerf (torch)", model="llava1.5_13b", gpu="Ascend 910B")
    assert llava.plan.zero_stage == 3
    cells = {"gpu": "V100-32GB", "num_gpus": 16, "precision": "fp16"}
    base = case(framework="Megatron-DeepSpeed (BigScience)", model="13B (tr1)", **cells)
    assert base.scenario.model.num_layers == 40
    assert not base.scenario.model.kinds[0].feed_forward.gated


def test_selective_checkpoints_in_either_order() -> None:
    for notes in ("recompute selective", "selective recompute"):
        found = case(framework="NeMo", model="llama-2-7b", notes=notes)
        assert found.plan.recompute == "selective", notes


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


@pytest.mark.parametrize(
    ("cells", "stages"),
    [
        ({"model": "llama31_405b", "tensor_parallel": 4, "context_parallel": 2}, 8),
        ({"model": "llama31_405b", "tensor_parallel": 4, "virtual_stages": 2}, 2),
        ({"model": "GPT-3 175B", "framework": "MLPerf v4.0", "tensor_parallel": 4}, 4),
        ({"model": "GPT-3 175B", "framework": "MLPerf v4.0", "pipeline_parallel": 16}, 3),
        ({"model": "GPT-3 175B", "framework": "MLPerf v3.1 Habana", "gpu": "Gaudi2"}, 1),
        ({"model": "llama31_405b", "framework": "NeMo"}, 1),
    ],
)
def test_stages_of_mlperfs_pipelines(cells: dict[str, Any], stages: int) -> None:
    usual = {"framework": "MLPerf v5.1", "gpu": "B200", "num_gpus": 512, "precision": "fp8"}
    found = case(**{**usual, "pipeline_parallel": 8, "global_batch_size": 2048, **cells})
    assert found.plan.virtual_stages == stages


@pytest.mark.parametrize(
    ("framework", "model", "moved"),
    [
        ("MLPerf v5.1", "llama31_405b", 6.0),
        ("MLPerf v5.1", "llama31_8b", 6.0),
        ("MLPerf v5.0", "llama31_405b", 4.0),
        ("MLPerf v5.1", "llama2_70b_lora", 4.0),
        ("MLPerf v5.1, delayed scaling", "llama31_405b", 4.0),
    ],
)
def test_recipes_of_mlperfs_8_bits(framework: str, model: str, moved: float) -> None:
    found = case(framework=framework, model=model, precision="fp8", gpu="B200", num_gpus=512)
    assert found.scenario.software.fp8.cast_bytes == moved


def test_4_bits_of_mlperf_have_no_tensor_overlap() -> None:
    large = {"framework": "MLPerf v5.1", "model": "llama31_405b", "gpu": "GB200", "num_gpus": 512}
    for precision, overlaps in (("fp8", True), ("fp4", False)):
        found = case(**{**large, "precision": precision, "tensor_parallel": 4})
        assert found.scenario.software.overlap.chunked_tensor_traffic is overlaps


def test_simumax_keeps_weights_in_8_bits_alone() -> None:
    found = case(framework="SimuMax", model="llama3-8b", precision="fp8", gpu="H100")
    assert found.scenario.software.fp8.gathers_weights


def test_flagperfs_fine_tuning_of_llama_trains_adapters() -> None:
    for name in ("FlagPerf", "FlagPerf pytorch"):
        workload = case(framework=name, model="llama2_7b_finetune", num_gpus=1).scenario.workload
        assert (workload.adapter, workload.adapter_rank) == ("lora", 8)
    whole = case(framework="FlagPerf (flagscale)", model="llama2_7b_finetune")
    assert whole.scenario.workload.adapter == "none"
