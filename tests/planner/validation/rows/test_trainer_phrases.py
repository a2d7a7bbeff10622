"""Rows as tables of trainers that nothing was compared with would phrase them."""

from __future__ import annotations

from typing import Any

import pytest

from cost_models.plan.plan import PlanTable
from cost_models.pricing.estimate import price
from cost_models.units import GIB
from planner.validation.measurement import measured_memory
from planner.validation.pricing import why_impossible
from planner.validation.rows.case import Case, case_of
from planner.validation.rows.counts import not_understood
from planner.validation.rows.reading import Unpriceable
from planner.validation.rows.runs_file import Row
from planner.validation.rows.vocabulary import vocabulary

CELLS = {"model": "llama-2-7b", "seq_len": 4096, "gpu": "A100-SXM4-80GB", "num_gpus": 16}


def case(**cells: Any) -> Case:
    return case_of(Row(line=2, **{**CELLS, **cells}))


GPUS = {
    "A100-SXM-40GB": ["A100-SXM4-40GB", "NVIDIA A100 (40GB)", "A100 40G"],
    "A100-PCIe-40GB": ["A100-PCIE-40GB"],
    "A100-PCIe-80GB": ["A100 PCIE", "A100-PCIe-80GB"],
    "A100-SXM-64GB": ["A100-SXM4-64GB", "A100-64GB (Leonardo, custom)"],
    "V100-SXM2-32GB": ["V100", "Tesla V100", "DGX-1 V100-32GB"],
    "V100-SXM2-16GB": ["V100-16GB-SXM2", "V100 (16 GB)"],
    "GB200-186GB": ["GB200 NVL72", "GB200"],
    "H800-SXM-80GB": ["H800", "HGX H800"],
    "H100-SXM-64GB": ["H100 64GB", "H100-SXM-64GB", "H100 64GB MareNostrum 5"],
    "A800-PCIe-80GB": ["A800 PCIe", "A800 80GB PCIe"],
    "H20-141GB": ["H20-3e", "H20 141GB"],
    "Ascend-910B": ["910B", "Ascend910-64G", "Huawei Ascend 910B3"],
    "T4": ["Tesla T4", "NVIDIA T4"],
    "H100-SXM-80GB": ["H100 SXM5 80GB HBM3 700W", "H100 80GB HBM3 SXM", "A3 Mega H100"],
    "H100-SXM-96GB": ["H100 SXM 96GB HBM2e", "H100-SXM5-94GB"],
    "GH200-96GB": ["GH200 120GB", "NVIDIA GH200 Grace Hopper Superchip"],
    "B200-SXM-180GB": ["HGX B200", "B200", "8 x B200 180GB", "8xB200"],
    "A800-SXM-80GB": ["A800-80G SXM", "A800-SXM4-80G"],
    "MI300X": ["AMD Instinct MI300X OAM 192GB HBM3"],
    "MI355X": ["MI355X 288GB HBM3e"],
    "TPU-v4": ["v4-256", "TPU v4-4096"],
    "TPU-v5e": ["v5litepod-256", "TPU v5e-256"],
    "TPU-v5p": ["TPU v5p-512"],
    "TPU-v6e": ["Trillium (v6e-8)"],
    "Gaudi3": ["Intel Gaudi 3 HL-325L", "Gaudi3 OAM"],
}


@pytest.mark.parametrize(
    ("words", "expected"), [(text, name) for name, texts in GPUS.items() for text in texts]
)
def test_names_of_accelerators(words: str, expected: str) -> None:
    assert case(gpu=words).scenario.cluster.accelerator.name == expected


@pytest.mark.parametrize(
    ("gpu", "each", "expected"),
    [
        ("H100", 4, "H100-SXM-96GB"),
        ("H100-94GB", 4, "H100-SXM-96GB"),
        ("H100", 8, "H100-NVL-94GB"),
        ("H100 NVL", 4, "H100-NVL-94GB"),
        ("H100 PCIe", 4, "H100-NVL-94GB"),
    ],
)
def test_four_h100_of_94_gb_are_those_of_a_board(gpu: str, each: int, expected: str) -> None:
    found = case(gpu=gpu, gpu_mem_gb=94.0, num_gpus=8, gpus_per_node=each)
    assert found.scenario.cluster.accelerator.name == expected


@pytest.mark.parametrize(
    ("framework", "cells", "software"),
    [
        ("Megatron-LM", {"gpu": "H100-SXM"}, "nemo"),
        ("Megatron-LM", {"gpu": "B200"}, "nemo"),
        ("Megatron-LM", {"gpu": "A100-SXM"}, "megatron"),
        ("Megatron-LM (2022)", {"gpu": "H100-SXM"}, "megatron"),
        ("Megatron-LM (BigScience fork)", {"precision": "fp16"}, "megatron-deepspeed"),
    ],
)
def test_megatron_without_a_date(framework: str, cells: dict[str, Any], software: str) -> None:
    assert case(framework=framework, **cells).scenario.software.name == software


@pytest.mark.parametrize(
    ("framework", "cells", "parallel"),
    [
        ("Megatron-LM (core 0.14)", {}, False),
        ("Megatron-LM (core 0.14) --sequence-parallel", {}, True),
        ("Megatron-LM", {}, False),
        ("SimuMax, Megatron-LM", {}, True),
        ("FlagPerf Megatron", {}, True),
        ("Megatron-Bridge", {}, True),
        ("NeMo (Megatron Core)", {}, True),
        ("Megatron-Core", {"model": "mixtral-8x7b", "num_layers": 2, "model_kind": "moe"}, True),
        # 4 layers of 175B, which fit with it alone
        ("Megatron-LM", {"model": "gpt3-175b", "micro_batch_size": 24, "num_layers": 4}, True),
    ],
)
def test_sequence_parallelism_that_nobody_states(
    framework: str, cells: dict[str, Any], parallel: bool
) -> None:
    found = case(framework=framework, tensor_parallel=8, num_gpus=8, **cells)
    assert found.plan.sequence_parallel == parallel


@pytest.mark.parametrize(
    ("cells", "batch"),
    [
        ({"notes": "gbs=1M tokens"}, 256),
        ({"notes": "global batch size of 4M tokens"}, 1024),
        ({"notes": "batch 1048576 tokens"}, 256),
        ({"global_batch_size": 1_048_576}, 256),
        ({"global_batch_size": 65_536, "notes": "batch in tokens"}, 16),
        ({"global_batch_size": 1024}, 1024),
    ],
)
def test_a_batch_in_tokens(cells: dict[str, Any], batch: int) -> None:
    usual = {"seq_len": 4096, "micro_batch_size": 1, "num_gpus": 8, "global_batch_size": None}
    found = case(framework="nanotron", **{**usual, **cells})
    assert found.scenario.workload.global_batch_size == batch


def test_sizes_of_a_model_as_variables_of_a_script() -> None:
    found = case(
        framework="Megatron-DeepSpeed",
        model="104B",
        precision="fp16",
        notes="NLAYERS=32 NHIDDEN=11600 NHEADS=80",
    ).scenario.model
    assert found.num_layers == 32
    assert found.hidden_size == 11600
    named = case(framework="Megatron-DeepSpeed", model="104B", precision="fp16").scenario.model
    assert named.num_layers == 64


def test_the_layers_of_a_stage_give_virtual_stages() -> None:
    cells = {"num_gpus": 8, "pipeline_parallel": 4, "global_batch_size": 8, "num_layers": None}
    ends = case(framework="Modalities", notes="num_layers_per_stage=5", **cells)  # (32 + 2) / 5: 7
    assert ends.plan.virtual_stages == 1
    words = "num_layers_per_stage: 3"  # 12 stages
    assert case(framework="Modalities", notes=words, **cells).plan.virtual_stages == 3
    words = "--num-layers-per-virtual-pipeline-stage 4"
    assert case(framework="Megatron-LM", notes=words, **cells).plan.virtual_stages == 2


def test_hybrid_shards_of_modalities_are_those_of_fsdp1() -> None:
    found = case(framework="Modalities", notes="HYBRID_SHARD", num_gpus=16, zero_stage=None)
    assert found.scenario.software.name == "torch-trainer+fsdp1"


@pytest.mark.parametrize(("overlap", "hidden"), [("True", 1.0), ("False", 0.0)])
def test_internevo_may_wait_for_its_weights(overlap: str, hidden: float) -> None:
    notes = f"isp, weight=dict(size=8, overlap={overlap}, memory_pool=True)"
    found = case(framework="InternEvo", notes=notes, num_gpus=8)
    assert found.scenario.software.overlap.data_parallel == hidden


def test_the_kind_of_node_gives_memory_and_gpus() -> None:
    amazon = case(gpu="V100", node="p3.16xlarge").scenario.cluster
    assert amazon.accelerator.name == "V100-SXM2-16GB"
    four = case(gpu="A100-80GB", node="HGX-A100-4GPU").scenario.cluster
    assert four.gpus_per_node == 4
    small = case(gpu="V100", node="p3.2xlarge", num_gpus=1)
    assert any("p3.2xlarge" in text for text in small.defaults)


@pytest.mark.parametrize(
    "words", ["g4dn.12xlarge + p3.8xlarge", "3 x g4dn.12xlarge, 1 x p3.8xlarge"]
)
def test_nodes_of_several_kinds_have_the_slowest_network(words: str) -> None:
    found = case(gpu="T4 + V100", node=words, gpus_per_node=4, framework="Megatron-LM v1.1.5")
    cluster = found.scenario.cluster
    assert cluster.accelerator.name == "T4"
    alone = case(gpu="V100", node="p3.8xlarge", gpus_per_node=4).scenario.cluster
    assert cluster.tiers[-1].bandwidth.value == alone.tiers[-1].bandwidth.value
    assert any("slowest" in text for text in found.defaults)
    unsaid = case(gpu="V100", node=words, gpus_per_node=4, framework="Megatron-LM v1.1.5")
    assert unsaid.scenario.cluster.accelerator.name == "T4"


def test_what_is_not_priced_is_not_taken_for_a_card_of_a_similar_name() -> None:
    for name in ("Biren BR106", "BR106 32GB"):
        with pytest.raises(Unpriceable, match="it is not priced"):
            case(gpu=name)
    for name in ("RTX 2080 Laptop", "RTX 4090 480GB", "TPU v2-32"):
        with pytest.raises(Unpriceable, match="is not in the catalogue"):
            case(gpu=name)


def test_stated_memory_replaces_that_of_a_known_card() -> None:
    whole = case(gpu="RTX 4090").scenario.cluster
    for cells in ({"gpu": "RTX 4090 48GB"}, {"gpu": "RTX 4090", "gpu_mem_gb": 48.0}):
        found = case(**cells)
        card = found.scenario.cluster.accelerator
        assert card.memory_capacity.value == 48 * GIB
        assert card.memory_bandwidth == whole.accelerator.memory_bandwidth
        assert found.scenario.cluster.tiers == whole.tiers
        assert "RTX-4090 with 48 GB of memory" in " ".join(found.defaults)
    # a name that states its memory, and the rounded memory of a card
    for cells in ({"gpu": "MI250X", "gpu_mem_gb": 128.0}, {"gpu": "L40S", "gpu_mem_gb": 48.0}):
        assert "in the catalogue" not in " ".join(case(**cells).defaults)


TRAINERS = {
    ("nemo", 1): [
        "SimuMax (Megatron Core)",
        "simumax",
        "NeMo (MLPerf v4.1)",
        "FlagPerf megatron",
        "Megatron-LM (FlagPerf)",
        "FlagPerf (FlagScale)",
    ],
    ("hf-trainer", 0): ["swift LoRA", "ms-swift 2.6", "modelscope/ms-swift"],
    ("hf-trainer+deepspeed-zero3+deepspeed-auto-buckets+adamw-fused", 3): [
        "Qwen (DeepSpeed ZeRO-3)",
        "Qwen finetune.py",
    ],
    ("hf-trainer+deepspeed-zero3+deepspeed-auto-buckets", 3): ["ms-swift, zero3"],
    ("hf-trainer+deepspeed-zero3+adamw-fused", 3): ["FlagPerf deepspeed, ZeRO-3"],
    ("hf-trainer+deepspeed-zero2+deepspeed-two-buckets+adamw-fused", 2): ["Qwen, ZeRO-2"],
    ("hf-trainer+deepspeed-zero2+deepspeed-two-buckets+adamw-fused+gptq-operators", 2): [
        "Qwen (Q-LoRA)"
    ],
    ("hf-trainer", 3): ["fsdp_qlora bnb-4bit", "FSDP QLoRA (Answer.AI)"],
    ("torch-trainer+autocast", 0): ["timm"],
    ("torch-trainer+adamw-fused", 0): ["torchao"],
    ("torch-trainer+fsdp2", 3): ["modalities FSDP2"],
    ("torch-trainer", 3): ["modalities"],
    ("hf-trainer+fsdp2+adamw-for-loop", 3): ["NeMo-RL SFT (May 2025)", "NVIDIA NeMo RL"],
    ("torchtitan", 3): ["torchtitan + torchao, compile"],
    ("megatron-deepspeed", 0): ["BigScience Megatron-DeepSpeed", "Megatron-DeepSpeed (BigScience)"],
    ("internevo", 1): ["InternEvo v0.4", "InternLM/InternEvo"],
    ("internevo+fsdp2", 3): ["InternEvo (isp)", "InternEvo, tensor mode isp"],
}


@pytest.mark.parametrize(
    ("words", "expected"), [(text, key) for key, texts in TRAINERS.items() for text in texts]
)
def test_trainers_and_how_they_shard(words: str, expected: tuple[str, int]) -> None:
    found = case(framework=words)
    assert (found.scenario.software.name, found.plan.zero_stage) == expected
    assert not any("trainer unknown" in text for text in found.defaults)


@pytest.mark.parametrize(
    ("cells", "kernel"),
    [
        ({"framework": "Megatron-DeepSpeed (BigScience)"}, "eager"),
        ({"framework": "Megatron-LM (2021)"}, "eager"),
        ({"framework": "Megatron-LM", "gpu": "V100"}, "eager"),
        ({"framework": "Megatron-LM", "gpu": "T4"}, "eager"),
        ({"framework": "PyTorch", "gpu": "V100"}, "flash"),
        ({"framework": "Megatron-LM"}, "flash"),
        ({"framework": "PyTorch 2.x"}, "flash"),
        ({"framework": "PyTorch 1.13"}, "eager"),
        ({"framework": "Megatron-LM (2021)", "flash_attention": "1"}, "flash"),
        ({"framework": "HF Trainer (torch 2.0.1)"}, "eager"),
        ({"framework": "run_clm_no_trainer.py (HF accelerate 0.20.3)"}, "eager"),
        ({"framework": "HF Trainer (torch 2.2)"}, "flash"),
        ({"framework": "HF Trainer (2026)", "gpu": "T4", "model": "qwen2.5-7b"}, "eager"),
        ({"framework": "HF Trainer (2026)", "gpu": "T4", "model": "llama-2-7b"}, "flash"),
        ({"framework": "HF Trainer (2026)", "model": "qwen2.5-7b"}, "flash"),
        ({"framework": "HF Trainer (2024)", "gpu": "T4", "model": "qwen2.5-7b"}, "flash"),
        ({"framework": "Unsloth (2026)", "gpu": "T4", "model": "qwen2.5-7b"}, "flash"),
        ({"framework": "plain PyTorch (CS336 assignment 2)"}, "eager"),
        ({"framework": "plain PyTorch", "notes": "attention written out"}, "eager"),
    ],
)
def test_attention_of_trainers_before_flash_attention(cells: dict[str, Any], kernel: str) -> None:
    assert case(**cells).scenario.workload.attention_kernel == kernel


@pytest.mark.parametrize(
    ("cells", "fp32"),
    [
        ({"framework": "LLaMA-Factory", "precision": "fp16", "peft": "none"}, True),
        ({"framework": "LLaMA-Factory", "precision": "bf16", "peft": "none"}, True),
        ({"framework": "LLaMA-Factory, DDP", "precision": "bf16", "peft": "none"}, True),
        ({"framework": "LLaMA-Factory", "peft": "none", "notes": "pure_bf16"}, False),
        ({"framework": "own PyTorch loop", "precision": "bf16 (weights in bf16)"}, False),
        ({"framework": "own PyTorch loop", "precision": "bf16 autocast"}, True),
        ({"framework": "LLaMA-Factory", "precision": "bf16", "peft": "lora r=8"}, False),
        ({"framework": "HF Trainer (stanford_alpaca train.py), FSDP1", "peft": "none"}, True),
        ({"framework": "HF Trainer (FastChat train.py), FSDP1", "peft": "none"}, True),
        (
            {"framework": "HF Trainer (FastChat)", "peft": "none", "optimizer": "pure bf16"},
            False,
        ),
        ({"framework": "HF Trainer, FSDP1", "peft": "none"}, False),
    ],
)
def test_who_trains_fp32_weights(cells: dict[str, Any], fp32: bool) -> None:
    found = case(**cells).scenario
    assert found.workload.master_weights == fp32
    assert found.software.precision.autocasts_weights == (fp32 and "FSDP" not in cells["framework"])


@pytest.mark.parametrize(
    ("notes", "stay"),
    [
        ("", False),
        ("no gradients cleared inside the time", True),
        ("zero_grad(set_to_none=False)", True),
        ("zero_grad(set_to_none=True)", False),
    ],
)
def test_whose_gradients_stay_between_steps(notes: str, stay: bool) -> None:
    assert case(framework="plain PyTorch", notes=notes).scenario.software.gradients.zeroed == stay


def test_llama_factory_lets_torch_cast_fp32_weights_but_under_deepspeed() -> None:
    def casts(framework: str, stage: int) -> bool:
        cells = {"framework": framework, "precision": "fp16", "peft": "none", "zero_stage": stage}
        return case(**cells).scenario.software.precision.autocasts_weights

    assert casts("LLaMA-Factory", 0)
    assert not casts("LLaMA-Factory, DeepSpeed ZeRO-2", 2)
    assert not casts("LLaMA-Factory, DeepSpeed ZeRO-3", 3)


MODULES = "modules:core_attn+mlp"


@pytest.mark.parametrize(
    ("gpu", "accelerator", "gigabits"),
    [
        ("p3.8xlarge", "V100-SXM2-16GB", 2.5),
        ("4 g4dn.12xlarge nodes", "T4", 12.5),
        ("V100-16GB (p3.8xlarge)", "V100-SXM2-16GB", 2.5),
        ("3x p3.8xlarge (V100) + 1x g4dn.12xlarge (T4)", "T4", 2.5),
        ("3x4 V100 (p3.8xlarge) and 1x4 T4 (g4dn.12xlarge)", "T4", 2.5),
    ],
)
def test_instances_as_accelerators(gpu: str, accelerator: str, gigabits: float) -> None:
    cluster = case(gpu=gpu, model="gpt2", seq_len=1024).scenario.cluster
    assert cluster.accelerator.name == accelerator
    assert cluster.gpus_per_node == 4
    assert cluster.tiers[-1].bandwidth.value == pytest.approx(gigabits * 1e9 / 8)


@pytest.mark.parametrize(
    "words",
    [
        "0.25",
        "activation_ckpt=0.25",
        "checkpoint: 25 %",
        "checkpoint_fraction=0.25",
        "ckpt ratio 0.25",
        "1/4 layers",
    ],
)
def test_a_share_of_layers_is_computed_again(words: str) -> None:
    assert case(framework="InternEvo", recompute=words).plan.recompute_layers == 8


@pytest.mark.parametrize(
    "notes", ["checkpoint=0.25", "activation checkpoint ratio 0.25", "activation_ckpt: 25%"]
)
def test_a_share_of_layers_in_notes(notes: str) -> None:
    assert case(framework="InternEvo", notes=notes).plan.recompute_layers == 8


@pytest.mark.parametrize(
    "cells",
    [
        {"notes": "activation checkpointing on every 4th GPT2Block"},
        {"notes": "selective layer activation checkpointing (ac_freq 4)"},
        {"recompute": "SELECTIVE_LAYER_ACTIVATION_CHECKPOINTING, freq 4"},
    ],
)
def test_every_so_many_blocks_of_modalities(cells: dict[str, str]) -> None:
    assert case(framework="Modalities", **cells).plan.recompute_layers == 8


@pytest.mark.parametrize(
    ("cells", "recompute"),
    [
        ({"framework": "ms-swift"}, "full"),
        ({"framework": "LLaMA-Factory"}, "full"),
        ({"framework": "XTuner"}, "full"),
        ({"framework": "fsdp_qlora"}, "full"),
        ({"framework": "Unsloth", "num_gpus": 1}, "full"),
        ({"framework": "ms-swift", "recompute": "0"}, "none"),
        ({"framework": "TRL"}, "none"),
        ({"framework": "TRL SFTTrainer (TRL 0.21.0)"}, "none"),
        ({"framework": "TRL SFTTrainer (TRL 0.27.2, transformers 5)"}, "full"),
        ({"framework": "TRL SFTTrainer (2026)"}, "full"),
        ({"framework": "TRL SFTTrainer (TRL 1.14.1)", "recompute": "none"}, "none"),
        ({"framework": "HF transformers + peft", "peft": "qlora (nf4)"}, "full"),
        ({"framework": "nobody's own", "peft": "lora, int8 base"}, "full"),
        ({"framework": "HF transformers + peft", "peft": "lora r=8"}, "none"),
        ({"framework": "litgpt", "peft": "qlora (nf4)"}, "none"),
        ({"recompute": "gc on"}, "full"),
        ({"recompute": "grad ckpt"}, "full"),
        ({"recompute": "unsloth"}, "full"),
        ({"recompute": "full_block"}, "full"),
        ({"framework": "MaxText", "recompute": "custom"}, "full"),
        (
            {"framework": "MaxText", "recompute": "custom", "offload": "activations (qkv_proj)"},
            "modules:core_attn+layernorm+mlp+moe",
        ),
        ({"framework": "MaxText", "recompute": "remat_policy: minimal"}, "selective_ops"),
        (
            {"framework": "MaxText", "recompute": "qkv_proj_offloaded"},
            "modules:core_attn+layernorm+mlp+moe",
        ),
        ({"framework": "modalities", "recompute": "selective op"}, "ops:every-2nd-mm"),
        ({"framework": "modalities", "recompute": "selective layer"}, "full"),
        ({"framework": "modalities", "recompute": "GPT2Block"}, "full"),
        ({"framework": "modalities", "notes": "AC: selective_op"}, "ops:every-2nd-mm"),
        (
            {"framework": "modalities", "recompute": "SELECTIVE_OP_ACTIVATION_CHECKPOINTING"},
            "ops:every-2nd-mm",
        ),
        ({"framework": "torchtitan", "notes": "compile, selective AC op"}, "ops:every-2nd-mm"),
        ({"framework": "torchtitan, selective AC"}, "ops:every-2nd-mm"),
        ({"framework": "Qwen finetune.py", "peft": "LoRA"}, "full"),
        ({"framework": "BigScience Megatron-DeepSpeed", "precision": "bf16"}, "full"),
        ({"framework": "SimuMax", "recompute": "attn_recompute, mlp_recompute"}, MODULES),
        ({"framework": "SimuMax", "recompute": "attn_only, mlp_only"}, MODULES),
        ({"framework": "SimuMax", "recompute": "sdp_recompute"}, "selective"),
        (
            {"framework": "SimuMax", "notes": "recompute mla_up_proj, mlp"},
            "modules:mla_up_proj+mlp",
        ),
        ({"framework": "SimuMax", "notes": "attn_recompute=true, mlp_recompute"}, MODULES),
        ({"framework": "SimuMax", "notes": "megatron_recompute_modules=core_attn,mlp"}, MODULES),
        ({"framework": "SimuMax", "notes": "attn_recompute, mlp_recompute=false"}, "selective"),
        ({"framework": "modalities", "notes": "activation_checkpointed: True"}, "full"),
        ({"framework": "InternEvo", "recompute": "0.0"}, "none"),
        ({"framework": "InternEvo", "recompute": "activation_ckpt=1.0"}, "full"),
        ({"framework": "InternEvo", "recompute": "50%"}, "full"),
    ],
)
def test_recomputation_by_a_trainers_default_or_word(cells: dict[str, Any], recompute: str) -> None:
    assert case(**cells).plan.recompute == recompute


def test_unsloths_checkpoints_go_to_the_host() -> None:
    def offload(**cells: Any) -> str:
        return case(framework="HF Trainer", num_gpus=1, **cells).plan.offload

    assert offload(recompute="use_gradient_checkpointing=unsloth") == "activations"
    assert offload(recompute="unsloth", offload="optimizer to CPU") == "optimizer+activations"
    assert offload(recompute="full") == "none"


def test_deepspeed_without_a_stage_shards_as_most_runs_with_it() -> None:
    def sharded(framework: str, **cells: Any) -> tuple[str, int]:
        found = case(framework=framework, **cells)
        return found.scenario.software.name, found.plan.zero_stage

    assert sharded("HF Trainer, DeepSpeed") == ("hf-trainer+deepspeed-zero2", 2)
    assert sharded("HF Trainer, DeepSpeed", zero_stage=3) == ("hf-trainer+deepspeed-zero3", 3)
    assert sharded("HF Trainer, DeepSpeed", zero_stage=0) == ("hf-trainer", 0)
    assert sharded("HF Trainer") == ("hf-trainer", 0)


def test_a_compiled_model_under_fsdp_has_an_eager_loss() -> None:
    def copies(**cells: Any) -> float:
        found = case(**{"framework": "nobody's own", "notes": "torch.compile", **cells})
        return found.scenario.software.loss.fp32_logits_copies

    assert copies() == 1.0
    assert copies(zero_stage=3, framework="nobody's own (FSDP2)") == 2.0
    assert copies(zero_stage=3, framework="nobody's own (FSDP1)") == 2.0
    chunked = "FSDP2, torch.compile, chunked cross-entropy"
    assert copies(zero_stage=3, notes=chunked) == 0.5


def test_tensor_parallel_plans_of_transformers_all_reduce() -> None:
    def of(framework: str) -> tuple[bool, bool]:
        found = case(framework=framework, tensor_parallel=4, precision="bf16")
        return found.plan.sequence_parallel, found.scenario.software.optimizer.loops

    assert of("NeMo-RL SFT") == (False, True)  # and its AdamW loops
    assert of("HF Trainer") == (False, False)
    assert of("torchtitan")[0]


def test_hugging_faces_trainer_has_the_fused_update_by_default_since_4_54() -> None:
    def fused(framework: str) -> bool:
        return case(framework=framework).scenario.software.optimizer.fused

    for release in ("transformers 4.55", "2026", "TRL 0.24"):
        assert fused(f"HF Trainer ({release})")
    assert fused("ColossalAI Coati")  # HybridAdam
    assert not fused("HF Trainer (transformers 4.53)")
    assert not fused("own PyTorch loop (HF transformers 4.57)")


def test_torchtune_of_2025_has_a_loss_in_chunks_and_expandable_segments() -> None:
    def of(framework: str) -> tuple[float, bool]:
        software = case(framework=framework, precision="bf16").scenario.software
        return software.loss.fp32_logits_copies, software.memory.expandable_segments

    assert of("torchtune (2024)") == (3.0, False)
    assert of("torchtune (2025)") == of("torchtune, PyTorch 2.10") == (1.125, True)
    assert of("torchtune (2026), torch.compile") == (0.5, True)


def test_accelerate_of_2025_upcasts_sharded_weights() -> None:
    def masters(framework: str, **cells: Any) -> bool:
        usual = {"framework": framework, "zero_stage": 3, "precision": "bf16", "peft": "none"}
        return case(**{**usual, **cells}).scenario.workload.master_weights

    for release in ("2025", "transformers 4.48", "accelerate 1.3"):
        assert masters(f"HF Trainer ({release}), FSDP")
        assert not masters(f"HF Trainer ({release}), FSDP", precision="pure bf16")
        assert not masters(f"HF Trainer ({release}), FSDP", optimizer="adamw (pure bf16)")
    for trainer in ("TRL SFTTrainer (Accelerate FSDP2)", "HF Trainer, FSDP2", "Axolotl, FSDP2"):
        assert masters(trainer)
        assert not masters(trainer, precision="pure bf16")
        assert not masters(trainer, optimizer="adamw (pure bf16)")
        assert not masters(trainer, notes="pure bf16")
        assert not masters(trainer, peft="lora r=8")
    assert not masters("HF Trainer (2024), FSDP")
    assert not masters("HF Trainer (2025), DDP", zero_stage=0)
    assert not masters("HF Trainer (2025), FSDP", peft="lora r=8")


def test_mixed_precision_of_fsdp2_is_not_autocast() -> None:
    def name(**cells: str) -> str:
        usual = {"framework": "own loop, PyTorch FSDP2", "precision": "bf16"}
        return case(**{**usual, **cells}).scenario.software.name

    assert name(notes="bf16 mixed precision") == name() == "torch-trainer+fsdp2"
    assert name(notes="bf16 autocast") == "torch-trainer+fsdp2+autocast"
    assert name(framework="own loop", notes="bf16 mixed precision") == "torch-trainer+autocast"


@pytest.mark.parametrize(
    ("framework", "notes", "casts"),
    [
        ("HF Trainer, FSDP full shard", "bf16 autocast", False),
        ("TRL SFTTrainer with Liger, FSDP1", "bf16 autocast", False),
        (
            "own loop, PyTorch FSDP1",
            "bf16 autocast, MixedPrecision(param bf16, reduce fp32)",
            False,
        ),
        ("own loop, PyTorch FSDP1", "bf16 autocast", True),
        ("HF Trainer, DDP", "bf16 autocast", True),
    ],
)
def test_autocast_finds_16_bits_where_fsdp_gathers_them(
    framework: str, notes: str, casts: bool
) -> None:
    found = case(framework=framework, notes=notes, precision="bf16", peft="none").scenario
    assert found.software.precision.autocasts_weights is casts
    assert found.workload.master_weights


def test_frozen_weights_in_fp32_stay_so_where_fsdp_gathers_16_bits() -> None:
    cells = {"peft": "lora r=8 all linear", "precision": "bf16 autocast, fp32 parameters"}
    found = case(framework="HF Trainer, FSDP full shard", **cells).scenario.software
    assert (found.precision.autocasts_weights, found.frozen.in_fp32) == (False, True)


def test_activations_of_llm_c_are_one_kernel() -> None:
    found = case(framework="llm.c", model="gpt2").scenario.software
    assert dict(found.kernels.unfused_activation_accesses) == {}
    assert found.activations.activation_saved["default"] == 1.0


def test_megatron_fsdp_keeps_the_root_gathered_and_shards_in_both_precisions() -> None:
    for framework in ("Megatron-FSDP", "Megatron-LM, Megatron-FSDP", "NeMo 25.09, Megatron-FSDP"):
        sharding = case(framework=framework, zero_stage=3).scenario.software.sharding
        assert (sharding.largest_zero_stage, sharding.flat_parameters) == (3.0, True)
        assert sharding.compute_shards


def test_one_card_with_states_on_the_host_keeps_its_trainer() -> None:
    """DeepSpeed's offload is a part of ZeRO, on one card too."""
    cells = {"framework": "HF Trainer, DeepSpeed ZeRO-2", "num_gpus": 1, "precision": "bf16"}
    found = case(**cells, offload="optimizer")
    assert found.scenario.software.name == "hf-trainer+deepspeed-zero2"
    assert (found.plan.zero_stage, found.plan.offload) == (2, "optimizer")
    assert case(**cells).plan.zero_stage == 0


def test_any_trainer_may_update_weights_in_the_backward_pass() -> None:
    for framework in ("nobody's own", "HF Trainer", "torchtune"):
        software = case(framework=framework, notes="optimizer in backward").scenario.software
        assert software.optimizer.in_backward


def test_fsdp_of_old_releases_keeps_frozen_layers_gathered() -> None:
    def stays(framework: str) -> bool:
        found = case(framework=framework, zero_stage=3, peft="lora r=8 q,v")
        return found.scenario.software.sharding.frozen_stay

    assert stays("HF Trainer, FSDP1, torch 2.0.1")
    assert not stays("HF Trainer, FSDP1, torch 2.1.0")
    assert not stays("HF Trainer, FSDP1")


RECIPE = "q,v,o,gate,up,down"  # torchtune's


@pytest.mark.parametrize(
    ("cells", "rank", "targets"),
    [
        ({"framework": "swift 2.4", "peft": "lora"}, 8, "q,k,v"),
        ({"framework": "swift 2.4", "peft": "lora", "notes": "target all, rank 16"}, 16, "all"),
        ({"framework": "torchtune", "peft": "lora", "notes": "memory of rank 1, r=4"}, 4, RECIPE),
        ({"framework": "ms-swift 3.1", "peft": "lora"}, 8, "all"),
        ({"framework": "swift LoRA"}, 8, "all"),
        ({"framework": "fsdp_qlora", "peft": "custom_qlora"}, 64, "q,k,v,gate,up,down"),
        ({"framework": "Qwen finetune.py", "peft": "LoRA"}, 64, "all"),
        ({"framework": "MLPerf LoRA, TRL", "peft": "LoRA r=16 (qkv_proj, o_proj)"}, 16, "q,k,v,o"),
        ({"framework": "NeMo", "peft": "lora r=32 all"}, 32, "all"),
        ({"framework": "NeMo", "peft": "lora r=32, all attention matrices"}, 32, "q,k,v,o"),
        ({"framework": "NeMo", "peft": "lora r=32 q,v of all layers"}, 32, "q,v"),
    ],
)
def test_adapters_by_a_trainers_defaults(cells: dict[str, Any], rank: int, targets: str) -> None:
    workload = case(**cells).scenario.workload
    assert workload.adapter in ("lora", "qlora")
    assert (workload.adapter_rank, workload.adapter_targets) == (rank, targets)


def test_layers_that_alone_are_trained() -> None:
    """LISA draws some besides embedding and head, LLaMA Pro adds copies of some."""
    layer, tables = 202_383_360, 2 * 32_000 * 4096 + 4096  # of Llama-2-7B; its last norm
    whole = case().scenario.model.num_parameters

    def sizes(peft: str, notes: str | None = None) -> tuple[int, int]:
        found = case(framework="ms-swift", peft=peft, notes=notes, num_gpus=1)
        assert found.scenario.workload.adapter == "none"
        assert not not_understood(found.row)
        return found.scenario.model.num_trainable_parameters, found.scenario.model.num_parameters

    assert sizes("full + lisa") == (2 * layer + tables, whole)
    assert sizes("lisa", "lisa_activated_layers 8") == (8 * layer + tables, whole)
    assert sizes("llamapro") == (4 * layer, whole + 4 * layer)
    assert sizes("llama-pro, 8 blocks") == (8 * layer, whole + 8 * layer)
    with pytest.raises(Unpriceable, match=r"= 5 \(must be a divisor of 32\)"):
        sizes("llamapro, 5 blocks")


def test_embedding_and_head_are_trained_beside_adapters() -> None:
    """Copies of both are trained, the originals stay."""
    plain, ends = (case(peft=text).scenario.model for text in ("LoRA r=64", "LoRA (emb) r=64"))
    tables = 2 * 32_000 * 4096
    assert ends.num_trainable_parameters == plain.num_trainable_parameters + tables
    assert ends.num_parameters == plain.num_parameters + tables


@pytest.mark.parametrize(
    ("words", "parallel"),
    [
        ("tp_mode REDUCE_SCATTER", True),
        ("tp_mode: ALL_REDUCE", False),
        ("no sequence parallelism", False),
        ("tensor mode msp", True),
        ("ALL_REDUCE, async_communication False", False),
        ("", True),
    ],
)
def test_words_of_sequence_parallelism(words: str, parallel: bool) -> None:
    found = case(framework="nanotron", tensor_parallel=2, notes=words or None)
    assert found.plan.sequence_parallel is parallel


@pytest.mark.parametrize(
    ("words", "optimizer", "in_backward"),
    [
        ("LOMO", "sgd", True),
        ("lomo (fused into the backward pass, no states)", "sgd", True),
        ("AdaLomo", "adafactor", True),
        ("Sophia-G", "adamw", False),
        ("ScheduleFree AdamW", "adamw", False),
        ("adamw_schedule_free", "adamw", False),
    ],
)
def test_optimizers_with_the_states_of_others(
    words: str, optimizer: str, in_backward: bool
) -> None:
    found = case(framework="DeepSpeed ZeRO-3", optimizer=words, precision="bf16").scenario
    assert found.workload.optimizer == optimizer
    assert found.software.optimizer.in_backward is in_backward
    assert found.workload.master_weights is not in_backward  # updated in 16 bits


@pytest.mark.parametrize(
    ("framework", "stage", "profile"),
    [
        ("HF Trainer", 1, "hf-trainer+deepspeed-zero1"),
        ("HF Trainer", 2, "hf-trainer+deepspeed-zero2"),
        ("HF Trainer, FSDP", 2, "hf-trainer"),
        ("HF Trainer, FSDP SHARD_GRAD_OP", 2, "hf-trainer+fsdp1"),
        ("HF Trainer", 3, "hf-trainer"),
    ],
)
def test_what_shards_under_hugging_faces_trainer(framework: str, stage: int, profile: str) -> None:
    assert case(framework=framework, zero_stage=stage).scenario.software.name == profile


def test_a_plan_beyond_a_trainer_keeps_the_engines_of_its_row() -> None:
    beyond = case(framework="HF Trainer, FSDP1", recompute="full", recompute_layers=1, zero_stage=3)
    assert beyond.scenario.software.name == "torch-trainer+fsdp1"


@pytest.mark.parametrize(
    ("cells", "hidden"),
    [
        ({}, 1.0),
        ({"zero_stage": 0}, 1.0),
        ({"zero_stage": 1}, 0.0),
        ({"notes": "ZeRO-1, accumulate_grad_in_fp32"}, 0.0),
        ({"notes": "zero_stage=1", "zero_stage": 1}, 0.0),
    ],
)
def test_nanotron_reduces_behind_the_backward_pass_without_zero_1(
    cells: dict[str, Any], hidden: float
) -> None:
    software = case(framework="nanotron", **cells).scenario.software
    assert software.overlap.data_parallel == hidden
    assert software.gradients.all_reduced


@pytest.mark.parametrize(
    ("words", "masters"),
    [
        ("accumulate_grad_in_fp32: false", False),
        ("ZeRO-1, accumulate_grad_in_fp32=False", False),
        ("accumulate_grad_in_fp32=True", True),
        ("", True),
    ],
)
def test_nanotron_without_fp32_accumulators_updates_weights_in_16_bits(
    words: str, masters: bool
) -> None:
    found = case(framework="nanotron", notes=words or None).scenario
    sharded = case(framework="nanotron", notes=words or None, zero_stage=1).scenario
    assert sharded.workload.master_weights is found.workload.master_weights is masters
    assert (found.workload.gradient_precision == "bf16") is not masters
    assert found.software.gradients.in_both_precisions is masters


@pytest.mark.parametrize(
    ("words", "reduces", "chunks"),
    [
        ("tp_mode REDUCE_SCATTER, tp_linear_async_communication true", True, False),
        ("tp_mode REDUCE_SCATTER, tp_linear_async_communication=false", False, False),
        ("ALL_REDUCE", False, False),
        ("ALL_REDUCE, tp_linear_async_communication=true", True, False),
        ("async TP", True, False),
    ],
)
def test_what_tensor_traffic_of_nanotron_hides(words: str, reduces: bool, chunks: bool) -> None:
    overlap = case(framework="nanotron", tensor_parallel=2, notes=words).scenario.software.overlap
    assert (overlap.tensor_reduction, overlap.chunked_tensor_traffic) == (reduces, chunks)


@pytest.mark.parametrize(
    ("cells", "recompute"),
    [
        ({"notes": "tp_recompute_allgather=true"}, "none"),
        ({"notes": "recompute_granularity selective"}, "none"),
        ({"recompute": "recompute_granularity=selective"}, "none"),
        ({"recompute": "recompute_layer"}, "full"),
        ({"recompute": "recompute_layer: false"}, "none"),
        ({"framework": "Megatron-LM", "notes": "recompute-granularity selective"}, "selective"),
        ({"framework": "InternEvo", "recompute": "checkpoint=True"}, "full"),
        ({"framework": "InternEvo", "recompute": "checkpoint=False"}, "none"),
        ({"framework": "InternEvo", "recompute": "selective_checkpoint"}, "full"),
    ],
)
def test_keys_of_configurations_that_recompute(cells: dict[str, Any], recompute: str) -> None:
    found = case(**{"framework": "nanotron", **cells})
    assert found.plan.recompute == recompute
    assert not_understood(found.row) == []


@pytest.mark.parametrize(
    ("words", "schedule"),
    [
        ("pp_engine: afab", "gpipe"),
        ("AllForwardAllBackwardPipelineEngine", "gpipe"),
        ("GPipe", "gpipe"),
        ("pp_engine 1f1b", "1f1b"),
        ("", "1f1b"),
    ],
)
def test_schedules_of_pipelines(words: str, schedule: str) -> None:
    cells = {"framework": "nanotron", "notes": words or None}
    assert case(**cells, pipeline_parallel=4).plan.pipeline_schedule == schedule
    assert case(**cells).plan.pipeline_schedule == "1f1b"


@pytest.mark.parametrize("words", ["DualPipeV", "use_dualpipev", "DualPipe schedule"])
def test_dualpipe_has_two_stages_a_rank_and_hides_exchanges(words: str) -> None:
    cells = {"framework": "PaddleFormers (Paddle Fleet)", "pipeline_parallel": 4}
    found = case(**cells, notes=words)
    assert (found.plan.pipeline_schedule, found.plan.virtual_stages) == ("dualpipev", 2)
    assert found.scenario.software.overlap.expert_exchange_between_nodes
    assert why_impossible(found) is None
    assert case(**cells, notes=words, virtual_stages=4).plan.pipeline_schedule == "interleaved_1f1b"
    alone = case(framework="PaddleFormers", notes=words)
    assert (alone.plan.pipeline_schedule, alone.plan.virtual_stages) == ("1f1b", 1)


def test_a_schedule_without_bubble_is_that_of_trainers_that_have_it() -> None:
    cells = {"pipeline_parallel": 4, "notes": "zero bubble (ZB-H1)"}
    found = case(framework="InternEvo", **cells)
    assert found.plan.pipeline_schedule == "zero_bubble"
    assert why_impossible(found) is None
    assert case(framework="Megatron-LM", **cells).plan.pipeline_schedule == "1f1b"
    assert case(framework="InternEvo", virtual_stages=2, **cells).plan.virtual_stages == 2


@pytest.mark.parametrize(
    ("words", "overlap"), [("overlap_sync_grad=False", 0.0), ("overlap_sync_grad=True", 1.0)]
)
def test_internevos_switches_of_traffic(words: str, overlap: float) -> None:
    found = case(framework="InternEvo", notes=f"{words}, overlap_sync_param=False")
    assert found.scenario.software.overlap.data_parallel == overlap
    assert not found.scenario.software.overlap.weight_gathers
    assert not_understood(found.row) == []
    hidden = case(framework="InternEvo", notes="overlap_sync_param=True").scenario.software
    assert hidden.overlap.weight_gathers


@pytest.mark.parametrize(
    ("framework", "words", "stage"),
    [
        ("PyTorch FSDP2", "reshard_after_forward=False", 2),
        ("torchtitan", "fsdp_reshard_after_forward never", 2),
        ("modalities (FSDP2)", "no reshard after forward", 2),
        ("PyTorch FSDP2", "reshard_after_forward=True", 3),
        ("torchtitan", "reshard_after_forward=False for the last block", 3),
    ],
)
def test_weights_that_stay_gathered_are_those_of_stage_2(
    framework: str, words: str, stage: int
) -> None:
    assert case(framework=framework, notes=words).plan.zero_stage == stage
    assert case(framework=framework, notes=words, zero_stage=3).plan.zero_stage == 3


@pytest.mark.parametrize(
    ("words", "layers"), [("ac_freq=2", 16), ("selective layer, ac_freq 4", 8)]
)
def test_how_often_modalities_computes_a_layer_again(words: str, layers: int) -> None:
    found = case(framework="modalities", recompute=words)
    assert (found.plan.recompute, found.plan.recompute_layers) == ("full", layers)
    assert not_understood(found.row) == []


@pytest.mark.parametrize(
    ("cells", "narrow"),
    [
        ({"precision": "BF_16"}, True),
        ({"precision": "param BF_16, reduce FP_32"}, False),
        ({"notes": "reduce_dtype=FP_32"}, False),
    ],
)
def test_what_modalities_reduces_in(cells: dict[str, Any], narrow: bool) -> None:
    gradients = case(framework="modalities", **cells).scenario.software.gradients
    assert gradients.reduced_in_compute_precision is narrow


@pytest.mark.parametrize(
    ("words", "repeated"),
    [
        ("", True),
        ("attention_implementation: pytorch_flash", True),
        ("attention_implementation: dao_flash", False),
        ("FSDP1, flash-attn 2", False),
    ],
)
def test_modalities_copies_keys_in_front_of_torchs_kernel(words: str, repeated: bool) -> None:
    found = case(framework="modalities", model="llama-3-8b", notes=words or None)
    assert found.scenario.software.activations.repeats_keys == repeated
    assert not not_understood(found.row)


def test_modalities_attention_by_hand() -> None:
    found = case(framework="modalities", notes="attention_implementation: manual")
    assert found.scenario.workload.attention_kernel == "eager"


@pytest.mark.parametrize("words", ["modalities", "modalities (FSDP2)", "Modalities, torch.compile"])
def test_modalities_computes_its_loss_from_16_bit_logits(words: str) -> None:
    found = case(framework=words, pipeline_parallel=2).scenario
    assert (found.software.loss.logits_copies, found.software.loss.fp32_logits_copies) == (2.0, 0.0)
    assert found.software.gradients.reduced_in_compute_precision
    assert found.software.pipeline.stages == "ends"
    assert not found.software.optimizer.fused


@pytest.mark.parametrize(
    ("cells", "copies"),
    [
        ({"precision": "full_bf16"}, (2.0, 0.0)),
        ({"precision": "bf16 stochastic rounding"}, (2.0, 0.0)),
        ({"precision": "bf16"}, (2.0, 0.0)),
        ({"precision": "amp bf16"}, (1.0, 2.0)),
        ({"precision": "float8"}, (1.0, 2.0)),
        ({"precision": "bf16", "notes": "compile"}, (1.0, 1.0)),
    ],
)
def test_logits_of_torchaos_loops(cells: dict[str, Any], copies: tuple[float, float]) -> None:
    loss = case(framework="torchao", num_gpus=1, **cells).scenario.software.loss
    assert (loss.logits_copies, loss.fp32_logits_copies) == copies


@pytest.mark.parametrize(
    ("cells", "early"),
    [
        ({"optimizer": "CPUOffloadOptimizer(AdamW)"}, False),
        ({"optimizer": "CPUOffloadOptimizer", "notes": "offload_gradients=True"}, True),
        ({"optimizer": "AdamW", "notes": "optim_cpu_offload=ao"}, False),
        ({"optimizer": "AdamW", "notes": "optim_cpu_offload=ao_offload_grads"}, True),
        ({"optimizer": "AdamW, ao CPU offload, offload gradients"}, True),
        ({"optimizer": "ao offload_gradients"}, True),
    ],
)
def test_gradients_that_leave_with_torchaos_optimizer(cells: dict[str, Any], early: bool) -> None:
    found = case(framework="torchao", num_gpus=1, precision="bf16", **cells)
    assert found.plan.offload == "optimizer"
    assert found.scenario.software.optimizer.in_backward is early
    assert found.scenario.software.optimizer.fused
    assert not_understood(found.row) == []


@pytest.mark.parametrize(
    ("cells", "reads"),
    [
        ({"framework": "PyTorch FSDP2"}, 4.0),
        ({"framework": "PyTorch FSDP2", "notes": "no gradient clipping"}, 1.0),
        ({"framework": "Megatron-LM", "notes": "clip_grad=0"}, 1.0),
        ({"framework": "torchtitan", "notes": "max_grad_norm=1.0"}, 3.0),
        ({"framework": "torchao"}, 1.0),
        ({"framework": "torchao", "notes": "gradient clipping"}, 4.0),
        ({"framework": "own PyTorch loop, torchao float8"}, 4.0),
        ({"framework": "torchtitan + torchao, compile", "precision": "float8"}, 4.0),
    ],
)
def test_gradients_that_nobody_clips(cells: dict[str, Any], reads: float) -> None:
    found = case(**cells)
    assert found.scenario.software.optimizer.gradient_accesses == reads
    assert not_understood(found.row) == []


@pytest.mark.parametrize(
    ("cells", "by_torch"),
    [
        ({"framework": "PyTorch FSDP1"}, True),
        ({"framework": "PyTorch FSDP1", "optimizer": "DeepSpeedCPUAdam"}, False),
        ({"framework": "Hugging Face Trainer", "notes": "DeepSpeed ZeRO-3"}, False),
        ({"framework": "llm.q"}, False),
    ],
)
def test_who_updates_what_is_offloaded(cells: dict[str, Any], by_torch: bool) -> None:
    found = case(**cells, offload="optimizer and params to CPU")
    assert found.scenario.software.optimizer.torch_on_host is by_torch
    assert not_understood(found.row) == []


@pytest.mark.parametrize(
    ("framework", "recompute"),
    [("AXLearn", "modules:layernorm+mlp"), ("MaxText", "full"), ("Levanter (JAX)", "full")],
)
def test_trainers_whose_mesh_shards_weights(framework: str, recompute: str) -> None:
    found = case(framework=framework, zero_stage=None, recompute=None)
    assert found.scenario.software.name.startswith("xla")
    assert (found.plan.zero_stage, found.plan.recompute) == (3, recompute)


@pytest.mark.parametrize(
    ("notes", "pinned"),
    [
        ("rented machine", True),
        ("pin_memory false", False),
        ("pin_memory=false", False),
        ("unpinned memory", False),
        ("pageable memory", False),
    ],
)
def test_memory_of_what_is_offloaded(notes: str, pinned: bool) -> None:
    cells = {"framework": "DeepSpeed ZeRO-3", "offload": "optimizer and params to CPU"}
    found = case(**cells, notes=notes)
    assert found.scenario.software.communication.pinned_host_memory is pinned
    assert notes == "rented machine" or not_understood(found.row) == []


@pytest.mark.parametrize(
    "words",
    [
        *("zero1.size=4", "zero1 size 4", "zero1=4", "ZeRO1: 4", "zero 4", "zero1 group 4"),
        *("zero1: size 4, fsdp False", "zero1=dict(size=4)", "zero_size=4"),
        *("zero1 parallel 4, tp 1", "zero1_parallel_size=4"),
    ],
)
def test_internevo_shares_states_over_some_data_ranks(words: str) -> None:
    plan = case(framework="InternEvo", notes=words).plan
    assert (plan.zero_stage, plan.dp_replicate) == (1, 4)


@pytest.mark.parametrize("words", ["zero1.size=-1", "ZeRO 1", "ZeRO-1", "zero1"])
def test_internevo_shares_states_over_all_data_ranks(words: str) -> None:
    plan = case(framework="InternEvo", notes=words).plan
    assert (plan.zero_stage, plan.dp_replicate) == (1, 1)


@pytest.mark.parametrize(
    "words", ["wp=8", "wp_size=8", "weight parallel size=8", "weight=dict(size=8, overlap=True)"]
)
def test_internevo_shares_weights_over_some_data_ranks(words: str) -> None:
    assert case(framework="InternEvo", notes=f"isp, {words}").plan.dp_replicate == 2


@pytest.mark.parametrize(
    ("cells", "setting", "again"),
    [
        ({"notes": "checkpoint=True"}, "full", True),
        ({"notes": "checkpoint=True, selective_checkpoint=True"}, "full", False),
        ({"notes": "checkpoint=False, selective_checkpoint=False"}, "none", True),
        ({"recompute": "full", "notes": "selective ckpt on"}, "full", False),
        ({"recompute": "full", "notes": "isp, wp=8; selective_checkpoint"}, "full", False),
        ({"recompute": "full", "notes": "selective_checkpoint=False"}, "full", True),
        ({"recompute": "full (selective_checkpoint=False)"}, "full", True),
        ({"notes": "selective checkpoint offload"}, "full", False),
        ({"recompute": "none", "notes": "selective_checkpoint=True"}, "none", False),
    ],
)
def test_internevo_keeps_attention_of_layers_that_run_again(
    cells: dict[str, str], setting: str, again: bool
) -> None:
    found = case(framework="InternEvo", **cells)
    assert found.plan.recompute == setting
    assert found.scenario.software.kernels.recomputes_attention == again
    assert not not_understood(found.row)


@pytest.mark.parametrize(("sequence", "weight"), [(16, 4), (8, 2), (16, 1), (4, 8)])
def test_weights_of_isp_are_a_group_of_their_own(sequence: int, weight: int) -> None:
    """Fewer ranks than a sequence has may share weights; all of them share the states."""
    found = case(framework="InternEvo", notes=f"isp, sp={sequence}, wp={weight}")
    assert found.plan.context_parallel == sequence
    assert found.plan.shard_ranks == weight
    assert why_impossible(found) is None
    memory = price(found.scenario, PlanTable.from_plans([found.plan])).memory
    parameters = found.scenario.model.num_parameters
    assert float(memory.weights[0]) == pytest.approx(parameters * (2 / weight + 4 / 16))
    assert float(memory.optimizer[0]) == pytest.approx(8 * parameters / 16)


@pytest.mark.parametrize("cells", [{"tensor_parallel": 4}, {"context_parallel": 16}])
def test_isp_has_one_group_of_a_sequence(cells: dict[str, int]) -> None:
    found = case(framework="InternEvo", notes="isp, sp=16, wp=4", **cells)
    assert (found.plan.tensor_parallel, found.plan.context_parallel) == (1, 16)


@pytest.mark.parametrize("words", ["HYBRID_SHARD", "hsdp", "FSDP, hybrid sharding"])
def test_hybrid_shards_are_those_of_a_node_that_no_cell_describes(words: str) -> None:
    assert case(framework="modalities", notes=words).plan.dp_replicate == 2
    assert case(framework="modalities", notes=words, gpus_per_node=4).plan.dp_replicate == 4


@pytest.mark.parametrize(
    ("framework", "stage"),
    [("ms-swift", 2), ("HF Trainer", 1), ("ms-swift", 3), ("Qwen finetune.py", None)],
)
def test_deepspeed_by_its_stage_alone_has_fp32_partitions(
    framework: str, stage: int | None
) -> None:
    found = case(framework=framework, zero_stage=stage, peft="none").scenario
    assert "deepspeed-zero" in found.software.name
    assert found.workload.master_weights
    stated = case(framework=framework, zero_stage=2, peft="none", master_weights=False)
    assert not stated.scenario.workload.master_weights


def test_one_card_that_names_no_engine_has_none() -> None:
    alone = case(framework="Qwen finetune.py", peft="LoRA", num_gpus=1).scenario
    assert (alone.software.name, alone.workload.master_weights) == ("hf-trainer", False)
    named = case(framework="Qwen finetune.py, DeepSpeed ZeRO-2", peft="LoRA", num_gpus=1)
    assert "deepspeed-zero2" in named.scenario.software.name


@pytest.mark.parametrize(
    ("words", "offload"),
    [
        ("use_cpu_offload true", "weights"),
        ("CPU offloading", "weights"),
        ("with cpu offload", "weights"),
        ("use_cpu_offload False", "none"),
        ("no CPU offload", "none"),
    ],
)
def test_fsdp_qloras_offload_takes_weights_along(words: str, offload: str) -> None:
    found = case(framework="fsdp_qlora", peft="qlora", notes=words)
    assert found.plan.offload == offload
    assert found.scenario.workload.quantisation == "nf4_double"


def test_qwens_script_trains_embedding_and_head_beside_adapters_of_a_base_model() -> None:
    def trained(**cells: str) -> float:
        model = case(framework="Qwen finetune.py", **cells).scenario.model
        return model.num_trainable_parameters / 1e9

    base = trained(model="Qwen-7B", peft="LoRA")
    assert base > 1.2
    assert trained(model="Qwen-7B-Chat", peft="LoRA") < 0.2
    assert trained(model="Qwen-7B", peft="LoRA (chat)") < 0.2
    assert trained(model="Qwen-7B-Chat-Int4", peft="Q-LoRA") < 0.2
    assert trained(model="Qwen-7B", peft="LoRA (emb)") == base
    assert trained(model="Qwen-7B", peft="LoRA (no emb)") < 0.2
    assert trained(model="Qwen-7B", peft="LoRA w/ emb") == base
    assert trained(model="Qwen1.5-7B", peft="LoRA") == base  # not that release's script
    workload = case(framework="Qwen", model="Qwen-7B", peft="Q-LoRA").scenario.workload
    assert workload.quantisation == "int4"


@pytest.mark.parametrize("words", ["LongLoRA", "RandLoRA", "BOFT", "ReFT"])
def test_kin_of_lora_is_priced_as_lora(words: str) -> None:
    found = case(framework="ms-swift", peft=words)
    assert (found.scenario.workload.adapter, found.scenario.workload.adapter_method) == (
        "lora",
        "lora",
    )
    assert any("priced as LoRA" in text for text in found.defaults)


@pytest.mark.parametrize(
    ("words", "adapter", "method"),
    [
        ("adalora", "lora", "adalora"),
        ("IA3", "lora", "ia3"),
        ("VeRA r=256", "lora", "vera"),
        ("LoKr", "lora", "lokr"),
        ("LoHa r=8", "lora", "loha"),
        ("OFT", "lora", "oft"),
        ("lora r=32 q_proj,v_proj (llama-3.2-3B-rank32-dora)", "lora", "dora"),
        ("QDoRA", "qlora", "dora"),
        ("DoRA, nf4", "qlora", "dora"),
        ("LoRA+", "lora", "lora"),  # the same tensors
        ("PiSSA", "lora", "lora"),
        ("rsLoRA", "lora", "lora"),
    ],
)
def test_methods_beside_frozen_matrices(words: str, adapter: str, method: str) -> None:
    found = case(framework="ms-swift", peft=words)
    workload = found.scenario.workload
    assert (workload.adapter, workload.adapter_method) == (adapter, method)
    assert not any("priced as LoRA" in text for text in found.defaults)


@pytest.mark.parametrize(
    ("words", "engine", "stages", "waits"),
    [
        ("BigScience Megatron-DeepSpeed", "deepspeed-bf16-optimizer", "ends", True),
        ("Megatron-DeepSpeed (BigScience)", "deepspeed-bf16-optimizer", "ends", True),
    ],
)
def test_blooms_trainer(words: str, engine: str, stages: str, waits: bool) -> None:
    found = case(framework=words, model="bloom", precision="bf16", tensor_parallel=4)
    software = found.scenario.software
    assert engine in software.name
    assert (found.plan.zero_stage, found.plan.sequence_parallel) == (1, False)
    assert (software.pipeline.stages, software.host.synchronous) == (stages, waits)
    assert found.scenario.workload.attention_kernel == "eager"


@pytest.mark.parametrize(
    ("cells", "profile", "stage"),
    [
        ({"framework": "MLPerf Training v4.1"}, "nemo", 1),
        ({"framework": "MLPerf 4.0 (NVIDIA)", "model": "gpt3"}, "nemo", 1),
        ({"framework": "MLPerf BERT", "model": "bert-large", "seq_len": 512}, "apex-bert", 0),
        ({"framework": "MLPerf (HF reference)"}, "hf-trainer", 3),
        ({"framework": "MLPerf, PaxML", "gpu": "TPU v5p"}, "xla", 3),
        ({"framework": "torchao", "precision": "float8", "notes": "compile"}, "torchtitan", 3),
    ],
)
def test_trainers_behind_the_name_of_a_benchmark_or_library(
    cells: dict[str, Any], profile: str, stage: int
) -> None:
    found = case(**cells)
    assert found.scenario.software.name.split("+")[0] == profile
    assert found.plan.zero_stage == stage
    assert not_understood(found.row) == []


@pytest.mark.parametrize(
    ("words", "norm", "gelu"),
    [
        ({"notes": "LayerNorm and GELU by hand", "precision": "pure bf16"}, 3.0, 4.0),
        ({"notes": "own LayerNorm and GELU, written with elementary operations"}, 6.0, 7.0),
        ({"notes": "hand-written GELU", "precision": "pure bf16"}, 1.0, 1.0),
        ({"notes": "own GELU and layer norm", "precision": "bf16 autocast"}, 6.0, 7.0),
    ],
)
def test_layers_written_out_in_python(words: dict[str, Any], norm: float, gelu: float) -> None:
    found = case(framework="own PyTorch loop", **words)
    kept = found.scenario.software.activations
    autocasts = found.scenario.software.precision.autocasts_weights
    name = "gelu-autocast" if autocasts else "gelu"
    saved = kept.activation_saved
    assert (kept.layer_norm_saved, saved.get(name, saved["default"])) == (norm, gelu)
    assert not_understood(found.row) == []


@pytest.mark.parametrize(
    ("framework", "notes", "accesses"),
    [
        ("own PyTorch loop (torch 2.13)", "nn.RMSNorm, RoPE", 2.0),
        ("own PyTorch loop (March 2026)", "RMSNorm of torch", 2.0),
        ("own PyTorch loop (torch 2.6)", "nn.RMSNorm, RoPE", 4.0),
        ("own PyTorch loop (torch 2.6)", "fused RMSNorm of apex", 2.0),
        ("own PyTorch loop (torch 2.13)", "RMSNorm, RoPE", 4.0),
    ],
)
def test_norms_of_one_kernel(framework: str, notes: str, accesses: float) -> None:
    software = case(framework=framework, notes=notes).scenario.software
    assert software.kernels.rms_norm_accesses == accesses
    assert (software.activations.rms_norm_saved_fp32_bytes == 0.0) == (accesses == 2.0)


def test_16_bit_logits_that_a_loop_casts() -> None:
    cells = {"framework": "own PyTorch loop", "optimizer": "AdamW (bf16 weights and states)"}
    as_they_are = case(**cells).scenario.software.loss
    for notes in (
        "logits.float()",
        "cross-entropy of logits cast to fp32",
        "logits upcast to fp32",
    ):
        cast = case(**cells, notes=notes).scenario.software.loss
        assert (as_they_are.fp32_logits_copies, cast.fp32_logits_copies) == (0.0, 2.0)


def test_a_loop_that_holds_its_output() -> None:
    cells = {"framework": "Hugging Face Transformers with PEFT", "peft": "lora r=16"}
    held = case(**cells, notes="the loop keeps the output of the model; sdpa").scenario.software
    usual = case(**cells, notes="sdpa").scenario.software
    assert (usual.loss.logits_gradient_copies, held.loss.logits_gradient_copies) == (0.0, 2.0)


@pytest.mark.parametrize(
    "words",
    ["no_sync off", "without no_sync", "gradients are reduce-scattered in every micro-batch"],
)
def test_gradients_that_each_micro_batch_reduces(words: str) -> None:
    cells = {"framework": "own loop on Hugging Face modules, FSDP1 full shard", "zero_stage": 3}
    assert case(**cells).scenario.software.gradients.accumulated_unsharded
    assert not case(**cells, notes=words).scenario.software.gradients.accumulated_unsharded


def test_maxtext_multiplies_in_bf16_on_cards_that_emulate_it() -> None:
    cells = {"framework": "MaxText", "gpu": "T4", "num_gpus": 1, "model": "qwen3-0.6b"}
    assert case(**cells).scenario.workload.precision == "bf16"
    assert case(**cells, precision="fp16").scenario.workload.precision == "fp16"
    assert case(**(cells | {"framework": "JAX"})).scenario.workload.precision == "fp16"


def test_compiled_layers_are_written_out_in_vain() -> None:
    words = {"framework": "own PyTorch loop, torch.compile"}
    by_hand = case(**words, notes="LayerNorm and GELU by hand").scenario.software
    assert by_hand == case(**words).scenario.software


@pytest.mark.parametrize(
    "words",
    ["Megatron-SWIFT", "ms-swift Megatron", "Megatron-SWIFT (ms-swift 3.6)", "mcore-bridge"],
)
def test_megatron_swifts_own_defaults(words: str) -> None:
    found = case(framework=words, tensor_parallel=2)
    plan, overlap = found.plan, found.scenario.software.overlap
    assert (plan.zero_stage, plan.recompute, plan.sequence_parallel) == (1, "selective", False)
    assert (overlap.data_parallel, overlap.weight_gathers) == (0.0, False)
    stated = case(framework=words, recompute="full uniform 1", notes="overlap_grad_reduce=true")
    assert stated.plan.recompute == "full"
    assert stated.scenario.software.overlap.data_parallel > 0.0


@pytest.mark.parametrize(
    ("notes", "kernel"),
    [
        ("flash attention", "flash"),
        ("flash attention v1", "flash"),
        ("flash attn 2", "flash"),
        ("no flash attention", "eager"),
        ("", "eager"),
    ],
)
def test_flash_attention_in_words_replaces_a_trainers_usual_kernel(notes: str, kernel: str) -> None:
    found = case(framework="Megatron-DeepSpeed", notes=notes)
    assert found.scenario.workload.attention_kernel == kernel


def test_no_activation_recompute_is_none() -> None:
    assert case(notes="no activation recompute").plan.recompute == "none"
    assert case(notes="activation recompute on").plan.recompute == "full"


def test_mlperfs_adapters_are_those_of_attention() -> None:
    workload = case(framework="NeMo (MLPerf v4.0)", peft="lora").scenario.workload
    assert (workload.adapter_rank, workload.adapter_targets) == (16, "q,k,v,o")


@pytest.mark.parametrize("words", ["MLPerf v4.1", "NeMo (MLPerf Training 4.0)"])
@pytest.mark.parametrize("precision", ["fp8", "nvfp4"])
def test_mlperfs_frozen_weights_lie_in_few_bits(words: str, precision: str) -> None:
    def stored(**cells: Any) -> bool:
        return case(
            framework=words, precision=precision, **cells
        ).scenario.software.fp8.stores_frozen

    assert stored(peft="lora")
    assert not stored(peft="none")
    adapted = case(framework=words, precision=precision, peft="lora").scenario.software
    assert adapted.fp8.attention_rate > 1.0


@pytest.mark.parametrize(
    ("framework", "notes", "faster"),
    [
        ("NeMo (MLPerf v4.0)", None, True),
        ("NeMo (MLPerf v4.0)", "FP8_DPA=False", False),
        ("MLPerf v5.1 (NeMo)", "FP8_DPA=0", False),
        ("MLPerf v5.0, AMD (NeMo)", None, False),
        ("MLPerf v5.0 (NeMo, ROCm)", "FP8_DPA=1", True),
    ],
)
def test_mlperfs_attention_in_8_bits(framework: str, notes: str | None, faster: bool) -> None:
    cells = {"framework": framework, "precision": "fp8", "peft": "lora", "notes": notes}
    assert (case(**cells).scenario.software.fp8.attention_rate > 1.0) is faster


def test_mlperfs_training_code() -> None:
    gpt = case(framework="NeMo (MLPerf v4.0)", model="gpt3-175b", precision="fp8")
    assert gpt.scenario.model.hidden_dropout == 0.0
    assert gpt.scenario.workload.gradient_precision == "bf16"
    assert gpt.scenario.software.fp8.gathers_weights  # FP8_PARAMS
    older = case(framework="NeMo (MLPerf v3.1)", model="gpt3-175b", precision="fp8")
    assert not older.scenario.software.fp8.gathers_weights
    later = case(framework="MLPerf v5.1", model="llama31_405b", precision="fp8", num_gpus=512)
    assert later.scenario.model.hidden_size == 16384
    assert later.scenario.software.fp8.gathers_weights
    assert later.scenario.software.loss.forward_bytes == 24.0

    def lora(framework: str) -> Case:
        cells = {"model": "llama2_70b_lora", "peft": "lora", "precision": "fp8"}
        return case(framework=framework, context_parallel=2, **cells)

    assert lora("MLPerf Training v5.1").plan.context_parallel_method == "ulysses"
    assert lora("MLPerf Training v4.0").plan.context_parallel_method == "ring"
    software = lora("MLPerf Training v5.1").scenario.software
    assert software.adapters.input_bytes == 3.0  # a dropout in front of them
    alone = {"framework": "MLPerf v5.0", "peft": "lora", "precision": "fp8", "tensor_parallel": 1}
    assert case(**alone).scenario.software.activations.activation_inputs_in_fp8
    stated = case(**alone, notes="FP8_ACT=0").scenario.software.activations
    assert not stated.activation_inputs_in_fp8
    assert software.loss.forward_bytes == 38.0
    bert = case(framework="MLPerf Training v2.1 BERT", model="bert-large", seq_len=512)
    assert bert.scenario.software.name == "apex-bert"
    for other in ("MLPerf v4.1, PaxML", "MLPerf v4.0 (HF reference)", "MLPerf v4.0, DeepSpeed"):
        elsewhere = case(framework=other, model="gpt3-175b", precision="fp8", gpu="H100")
        assert not elsewhere.scenario.software.fp8.gathers_weights


@pytest.mark.parametrize(
    "words",
    [
        "Megatron-LM v1.1.5 + DeepSpeed",
        "DeepSpeed Megatron-LM-v1.1.5-3D_parallelism",
        "AMP (Megatron/DeepSpeed)",
        "DeepSpeed + Megatron-LM (AMP)",
    ],
)
def test_megatron_of_2020_fuses_nothing(words: str) -> None:
    found = case(framework=words, gpu="T4", precision="fp16", num_gpus=4, tensor_parallel=2)
    kernels = found.scenario.software.kernels
    assert (kernels.eager_scores_accesses, kernels.bias_accesses) == (8.0, 2.0)
    assert not found.scenario.software.overlap.tensor_reduction
    assert found.scenario.workload.attention_kernel == "eager"
    assert not found.plan.sequence_parallel


@pytest.mark.parametrize("framework", ["SimuMax", "Megatron-LM (SimuMax)", "Megatron-LM, mcore"])
def test_megatron_core_runs_transformer_engines_layers(framework: str) -> None:
    assert case(framework=framework).scenario.software.name == "nemo"


def test_nanotrons_columns_as_they_are_logged() -> None:
    mode = "tp_mode=TensorParallelLinearMode.REDUCE_SCATTER, tp_async_comm=True"
    notes = f"{mode}, ddp_bucket_cap_mb=25, accumulate_grad_in_fp32=True, zero_stage=1"
    found = case(framework="nanotron", tensor_parallel=2, notes=notes)
    assert (found.plan.zero_stage, found.plan.sequence_parallel) == (1, True)
    assert found.scenario.software.overlap.tensor_reduction
    assert not not_understood(found.row)


@pytest.mark.parametrize(
    ("framework", "width", "notes", "counted"),
    [
        ("Modalities", 10240, "SwiGLU", 2.8),  # 6,912 wide
        ("Modalities", 6912, "", 2.8),
        ("Modalities", 10240, "", 2.66),  # a plain MLP, tied
        ("plain PyTorch", 10240, "SwiGLU", 3.61),
    ],
)
def test_the_width_of_a_gated_mlp(framework: str, width: int, notes: str, counted: float) -> None:
    shape = {"num_layers": 32, "hidden_size": 2560, "num_heads": 32, "ffn_hidden_size": width}
    cells = {"model": "own-gpt", "framework": framework, "vocab_size": 50304, "notes": notes}
    model = case(**cells, **shape).scenario.model
    assert model.num_parameters / 1e9 == pytest.approx(counted, abs=0.01)


@pytest.mark.parametrize(
    ("name", "billions", "latent"),
    [
        ("deepseek-1b", 4.61, 512),
        ("deepseek_16b", 15.71, 512),
        ("DeepSeek-32B", 31.37, 512),
        ("mixtral_8x1b", 6.07, 0),
    ],
)
def test_simumaxs_own_models(name: str, billions: float, latent: int) -> None:
    model = case(framework="Megatron-Core (SimuMax)", model=name, num_gpus=8).scenario.model
    assert model.num_parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert (model.kinds[-1].attention.kv_lora_rank or 0) == latent


@pytest.mark.parametrize(
    ("size", "layers", "hidden"),
    [("7B", 32, 4096), ("20B", 60, 5120), ("30B", 60, 6656), ("65B", 80, 8192)],
)
def test_internevos_configurations_by_their_sizes(size: str, layers: int, hidden: int) -> None:
    model = case(framework="InternEvo", model=size).scenario.model
    assert (model.num_layers, model.hidden_size) == (layers, hidden)
    assert model.kinds[0].attention.num_kv_heads == model.kinds[0].attention.num_heads


def test_internevos_mixtures_share_their_experts() -> None:
    found = case(framework="InternEvo", model="mixtral-8x7b", num_gpus=8, expert_parallel=8)
    assert found.scenario.software.name == "internevo"
    assert why_impossible(found) is None


def test_simumaxs_scripts_hide_no_traffic() -> None:
    found = case(framework="SimuMax", tensor_parallel=2)
    overlap = found.scenario.software.overlap
    assert (overlap.data_parallel, overlap.weight_gathers) == (0.0, False)
    assert not overlap.chunked_tensor_traffic
    assert not found.scenario.software.communication.exchanges_once_a_node
    assert found.plan.zero_stage == 1
    stated = case(framework="SimuMax", notes="overlap_grad_reduce, overlap_param_gather")
    assert stated.scenario.software.overlap.weight_gathers


@pytest.mark.parametrize(
    ("notes", "method"), [("cp2", "ulysses"), ("cp2, cp_comm_type=p2p", "ring")]
)
def test_simumaxs_scripts_exchange_heads(notes: str, method: str) -> None:
    for framework in ("SimuMax", "Megatron-Core (SimuMax)"):
        plan = case(framework=framework, model="llama-3-8b", notes=notes).plan
        assert (plan.context_parallel, plan.context_parallel_method) == (2, method)


def test_dense_layers_before_mixtures() -> None:
    def experts(**cells: Any) -> list[int]:
        cut = {"model": "deepseek-v3", "num_layers": 4, "framework": "Megatron-Core", **cells}
        model = case(**cut).scenario.model
        return [model.kinds[kind].feed_forward.num_experts for kind in model.pattern]

    assert experts() == [0, 0, 0, 256]
    assert experts(num_dense_layers=1) == [0, 256, 256, 256]
    assert experts(framework="SimuMax") == [0, 256, 256, 256]
    assert experts(framework="SimuMax", num_dense_layers=3) == [0, 0, 0, 256]


@pytest.mark.parametrize(
    ("name", "layers", "hidden"),
    [
        ("BLOOM", 70, 14336),
        ("tr11-176B-ml", 70, 14336),
        ("tr8b-104B", 64, 11600),
        ("tr1-13B", 40, 5120),
        ("tr11-200B-ml", 80, 14400),
    ],
)
def test_bigsciences_models_train_with_dropout(name: str, layers: int, hidden: int) -> None:
    words = "bigscience-workshop/Megatron-DeepSpeed"
    found = case(framework=words, model=name, precision="bf16", num_gpus=384)
    model = found.scenario.model
    assert (model.num_layers, model.hidden_size) == (layers, hidden)
    assert (model.hidden_dropout, model.attention_dropout) == (0.1, 0.1)
    assert not not_understood(found.row)
    stated = case(framework=words, model=name, precision="bf16", dropout=0.0)
    assert stated.scenario.model.hidden_dropout == 0.0


@pytest.mark.parametrize("name", ["chatglm-6b", "THUDM/chatglm-6b", "ChatGLM_6B"])
def test_chatglms_first_code_writes_its_scores_out(name: str) -> None:
    kernel = case(model=name, framework="HF Trainer").scenario.workload.attention_kernel
    assert kernel == "eager"
    assert case(model="chatglm2-6b").scenario.workload.attention_kernel == "flash"


@pytest.mark.parametrize(
    ("words", "masters"),
    [("bf16", False), ("bf16 amp", True), ("float8 tensorwise", True), ("fp32", True)],
)
def test_torchaos_optimizers_update_weights_in_16_bits(words: str, masters: bool) -> None:
    cells = {"framework": "torchao", "optimizer": "AdamW8bit", "precision": words}
    assert case(**cells).scenario.workload.master_weights == masters


@pytest.mark.parametrize("words", ["INT8 weight-only", "BitNet b1.58"])
def test_weights_in_integers_are_priced_as_16_bits_and_say_so(words: str) -> None:
    found = case(framework="torchao", precision=words)
    assert found.scenario.workload.precision == "bf16"
    assert any("int8" in text for text in found.defaults)


@pytest.mark.parametrize("framework", ["torchao", "torchtitan + torchao"])
def test_matmuls_of_integers_have_a_recipe(framework: str) -> None:
    found = case(framework=framework, precision="int8 mixed precision").scenario
    assert found.workload.precision == "fp8"
    assert found.software.fp8.integers
    assert found.workload.master_weights == ("torchtitan" in framework)
    base = case(framework=framework, precision="int8, bf16", peft="lora").scenario
    assert (base.workload.precision, base.workload.quantisation) == ("bf16", "int8")
    assert not base.software.fp8.integers


@pytest.mark.parametrize("words", ["ao", "ao_offload_grads"])
def test_torchao_names_its_offload(words: str) -> None:
    found = case(framework="torchao", offload=words)
    assert found.plan.offload == "optimizer"
    assert found.scenario.software.optimizer.in_backward == (words != "ao")


@pytest.mark.parametrize("words", ["V100/T4", "T4 + V100", "4xV100 and 12xT4", "T4, V100 mixed"])
def test_cards_of_several_kinds_are_as_fast_as_the_slowest(words: str) -> None:
    found = case(gpu=words)
    assert found.scenario.cluster.accelerator.name == "T4"
    assert any("slowest" in text for text in found.defaults)


@pytest.mark.parametrize(
    "notes",
    [
        "num_layers_in_first_pipeline_stage=6, num_layers_in_last_pipeline_stage=4",
        "--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 4",
    ],
)
def test_layers_of_the_first_and_last_stage(notes: str) -> None:
    found = case(framework="Megatron-LM", model="llama-2-7b", pipeline_parallel=4, notes=notes)
    assert found.scenario.layer_ranges == ((0, 6), (6, 17), (17, 28), (28, 32))


def test_internevos_configuration_as_it_stands() -> None:
    words = "zero1=dict(size=-1), tensor=dict(size=2, mode='msp'), pipeline=dict(size=4)"
    notes = f"{words}, num_chunks=2, activation_ckpt=0.5"
    found = case(framework="InternEvo", model="llama-2-7b", num_gpus=16, notes=notes)
    plan = found.plan
    assert (plan.tensor_parallel, plan.pipeline_parallel, plan.virtual_stages) == (2, 4, 2)
    assert (plan.data_parallel, plan.dp_shard) == (2, 2)
    assert (plan.recompute, plan.recompute_layers) == ("full", 2)
    assert not not_understood(found.row)


@pytest.mark.parametrize("notes", ["sp=8, wp=8", "tensor 8, weight parallel 8", "mode isp, tp 8"])
def test_internevos_isp_by_its_ranks(notes: str) -> None:
    plan = case(framework="InternEvo", notes=notes).plan
    assert (plan.context_parallel, plan.context_parallel_method) == (8, "ulysses")
    assert (plan.tensor_parallel, plan.zero_stage) == (1, 3)
    longer = case(framework="InternEvo", notes="sp=64", num_gpus=64)  # of 32 heads
    assert longer.plan.context_parallel_method == "ring"
    assert why_impossible(longer) is None
    other = case(framework="InternEvo", notes="tensor 8, wp 1, mode msp").plan
    assert (other.tensor_parallel, other.context_parallel) == (8, 1)


def test_internevos_own_kind_of_parallelism() -> None:
    """Its tensor-parallel ranks share the sequence; weights are sharded over its own group."""
    found = case(framework="InternEvo", tensor_parallel=4, notes="isp, wp=8", zero_stage=1)
    isp = found.plan
    assert found.scenario.software.name == "internevo+fsdp2"
    assert why_impossible(found) is None
    assert (isp.tensor_parallel, isp.context_parallel, isp.zero_stage) == (1, 4, 3)
    assert (isp.context_parallel_method, isp.dp_shard) == ("ulysses", 2)
    priced = price(found.scenario, PlanTable.from_plans([isp]))
    parameters, ranks = found.scenario.model.num_parameters, 4 * isp.data_parallel
    assert float(priced.memory.optimizer[0]) == pytest.approx(8 * parameters / ranks)
    weights = (2 / 8 + 4 / ranks) * parameters  # 16 bits over the group, fp32 over all ranks
    assert float(priced.memory.weights[0]) == pytest.approx(weights)
    assert not case(framework="InternEvo", tensor_parallel=4).plan.sequence_parallel


@pytest.mark.parametrize(
    ("words", "optimizer"),
    [
        ("AdamW4bit (torchao)", "adamw_4bit"),
        ("AdamW8bit (torchao)", "adamw_8bit"),
        ("AdamW8bitAo", "adamw_8bit"),
        ("AdamW8bitBnb", "adamw_8bit"),
        ("AdamWFp8Ao", "adamw_8bit"),
        ("AdamW4bitAo", "adamw_4bit"),
        ("AdamW4bitLpmm", "adamw_4bit"),
        ("AdamWFp8", "adamw_8bit"),
        ("mcore distributed optimizer", "adamw"),
        ("CPUOffloadOptimizer", "adamw"),
        ("adam-mini", "sgd_momentum"),
        ("AdEMAMix", "ademamix"),
        ("AdEMAMix8bit", "ademamix_8bit"),
        ("LoRA+", "adamw"),
        ("DistributedFusedLAMB", "lamb"),
        ("AdamW, bf16 stochastic rounding", "adamw"),
    ],
)
def test_names_of_optimizers(words: str, optimizer: str) -> None:
    assert case(optimizer=words).scenario.workload.optimizer == optimizer


@pytest.mark.parametrize("words", ["galore_adafactor", "L-BFGS"])
def test_an_optimizer_of_other_states_is_not_priced_as_one_without_any(words: str) -> None:
    with pytest.raises(Unpriceable, match=f"optimizer {words!r} is not priced"):
        case(optimizer=words)


@pytest.mark.parametrize(
    ("words", "optimizer", "rank"),
    [
        ("GaLore AdamW, rank 64", "galore_adamw", 64),
        ("galore_adamw_8bit", "galore_adamw_8bit", 128),
        ("Q-GaLore", "galore_adamw_8bit", 128),
        ("apollo_adamw", "apollo_adamw", 1),
        ("APOLLO-Mini", "apollo_adamw", 1),
        ("adamw", "adamw", 128),
    ],
)
def test_ranks_of_projected_gradients(words: str, optimizer: str, rank: int) -> None:
    workload = case(optimizer=words).scenario.workload
    assert (workload.optimizer, workload.optimizer_rank) == (optimizer, rank)


@pytest.mark.parametrize(
    ("notes", "rank"),
    [("rank 1024", 1024), ("apollo_rank=256", 256), ("lora rank 8", 128), ("local_rank 3", 128)],
)
def test_ranks_of_projected_gradients_in_notes(notes: str, rank: int) -> None:
    assert case(optimizer="GaLore AdamW", notes=notes).scenario.workload.optimizer_rank == rank


def test_torchtune_keeps_its_profile_with_torchaos_host_optimizer() -> None:
    cells = {"framework": "torchtune", "offload": "optimizer", "gpu": "RTX 4090"}
    one = case(**cells, num_gpus=1, optimizer="CPUOffloadOptimizer")
    assert (one.plan.offload, one.scenario.software.name) == ("optimizer", "torchtune")
    assert case(**cells, num_gpus=4, zero_stage=3).scenario.software.name != "torchtune"


def test_rowwise_scales_with_weight_gradients_in_16_bits() -> None:
    rows, kept = (
        case(framework="torchtitan, compile", precision="float8", notes=words).scenario.software.fp8
        for words in ("float8 rowwise", "recipe rowwise_with_gw_hp")
    )
    assert kept.matmul_share < rows.matmul_share
    assert kept.cast_bytes < rows.cast_bytes


@pytest.mark.parametrize("words", ["float8 (rowwise_with_gw_hp)", "fp8 rowwise_with_gw_hp"])
def test_a_recipe_in_the_cell_of_the_precision(words: str) -> None:
    found = case(framework="torchtitan, compile", precision=words).scenario
    assert found.workload.precision == "fp8"
    assert found.software.fp8.matmul_share == 0.72


@pytest.mark.parametrize(
    ("words", "millions"),
    [
        ("timm/vit_base_patch16_224.augreg_in21k", 86.0),
        ("vit_huge_patch14_224", 632.0),
        ("vit_giant_patch14_dinov2.lvd142m", 1136.0),
        ("vit_giant_patch14_224", 1013.0),
        ("ViT-g/14", 1013.0),
    ],
)
def test_timms_names_of_models(words: str, millions: float) -> None:
    model = case(framework="torchao", num_gpus=1, model=words, seq_len=257).scenario.model
    assert model.num_parameters == pytest.approx(millions * 1e6, rel=0.02)


def test_a_size_after_a_point_is_no_other_models() -> None:
    model = case(framework="Megatron-LM", model="GPT 3.35B").scenario.model
    assert model.num_parameters == pytest.approx(3.35e9, rel=0.1)


def test_underscores_in_names_of_precisions() -> None:
    assert case(framework="modalities", precision="BF_16").scenario.workload.precision == "bf16"
    cast = case(framework="modalities (FSDP1)", precision="BF_16 mixed precision").scenario
    assert not cast.software.precision.autocasts_weights


@pytest.mark.parametrize(
    ("cells", "casts"),
    [
        ({"precision": "fp16 (fp32 params)"}, True),
        ({"precision": "fp16", "notes": "fp32 weights"}, True),
        ({"precision": "fp16"}, True),
        ({"precision": "pure fp16"}, False),
        ({"optimizer": "AdamW, no fp32 weights"}, False),
        ({"precision": "fp8"}, False),
        ({"precision": "bf16", "framework": "PyTorch DDP"}, True),
        ({"precision": "bf16", "framework": "PyTorch DDP, torch.compile"}, False),
        ({"precision": "bf16", "framework": "HF Trainer"}, False),
        ({"precision": "fp16", "framework": "HF Trainer, DDP"}, True),
        ({"precision": "fp16", "framework": "HF Trainer", "peft": "lora r=8"}, False),
        ({"precision": "fp16", "framework": "HF Trainer", "notes": "fp16 weights"}, False),
        ({"precision": "fp16", "framework": "HF Trainer", "notes": "without AMP"}, False),
        ({"precision": "fp16", "framework": "HF Trainer, DeepSpeed"}, False),
        ({"precision": "bf16", "framework": "Modalities"}, False),
        ({"precision": "bf16", "tensor_parallel": 2}, False),
        ({"precision": "bf16", "zero_stage": 1}, False),
        ({"precision": "bf16", "peft": "lora r=8"}, False),
        ({"precision": "fp16", "notes": "fp32 weights", "framework": "PyTorch FSDP"}, False),
        ({"precision": "fp16 (fp32 params)", "framework": "DeepSpeed ZeRO-1"}, False),
    ],
)
def test_16_bits_over_whole_fp32_weights_are_autocast(cells: dict[str, Any], casts: bool) -> None:
    assert case(**cells).scenario.software.precision.autocasts_weights is casts


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Peak GPU Memory", "reserved"),
        ("memory(GiB)", "reserved"),
        ("max mem", "reserved"),
        ("peak VRAM (GB)", "allocated"),
        ("GPU memory usage", "device"),
        ("24 G of VRAM", "device"),
        ("显存占用", "device"),
        ("peak memory, GPU memory usage", "reserved"),
    ],
)
def test_a_peak_of_a_kind_that_is_not_said_is_the_usual_one(words: str, kind: str) -> None:
    row = Row(line=2, peak_memory_gib=20.0, memory_definition=words, **CELLS)
    found = measured_memory(row)
    assert found is not None
    assert (found.kind, found.is_stated) == (kind, False)
    assert "which kind is not said" in "; ".join(case_of(row).defaults)
    stated = measured_memory(Row(peak_memory_gib=20.0, memory_definition="peak memory allocated"))
    assert stated is not None
    assert (stated.kind, stated.is_stated) == ("allocated", True)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen1half-7b-chat", 7.72),
        ("Qwen-7B-Chat-Int4", 7.72),
        ("qwen2_5-7b-instruct", 7.62),
        ("llama2_70b", 68.98),
        ("aquila2-7b", 7.3),
        ("GPT-2 345M", 0.36),
        ("mistral-7b-instruct-v2", 7.24),
        ("gpt3_13B", 12.86),
        ("gpt3_6.7B", 6.66),
        ("gpt3", 174.62),
        ("chatglm_6b", 6.18),
        ("internlm3-8b-instruct", 8.8),
        ("Qwen-1_8B", 1.84),
        ("Qwen1.5-110B", 111.21),
        ("qwen1.5_MoE", 14.32),
        ("llama4-16e", 107.77),
        ("kimi-1T", 1026.4),
        ("tr11-176B", 176.25),
        ("megatron-22b", 22.07),
        ("QwQ-32B", 32.76),
    ],
)
def test_names_of_models(name: str, billions: float) -> None:
    parameters = case(model=name).scenario.model.num_parameters
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (
            {"framework": "torchao sparsity", "peft": "lora + pruning"},
            ["framework: sparsity", "peft: pruning"],
        ),
        ({"framework": "torchao, MLPerf, FlagPerf, TE"}, []),
    ],
)
def test_what_changes_a_price_but_is_not_known_is_reported(
    cells: dict[str, Any], words: list[str]
) -> None:
    assert not_understood(Row(**cells)) == words


@pytest.mark.parametrize(
    ("words", "share"),
    [
        ("own loop, plain PyTorch", 0.9),
        ("plain JAX (flax nnx)", 0.9),
        ("MaxText (JAX/XLA)", 1.0),
        ("HF Trainer", 1.0),
        ("own loop, torch.compile", 1.0),
    ],
)
def test_loops_that_nobody_described_reach_a_share_of_the_rates(words: str, share: float) -> None:
    assert case(framework=words).scenario.software.kernels.rate_share == share


@pytest.mark.parametrize(
    ("framework", "notes", "profile"),
    [
        ("mini-megatron (plain PyTorch 2.10)", None, "torch-trainer"),
        ("nano-megatron", None, "torch-trainer"),
        ("Megatron-LM", None, "megatron"),
        ("own loop, eager", "torch.compile fell back to eager", "torch-trainer"),
        ("own loop", "torch.compile", "torch-compile"),
    ],
)
def test_names_that_say_less_than_they_seem(
    framework: str, notes: str | None, profile: str
) -> None:
    found = case(framework=framework, notes=notes)
    assert found.scenario.software.name.startswith(profile)


def test_flash_attention_of_axolotl_knows_windows() -> None:
    for flag, masked in (("1", False), (None, True)):
        found = case(framework="Axolotl (FSDP1)", flash_attention=flag).scenario.software
        assert found.activations.window_needs_mask is masked


@pytest.mark.parametrize(
    ("framework", "gpu", "precision"),
    [
        ("Levanter (JAX)", "A100-SXM-80GB", "tf32"),
        ("Levanter (JAX)", "V100-SXM2-32GB", "fp32"),
        ("Megatron-LM (TransformerEngine, all fusions)", "GH200-96GB", "tf32"),
        ("NeMo 2.0", "A100-SXM-80GB", "tf32"),
        ("NeMo 2.0", "V100-SXM2-32GB", "fp32"),
        ("Megatron-LM (2022, v2.x)", "V100-SXM2-32GB", "fp32"),
        ("own loop, plain PyTorch", "A100-SXM-80GB", "fp32"),
    ],
)
def test_who_multiplies_fp32_in_tf32(framework: str, gpu: str, precision: str) -> None:
    found = case(framework=framework, gpu=gpu, precision="fp32").scenario.workload
    assert found.precision == precision


CASTS = {
    "hf-trainer+autocast": {"master_weights": True},
    "hf-trainer+compiled-model+compiled-autocast": {"master_weights": True, "notes": "compiled"},
    "hf-trainer-liger+liger-layers+liger-autocast": {"master_weights": True, "notes": "Liger"},
    "hf-trainer+compiled-model": {"notes": "torch.compile"},
    "hf-trainer+compiled-layers+fsdp2": {"notes": "torch.compile, FSDP2", "zero_stage": 3},
    "hf-trainer+fp32-adapters": {"peft": "lora r=16 all linear", "notes": "no autocast"},
    "hf-trainer+deepspeed-zero3": {"framework": "HF Trainer, DeepSpeed ZeRO-3"},
    "hf-trainer": {"master_weights": False},
}


@pytest.mark.parametrize("software", CASTS)
def test_what_casts_the_weights_of_hugging_face(software: str) -> None:
    stated = {"framework": "Hugging Face Trainer", "precision": "bf16", "peft": "none"}
    if "zero3" in software:
        stated |= {"zero_stage": 3, "master_weights": True}  # DeepSpeed casts them
    found = case(**{**stated, **CASTS[software]}).scenario.software
    assert found.name == software


@pytest.mark.parametrize(
    ("words", "kept"),
    [("use_cache=True", True), ("kept its key-value cache", True), ("use_cache=False", False)],
)
def test_models_that_return_keys_and_values(words: str, kept: bool) -> None:
    found = case(framework="HF Trainer, FSDP", zero_stage=3, num_gpus=8, notes=words)
    assert found.scenario.software.activations.keeps_cache == kept


@pytest.mark.parametrize("words", ["fused cross-entropy of tokamax", "tokamax loss"])
def test_tokamax_keeps_no_logits(words: str) -> None:
    found = case(framework="MaxText", gpu="TPU-v6e", notes=words)
    assert found.scenario.software.loss.chunks_logits
    assert found.scenario.software.loss.chunk_tokens == 128.0


@pytest.mark.parametrize(("when", "copies"), [("March 2024", 3.0), ("July 2024", 2.0)])
def test_torchtitan_dropped_its_logits_late_until_june_2024(when: str, copies: float) -> None:
    found = case(framework=f"torchtitan ({when}, FSDP2)")
    assert found.scenario.software.loss.fp32_logits_copies == copies


@pytest.mark.parametrize(("framework", "stage"), [("Megatron Core", 1), ("Megatron-LM 2021", 0)])
def test_the_distributed_optimizer_is_usual_since_megatron_core(framework: str, stage: int) -> None:
    assert case(framework=framework, num_gpus=8).plan.zero_stage == stage


def engines_of(**cells: Any) -> set[str]:
    return set(case(**cells).scenario.software.name.split("+"))


@pytest.mark.parametrize(
    ("cells", "expected", "absent"),
    [
        # fp16 needs DeepSpeed on one card, bf16 does not
        ({"peft": "Q-LoRA", "num_gpus": 1}, "deepspeed-zero2 deepspeed-two-buckets", "fsdp1"),
        ({"peft": "q_lora (int4)", "num_gpus": 1}, "gptq-operators adamw-fused", ""),
        ({"peft": "LoRA", "num_gpus": 1}, "hf-trainer", "deepspeed-zero2 adamw-fused"),
        ({"peft": "LoRA", "num_gpus": 8}, "deepspeed-zero2 deepspeed-two-buckets", ""),
        ({"peft": "full"}, "deepspeed-zero3 deepspeed-auto-buckets", ""),
        ({"peft": "full", "zero_stage": 2}, "deepspeed-zero2 deepspeed-two-buckets", ""),
        ({"peft": "full", "notes": "zero2"}, "deepspeed-zero2 deepspeed-two-buckets", ""),
        (
            {"framework": "Qwen1.5 finetune.py", "peft": "Q-LoRA"},
            "deepspeed-zero2",
            "gptq-operators",
        ),
    ],
)
def test_qwens_scripts(cells: dict[str, Any], expected: str, absent: str) -> None:
    found = engines_of(**{"framework": "Qwen finetune.py", "model": "Qwen-7B-Chat", **cells})
    assert set(expected.split()) <= found
    assert not found & set(absent.split())


@pytest.mark.parametrize(
    ("framework", "model", "peft", "num_gpus", "copies"),
    [
        ("Qwen finetune.py", "Qwen-7B", "full", 2, 0.0),
        ("Qwen finetune.py", "Qwen-7B-Chat-Int4", "Q-LoRA", 1, 0.0),
        ("Qwen finetune.py", "Qwen-7B", "LoRA", 1, 3.0),  # autocast computes the loss in fp32
        ("Qwen1.5 finetune.py", "Qwen1.5-7B", "full", 2, 3.0),
    ],
)
def test_the_logits_of_qwens_first_release_stay_in_16_bits(
    framework: str, model: str, peft: str, num_gpus: int, copies: float
) -> None:
    found = case(framework=framework, model=model, peft=peft, num_gpus=num_gpus)
    assert found.scenario.software.loss.fp32_logits_copies == copies


@pytest.mark.parametrize("words", ["Qwen1.5", "QwenLM/Qwen1.5", "Qwen2.5 finetune.py"])
def test_the_script_of_qwens_later_releases(words: str) -> None:
    workload = case(framework=words, model="Qwen1.5-7B", peft="Q-LoRA").scenario.workload
    assert (workload.adapter_rank, workload.adapter_targets) == (64, "all")
    assert workload.quantisation == "nf4_double"


@pytest.mark.parametrize(
    ("cells", "whole"),
    [
        ({"framework": "fsdp_qlora"}, False),
        ({"framework": "fsdp_qlora", "notes": "reentrant_checkpointing true"}, True),
        ({"framework": "fsdp_qlora", "recompute": "re-entrant"}, True),
        ({"framework": "HF Trainer"}, True),
        ({"framework": "HF Trainer", "recompute": "full, use_reentrant=False"}, False),
        ({"framework": "HF Trainer", "recompute": "use_reentrant=False"}, False),
        ({"framework": "TRL", "recompute": "non-reentrant"}, False),
        ({"framework": "HF Trainer (2026)"}, False),
        ({"framework": "own loop over HF transformers 4.51 (2026)"}, True),
        ({"framework": "HF Trainer, transformers 5.1"}, False),
        ({"framework": "TRL 0.27.2"}, False),
        ({"framework": "TRL 0.26"}, True),
        ({"framework": "LLaMA-Factory (2026)"}, True),
        ({"framework": "axolotl, transformers 5.1"}, True),
        ({"framework": "Unsloth (2026)"}, True),
        ({"framework": "ms-swift (2026)"}, True),
        ({"framework": "ms-swift, DDP"}, False),
        ({"framework": "llama-recipes"}, False),
    ],
)
def test_what_checkpoints_compute_again(cells: dict[str, Any], whole: bool) -> None:
    found = case(peft="qlora", **cells)
    assert found.plan.recompute == "full"  # the usual one of quantised bases
    assert found.scenario.software.kernels.recomputes_whole_layers == whole
    assert not not_understood(found.row)


@pytest.mark.parametrize(
    ("peft", "quantisation", "scales", "layers"),
    [
        ("qlora", "nf4_double", True, 2.0),
        ("custom_qlora", "nf4_double", True, 1.0),
        ("bnb_dora", "nf4_double", True, 1.0),
        ("hqq_lora", "nf4_double", False, 1.0),
        ("HQQ DoRA r=64", "nf4_double", False, 1.0),
        ("QDoRA", "nf4_double", True, 1.0),
        ("qlora nf4", "nf4_double", True, 2.0),
    ],
)
def test_train_types_of_fsdp_qlora(
    peft: str, quantisation: str, scales: bool, layers: float
) -> None:
    found = case(framework="fsdp_qlora", peft=peft)
    workload, software = found.scenario.workload, found.scenario.software
    assert (workload.adapter, workload.quantisation) == ("qlora", quantisation)
    assert software.frozen.whole_scales == scales
    assert software.sharding.gathered_layers == layers


def test_loop_of_fsdp_qlora_holds_logits_and_clips_nothing() -> None:
    software = case(framework="fsdp_qlora", peft="qlora").scenario.software
    assert software.loss.fp32_logits_copies == 3.0
    assert software.loss.logits_gradient_copies == 2.0
    assert software.optimizer.gradient_accesses == 1.0
    clips = case(framework="fsdp_qlora", peft="qlora", notes="apply_gradient_clipping true")
    assert clips.scenario.software.optimizer.gradient_accesses > 1.0


@pytest.mark.parametrize(
    ("precision", "single"),
    [("bf16", False), ("bf16_autocast", True), ("bf16_buffers_autocast", False)],
)
def test_precisions_of_fsdp_qlora(precision: str, single: bool) -> None:
    software = case(framework="fsdp_qlora", peft="qlora", precision=precision).scenario.software
    assert software.frozen.unquantised_in_fp32 == single
    assert software.precision.fp32_hidden_states == single
    software = case(framework="fsdp_qlora", peft="lora", precision=precision).scenario.software
    assert software.frozen.in_fp32 == single


@pytest.mark.parametrize(
    ("column", "words", "offload"),
    [
        ("offload", "use_activation_cpu_offload false", "none"),
        ("offload", "use_activation_cpu_offload", "activations"),
        ("notes", "use_activation_cpu_offload true, use_cpu_offload false", "activations"),
        ("notes", "use_activation_cpu_offload true, use_cpu_offload true", "weights+activations"),
        ("notes", "use_activation_cpu_offload false, use_cpu_offload true", "weights"),
    ],
)
def test_offload_of_fsdp_qlora(column: str, words: str, offload: str) -> None:
    found = case(framework="fsdp_qlora", peft="qlora", **{column: words})
    assert found.plan.offload == offload


@pytest.mark.parametrize(
    ("framework", "peft", "rest"),
    [
        ("ms-swift", "qlora", ("nf4_double", "all")),
        ("ms-swift 3.5", "lora bnb 4bit", ("nf4_double", "all")),
        ("swift", "lora, hqq", ("nf4", "all")),
        ("swift", "lora, gptq-int4", ("int4", "all")),
        ("swift", "lora, bnb 8bit", ("int8", "all")),
        ("swift (April 2024)", "qlora", ("nf4_double", "q,k,v")),
    ],
)
def test_quantised_bases_of_swift(framework: str, peft: str, rest: tuple[str, str]) -> None:
    workload = case(framework=framework, peft=peft).scenario.workload
    assert (workload.quantisation, workload.adapter_targets) == rest


def test_gptq_is_unpacked_by_operators() -> None:
    assert "gptq-operators" in engines_of(framework="ms-swift", peft="lora, GPTQ int4")
    assert "gptq-operators" not in engines_of(framework="ms-swift", peft="lora, bnb 4bit")


def test_flagperfs_paddle() -> None:
    found = case(framework="FlagPerf (Paddle)", model="gpt3-6.7b", precision="fp16", num_gpus=8)
    assert found.plan.zero_stage == 2
    assert found.scenario.workload.attention_kernel == "flash"  # use_flash_attention = 1


def test_paddles_tensor_parallelism_has_layers_of_its_own() -> None:
    found = case(framework="PaddleNLP", tensor_parallel=2, notes="schedule ZBH1")
    assert found.scenario.software.host.dtensor_operators_forward == 0.0
    assert not found.plan.sequence_parallel
    piped = case(framework="PaddleNLP", pipeline_parallel=2, notes="schedule ZBH1")
    assert piped.plan.pipeline_schedule == "zero_bubble"


def test_flagperfs_megatron_overlaps_nothing() -> None:
    overlap = case(framework="FlagPerf Megatron").scenario.software.overlap
    assert not overlap.chunked_tensor_traffic
    assert not overlap.data_parallel
    assert not overlap.weight_gathers


@pytest.mark.parametrize(("switch", "setting"), [("true", "full"), ("false", "none")])
def test_nanotrons_switch_of_recomputation(switch: str, setting: str) -> None:
    found = case(framework="nanotron", notes=f"recompute_layer={switch}")
    assert found.plan.recompute == setting


@pytest.mark.parametrize(
    "words", ["TRL 0.9, DeepSpeed ZeRO-2", "qlora.py, zero2", "TRL, deepspeed"]
)
def test_deepspeed_casts_back_what_peft_prepared(words: str) -> None:
    assert "kbit-preparation" not in engines_of(framework=words, peft="qlora")
    assert "kbit-preparation" in engines_of(framework="TRL 0.9", peft="qlora", num_gpus=1)


@pytest.mark.parametrize(
    ("framework", "notes", "method"),
    [
        ("ms-swift 3.7", None, "ulysses"),
        ("ms-swift 3.9", "ring attention", "ring"),
        ("xtuner", "sequence parallel", "ulysses"),
        ("verl SFT", None, "ulysses"),
        ("OpenRLHF", None, "ring"),
    ],
)
def test_how_trainers_share_a_sequence(framework: str, notes: str | None, method: str) -> None:
    found = case(framework=framework, notes=notes, context_parallel=4, zero_stage=3)
    assert found.plan.context_parallel_method == method


@pytest.mark.parametrize(
    ("cells", "profile"),
    [
        ({"zero_stage": 3}, {"hf-trainer", "deepspeed-zero3"}),
        ({"zero_stage": 2}, {"hf-trainer", "deepspeed-zero2"}),
        ({"framework": "FlagPerf, Paddle", "zero_stage": 3}, {"torch-trainer"}),
    ],
)
def test_stages_of_flagperf(cells: dict[str, Any], profile: set[str]) -> None:
    assert engines_of(**{"framework": "FlagPerf", **cells}) == profile


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("sft_type=lora lora_target_modules=ALL", ("lora", "all")),
        ("train_type lora, quant_bits 4, bnb", ("qlora", "all")),
        ("lora, quantization_bit=4", ("qlora", "all")),
        ("lora (rank 8; QKV)", ("lora", "q,k,v")),
    ],
)
def test_names_of_swifts_arguments(words: str, found: tuple[str, str]) -> None:
    read = case(framework="ms-swift", peft=words)
    workload = read.scenario.workload
    assert (workload.adapter, workload.adapter_targets) == found
    assert not not_understood(read.row)


@pytest.mark.parametrize(
    ("framework", "expected", "absent"),
    [
        ("swift 2.6, zero2", "deepspeed-two-buckets adamw-fused", "deepspeed-one-bucket"),
        ("ms-swift, zero2", "deepspeed-two-buckets", "adamw-fused"),
        ("ms-swift 3.8, zero2", "deepspeed-one-bucket", "adamw-fused"),
    ],
)
def test_swifts_configurations_of_deepspeed(framework: str, expected: str, absent: str) -> None:
    found = engines_of(framework=framework, peft="full")
    assert set(expected.split()) <= found
    assert not found & set(absent.split())


@pytest.mark.parametrize(
    ("words", "quantisation"),
    [
        ("int4 (GPTQ)", "int4"),
        ("bnb-nf4-dq", "nf4_double"),
        ("qlora_nf4_dq", "nf4_double"),
        ("QLoRA w/ double quant", "nf4_double"),
        ("4-bit", "nf4"),
    ],
)
def test_a_quantised_base_has_adapters(words: str, quantisation: str) -> None:
    read = case(framework="HF Trainer", peft=words)
    workload = read.scenario.workload
    assert (workload.adapter, workload.quantisation) == ("qlora", quantisation)
    assert not not_understood(read.row)


def test_qwens_script_with_bitsandbytes() -> None:
    cells = {"framework": "Qwen finetune.py", "peft": "QLoRA (nf4, dq)", "num_gpus": 1}
    assert "gptq-operators" not in engines_of(**cells)
    assert case(**cells).scenario.workload.quantisation == "nf4_double"


@pytest.mark.parametrize(
    ("framework", "kernel"),
    [("Megatron-LM v1.1.5", "eager"), ("TRL v1.0", "flash"), ("torchtitan v1.0", "flash")],
)
def test_a_first_release_is_no_megatron_of_2020(framework: str, kernel: str) -> None:
    assert case(framework=framework).scenario.workload.attention_kernel == kernel


@pytest.mark.parametrize(
    ("notes", "layers"),
    [
        ("recompute_method block, recompute_num_layers 2", 2),
        ("block-wise scaling, recompute_num_layers 2", 0),
        ("FP8 block scaling, recompute_num_layers 2", 0),
    ],
)
def test_blocks_of_scales_are_no_recomputed_layers(notes: str, layers: int) -> None:
    found = case(framework="Megatron-LM", recompute="full", notes=notes)
    assert (found.plan.recompute, found.plan.recompute_layers) == ("full", layers)


@pytest.mark.parametrize(
    ("cells", "reads"),
    [
        ({"framework": "PyTorch FSDP2", "notes": "max_grad_norm=0.0"}, 1.0),
        ({"framework": "MindFormers", "notes": "max_grad_norm=0.0"}, 4.0),
    ],
)
def test_a_norm_of_zero_clips_nothing(cells: dict[str, Any], reads: float) -> None:
    assert case(**cells).scenario.software.optimizer.gradient_accesses == reads


@pytest.mark.parametrize(
    ("words", "precision"),
    [("grad_reduce_in_bf16=false", "fp32"), ("grad_reduce_in_bf16=true", "bf16")],
)
def test_switch_of_the_precision_of_megatrons_gradients(words: str, precision: str) -> None:
    found = case(framework="Megatron Bridge", notes=words).scenario
    assert found.workload.gradient_precision == precision


def test_phrases_that_shorter_ones_would_hide() -> None:
    assert "fp32 reductions" in vocabulary().read("notes", "all-reduce in fp32").terms
    assert "not equal batches" in vocabulary().read("notes", "w/out packing").terms


@pytest.mark.parametrize(
    ("words", "rank"), [("LoRA dim 8", 8), ("LoRA, hidden_dim=4096, r=16", 16)]
)
def test_a_rank_counts_before_another_size(words: str, rank: int) -> None:
    assert case(peft=words).scenario.workload.adapter_rank == rank


def test_the_name_of_a_schedule_is_no_number_of_stages() -> None:
    found = case(pipeline_parallel=4, notes="interleaved pipeline 1F1B")
    assert found.plan.virtual_stages == 1
    assert not any("as the notes say" in text for text in found.defaults)


SCALE = {"model": "llama-3-70b", "gpu": "H100", "num_gpus": 256, "framework": "Megatron Core"}
WORDS_OF_SCALE = [
    ({"notes": "ZeRO-1 + TP8, PP=4, CP 2; MBS 1 GBS 1536"}, (8, 4, 2, 1, 1536)),
    ({"framework": "Megatron-LM (TP4/PP8)", "notes": "vpp5"}, (4, 8, 1, 1, 64)),
    (
        {
            "notes": "tensor_model_parallel_size=4, pipeline_model_parallel_size=8, "
            "virtual_pipeline_model_parallel_size=5, micro_batch_size=2, global_batch_size=128"
        },
        (4, 8, 1, 2, 128),
    ),
    ({"notes": "8-way tensor, 4-way pipeline parallelism, SP=1"}, (8, 4, 1, 1, 32)),
    ({"notes": "TP8, SP8", "micro_batch_size": 1}, (8, 1, 1, 1, 32)),  # Megatron's, of those ranks
    ({"framework": "DeepSpeed", "notes": "Ulysses sp=8, mbs 1"}, (1, 1, 8, 1, 32)),
    (
        {"framework": "InternEvo", "notes": "tensor parallel size 8, fsp, mbs 1"},
        (8, 1, 1, 1, 32),
    ),
    ({"notes": "TP2 was slower than TP4", "micro_batch_size": 1}, (1, 1, 1, 1, 256)),
    ({"tensor_parallel": 2, "notes": "TP8", "micro_batch_size": 1}, (2, 1, 1, 1, 128)),
]


@pytest.mark.parametrize(("cells", "expected"), WORDS_OF_SCALE)
def test_ranks_and_batches_in_words_fill_empty_cells(
    cells: dict[str, Any], expected: tuple[int, ...]
) -> None:
    found = case(**{**SCALE, **cells})
    plan = found.plan
    ranks = (plan.tensor_parallel, plan.pipeline_parallel, plan.context_parallel)
    batch = (plan.micro_batch_size, found.scenario.workload.global_batch_size)
    assert ranks + batch == expected
    assert not [words for words in not_understood(found.row) if words.startswith("notes")]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"recompute": "sel. recompute"}, {"recompute": "selective"}),
        ({"notes": "full uniform 1 layer"}, {"recompute": "full"}),
        ({"framework": "JAX", "recompute": "nothing_saveable"}, {"recompute": "full"}),
        ({"framework": "JAX", "recompute": "dots_saveable"}, {"recompute": "selective_ops"}),
        ({"framework": "NeMo", "notes": "ACL=21"}, {"recompute_layers": 0}),
        ({"framework": "NeMo", "notes": "full recompute, ACL=21"}, {"recompute_layers": 21}),
        ({"framework": "Megatron-DeepSpeed", "notes": "TP8, SP on"}, {"sequence_parallel": True}),
        ({"framework": "Megatron-LM", "notes": "TP8, SP off"}, {"sequence_parallel": False}),
        ({"framework": "modalities", "notes": "hsdp 4x64"}, {"dp_replicate": 4}),
        ({"framework": "modalities", "notes": "hsdp 8x32"}, {"dp_replicate": 32}),  # of a node
        ({"framework": "modalities", "notes": "HSDP, dp_shard=16"}, {"dp_replicate": 16}),
        ({"framework": "MaxText", "notes": "ici"}, {"zero_stage": 3, "recompute": "full"}),
        ({"framework": "MaxText", "global_batch_size": 4096}, {"micro_batch_size": 16}),
        ({"framework": "Primus (Megatron)", "notes": "use_torch_fsdp2"}, {"zero_stage": 3}),
        ({"framework": "Megatron-LM", "precision": "fp8"}, {"zero_stage": 1}),
        ({"framework": "Megatron-LM (ROCm fork)"}, {"zero_stage": 1}),
    ],
)
def test_plans_of_pretraining_in_words(cells: dict[str, Any], expected: dict[str, Any]) -> None:
    plan = case(**{**SCALE, **cells}).plan
    assert {name: getattr(plan, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("cells", "profile"),
    [
        ({"framework": "MLPerf Training 3.1", "model": "BERT-large", "seq_len": 512}, "apex-bert"),
        ({"framework": "MLPerf 5.0, Google", "gpu": "TPU v6e-256"}, "xla"),
        ({"framework": "T5X", "model": "PaLM 8B", "gpu": "TPU v4"}, "xla"),
        ({"framework": "Megatron-LM", "precision": "fp8 te hybrid"}, "nemo"),
        ({"framework": "Megatron-LM on ROCm"}, "nemo"),
        (
            {"framework": "modalities", "notes": "FSDP2, fused AdamW"},
            "torch-trainer+fsdp2+adamw-fused",
        ),
    ],
)
def test_profiles_of_pretraining(cells: dict[str, Any], profile: str) -> None:
    assert case(**{**SCALE, **cells}).scenario.software.name == profile


def test_a_precision_alone_between_commas_is_that_of_the_run() -> None:
    assert case(notes="mbs 4; fp16; ds zero 1").scenario.workload.precision == "fp16"
    assert case(notes="bf16 main gradients, fp16 of 2023").scenario.workload.precision == "bf16"
    single = {"framework": "PyTorch DDP", "precision": None}
    assert case(notes="bs=32; fp32; 1x8", **single).scenario.workload.precision == "fp32"
    assert case(notes="bs 1, TF32", **single).scenario.workload.precision == "tf32"
    for words in ("bf16; fp32", "fp32 optimizer states", "fp32, fp32 gradients"):
        assert case(notes=words, **single).scenario.workload.precision == "bf16"


@pytest.mark.parametrize(
    ("cells", "setting"),
    [
        ({"framework": "Megatron-LM"}, "selective"),
        ({"framework": "Megatron-Core 0.7"}, "selective"),
        ({"framework": "Megatron-LM", "recompute": "full"}, "full"),
        ({"framework": "PyTorch FSDP2"}, "full"),
    ],
)
def test_megatrons_flag_recomputes_attention_alone(cells: dict[str, Any], setting: str) -> None:
    found = case(notes="--recompute-activations", **{"recompute": None, **cells})
    assert found.plan.recompute == setting


@pytest.mark.parametrize(
    ("model", "layers"),
    [("llama-3-70b (12 layers)", 12), ("llama3_70b_l12", 12), ("PaLM 540B", 118)],
)
def test_names_of_models_in_scaling_studies(model: str, layers: int) -> None:
    assert case(model=model, gpu="B200", num_gpus=512).scenario.model.num_layers == layers


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("SFT", ("none", "lora")),
        ("全量微调", ("none", "lora")),
        ("r=8, alpha=32", ("lora", "lora")),
        ("SFT, rank 8", ("lora", "lora")),
        ("use_dora=true", ("lora", "dora")),
        ("LoRA SFT", ("lora", "lora")),
    ],
)
def test_adapters_by_their_rank_or_switch(words: str, expected: tuple[str, str]) -> None:
    found = case(framework="LLaMA-Factory", peft=words)
    workload = found.scenario.workload
    assert (workload.adapter, workload.adapter_method) == expected
    assert not not_understood(found.row)


def test_prompts_are_priced_as_adapters_whatever_their_base() -> None:
    bases = {"P-Tuning v2": "lora", "P-Tuning v2, quantization_bit=4": "qlora"}
    for words, adapter in (bases | {"prefix tuning, int4": "qlora"}).items():
        found = case(framework="LLaMA-Factory", peft=words)
        assert found.scenario.workload.adapter == adapter
        assert f"{words}: priced as LoRA, which it is kin to" in found.defaults


def test_switches_of_llama_factory_stand_in_notes_or_adapters() -> None:
    for cells in ({"peft": "use_galore=true"}, {"notes": "use_galore=true, galore_rank=64"}):
        found = case(framework="LLaMA-Factory", optimizer="adamw_torch", **cells)
        assert found.scenario.workload.optimizer == "galore_adamw"
        assert found.scenario.workload.adapter == "none"
    dora = case(framework="LLaMA-Factory", peft="lora", notes="use_dora=true, quantization_bit=4")
    workload = dora.scenario.workload
    assert (workload.adapter, workload.adapter_method) == ("qlora", "dora")
    assert not not_understood(dora.row)


def test_a_recipe_of_8_bits_in_notes_counts_beside_bf16() -> None:
    for notes in ("fp8_recipe=blockwise", "FP8 hybrid", "--fp8-format hybrid"):
        found = case(framework="Megatron-Core", precision="bf16", notes=notes)
        assert found.scenario.workload.precision == "fp8"
    for notes in ("no fp8 hybrid", "fp8 act", "fp8 dispatch"):
        found = case(framework="Megatron-Core", precision="bf16", notes=notes)
        assert found.scenario.workload.precision == "bf16"


def test_words_of_traffic_belong_to_a_trainers_switch() -> None:
    cells = {"framework": "nanotron", "tensor_parallel": 4}
    assert case(**cells, notes="gradients by all-reduce").plan.sequence_parallel
    assert not case(**cells, notes="tp_mode: ALL_REDUCE").plan.sequence_parallel
    plain = case(tensor_parallel=4, framework="PyTorch FSDP").scenario.software
    asynchronous = case(tensor_parallel=4, framework="PyTorch FSDP", notes="async communication")
    assert asynchronous.scenario.software == plain


def test_the_rank_of_adapters_may_stand_in_notes() -> None:
    for notes in ("lora_r: 32, sample_packing", "--lora_rank 32", "LoRA r=32"):
        found = case(framework="Axolotl", peft="qlora", notes=notes)
        assert found.scenario.workload.adapter_rank == 32


@pytest.mark.parametrize(
    ("cells", "model", "profile"),
    [
        ({"framework": "MLPerf v3.1", "model": "bert"}, "bert-large", "apex-bert"),
        ({"framework": "MLPerf", "model": "BERT pretraining"}, "bert-large", "apex-bert"),
        ({"framework": "MLPerf", "model": "bert", "gpu": "TPU v4"}, "bert-large", "xla"),
        ({"framework": "FlagPerf", "model": "bert-pytorch"}, "bert-large", "apex-bert"),
        ({"framework": "FlagPerf", "model": "bert_hf"}, "bert_hf", "torch-trainer"),
        ({"framework": "FlagPerf", "model": "gpt2", "seq_len": 1024}, "gpt2-medium", "megatron"),
        (
            {"framework": "FlagPerf", "model": "aquila2_7B_container"},
            "aquila2_7B",
            "megatron+unfused-swiglu",
        ),
        (
            {"framework": "FlagPerf", "model": "llama2_7b-megatron-deepspeed", "precision": "bf16"},
            "llama2_7b",
            "megatron+deepspeed-zero1+unfused-swiglu",
        ),
        (
            {"framework": "FlagPerf", "model": "llama2_7b-deepspeed"},
            "llama2_7b",
            "hf-trainer+deepspeed-zero3+adamw-fused",
        ),
        (
            {"framework": "FlagPerf", "model": "llama3_8B", "tensor_parallel": 4},
            "llama3_8B",
            "nemo",
        ),
    ],
)
def test_suites_name_a_case(cells: dict[str, Any], model: str, profile: str) -> None:
    found = case(**{"gpu": "A100-80GB", "num_gpus": 8, "seq_len": 512, **cells})
    assert (found.row.model, found.scenario.software.name) == (model, profile)


@pytest.mark.parametrize(
    ("cells", "micro", "batch"),
    [
        ({"micro_batch_size": 56, "global_batch_size": 448, "notes": "unpad"}, 28, 224),
        ({"micro_batch_size": 48, "global_batch_size": 768, "notes": "packed samples"}, 48, 384),
        ({"micro_batch_size": 48, "global_batch_size": 384, "notes": "packed samples"}, 48, 384),
        ({"micro_batch_size": 48, "notes": "packed samples"}, 48, 384),
        ({"global_batch_size": 448}, None, 224),
        ({"micro_batch_size": 28, "gpu": "TPU v4"}, 28, 224),
        ({"micro_batch_size": 28, "document_length": 300}, 28, 224),
    ],
)
def test_padding_that_mlperfs_bert_leaves_out(
    cells: dict[str, Any], micro: int | None, batch: int
) -> None:
    usual = {"framework": "MLPerf", "model": "bert", "gpu": "H100", "num_gpus": 8, "seq_len": 512}
    found = case(**usual | cells)
    workload, plan = found.scenario.workload, found.plan
    assert workload.global_batch_size == batch
    assert micro in (None, plan.micro_batch_size)
    packed = "gpu" not in cells and "document_length" not in cells
    assert (workload.document_length == 252) == packed
    assert found.scenario.software.loss.predicted_share == 0.15


def test_settings_of_flagperfs_own_cases() -> None:
    glm, chatglm, baichuan = (
        case(framework=framework, model=name, gpu="A100-40GB", num_gpus=8, seq_len=512)
        for framework, name in (
            ("FlagPerf", "glm"),
            ("FlagPerf deepspeed", "chatglm3_6b"),
            ("FlagPerf deepspeed", "baichuan2_13b"),
        )
    )
    assert (glm.plan.recompute, glm.scenario.workload.attention_kernel) == ("full", "eager")
    assert (chatglm.plan.recompute, chatglm.scenario.workload.attention_kernel) == ("none", "flash")
    assert (chatglm.plan.zero_stage, baichuan.plan.zero_stage) == (3, 1)


def test_a_models_name_says_that_adapters_are_trained() -> None:
    assert (
        case(framework="MLPerf v4.1", model="llama2_70b_lora").scenario.workload.adapter == "lora"
    )
    assert case(model="llama-2-7b").scenario.workload.adapter == "none"


@pytest.mark.parametrize(
    ("notes", "plan"),
    [
        ("DGXB200_1x8x1xtp4pp1cp2", {"tensor_parallel": 4, "context_parallel": 2}),
        ("TP4PP2", {"tensor_parallel": 4, "pipeline_parallel": 2}),
        ("TP2PP1SH2SP4", {"tensor_parallel": 2, "zero_stage": 2, "context_parallel": 1}),
    ],
)
def test_counts_without_spaces_between(notes: str, plan: dict[str, int]) -> None:
    found = case(framework="Megatron-LM", num_gpus=8, notes=notes).plan
    assert {name: getattr(found, name) for name in plan} == plan


def test_ranks_of_a_batch_with_fewer_sequences_than_accelerators() -> None:
    pax = {"framework": "PaxML", "model": "gpt3-175b", "gpu": "TPU v5e", "seq_len": 2048}
    found = case(**pax, num_gpus=4096, global_batch_size=1024)
    assert (found.plan.tensor_parallel, found.plan.data_parallel) == (4, 1024)
    with pytest.raises(Unpriceable, match="not near a multiple"):
        case(**pax, num_gpus=4096, global_batch_size=64)  # 64 ranks of one sequence


def test_mlperfs_attention_on_amd_cards_is_of_16_bits() -> None:
    cells = {"framework": "MLPerf v5.1", "model": "llama2_70b_lora", "precision": "fp8"}
    assert case(**cells, gpu="MI325X").scenario.software.fp8.attention_rate == 1.0
    assert case(**cells, gpu="H100").scenario.software.fp8.attention_rate > 1.0


@pytest.mark.parametrize("framework", ["MLPerf v4.0 (Intel)", "MLPerf, optimum-habana"])
def test_gaudis_adapters_are_trained_by_hugging_faces_modules(framework: str) -> None:
    found = case(framework=framework, model="llama2_70b_lora", gpu="Gaudi2", precision="fp8")
    workload = found.scenario.workload
    assert found.scenario.software.name == "hf-trainer+deepspeed-zero3"
    assert (found.plan.zero_stage, found.plan.recompute) == (3, "full")
    assert (workload.adapter_rank, workload.adapter_targets) == (16, "q,k,v,o")


def test_losses_and_buckets_of_megatron_deepspeed_in_16_bits() -> None:
    cells = {"framework": "Megatron-DeepSpeed", "zero_stage": 1}
    half, brain = (case(**cells, precision=one) for one in ("fp16", "bf16"))
    assert half.scenario.software.loss == brain.scenario.software.loss
    assert half.scenario.software.memory.buffer_bytes == 2e9
    assert brain.scenario.software.memory.buffer_bytes == 0.0  # BF16_Optimizer has none


@pytest.mark.parametrize(
    ("framework", "notes", "adapter", "rank", "method"),
    [
        ("fsdp_qlora", "--train_type qlora --use_cpu_offload true --lora_rank 16", "qlora", 16, ""),
        ("fsdp_qlora", "train_type=hqq_dora, n_bits=4, lora_rank=32", "qlora", 32, "dora"),
        ("ms-swift", "tuner_type=lora, lora_rank=8, target_modules=all-linear", "lora", 8, ""),
        ("ms-swift", "sft_type: lora; quantization_bit=4", "qlora", 8, ""),
        ("ms-swift", "train_type=adalora; optimizer=adamw", "lora", 8, "adalora"),
        ("LLaMA-Factory", "finetuning_type: lora, lora_rank: 64", "lora", 64, ""),
        ("TRL", "LoRA r=32; packing", "lora", 32, ""),
        ("fsdp_qlora", "train_type=qlora lora_rank=16 batch_size=2", "qlora", 16, ""),
        ("FlagPerf", "LoRA finetune peft bs=1", "lora", 8, ""),
        ("ms-swift", "train_type=full; lora_rank=8", "none", 0, ""),
        ("ms-swift", "tuner_type full, deepspeed zero3", "none", 0, ""),
    ],
)
def test_adapters_among_the_options_of_notes(
    framework: str, notes: str, adapter: str, rank: int, method: str
) -> None:
    found = case(framework=framework, notes=notes)
    workload = found.scenario.workload
    assert (workload.adapter, workload.adapter_rank) == (adapter, rank)
    assert workload.adapter_method == (method or "lora")
    assert not not_understood(found.row)


@pytest.mark.parametrize(
    ("notes", "optimizer"),
    [
        ("optimizer=lion; lr=1e-4", "lion"),
        ("--optimizer sgd --batch_size 2", "sgd"),
        ("optim: paged_adamw_8bit, warmup 10", "paged_adamw_8bit"),
        ("optimizer_name=adamw", "adamw"),
        ("batch_size=2 optimizer=sgd lr=1e-4", "sgd"),
    ],
)
def test_an_optimizer_among_the_options_of_notes(notes: str, optimizer: str) -> None:
    found = case(framework="fsdp_qlora", peft="qlora", notes=notes)
    assert found.scenario.workload.optimizer == optimizer


@pytest.mark.parametrize("notes", ["", "sharding_strategy=full_shard", "FSDP full shard"])
@pytest.mark.parametrize(
    ("peft", "wrapper"),
    [
        ("qlora", "fsdp1-adapters"),
        ("custom_lora", "fsdp1-adapters"),
        ("custom_qlora", "fsdp1-half-layers"),
        ("hqq_lora", "fsdp1-half-layers"),
    ],
)
def test_fsdp_qloras_units_whatever_else_is_said(notes: str, peft: str, wrapper: str) -> None:
    found = case(framework="fsdp_qlora", peft=peft, notes=notes)
    assert wrapper in found.scenario.software.name.split("+")


SUBMISSION = {"model": "llama-2-70b", "gpu": "H100", "precision": "fp8"}


@pytest.mark.parametrize(
    ("notes", "graphs"),
    [
        ("CUDA graphs", "layers"),
        ("MC_CUDA_GRAPH=True; SHARP", "layers"),
        ("MC_CUDA_GRAPH=True; FULL_CUDA_GRAPH=True", "iteration"),
        ("no CUDA graphs", "none"),
        ("CUDA graphs: moe_router, moe_preprocess", "none"),
        ("CUDA graphs (attn, moe_router)", "none"),
        ("CUDA graph of the step", "iteration"),
        ("SHARP", "none"),
    ],
)
def test_graphs_of_cuda_whose_kind_nobody_states(notes: str, graphs: str) -> None:
    found = case(**{**CELLS, **SUBMISSION}, framework="MLPerf Training v5.0", notes=notes)
    assert found.scenario.software.host.cuda_graphs == graphs


@pytest.mark.parametrize(
    ("optimizer", "stage"),
    [
        ("LAMB", 0),
        ("DistributedFusedLAMB", 1),
        ("LAMB sharded", 1),
        ("distributed LAMB (sharded)", 1),
    ],
)
def test_lamb_whose_states_are_sharded(optimizer: str, stage: int) -> None:
    cells = {"model": "bert-large", "seq_len": 512, "precision": "fp16", "optimizer": optimizer}
    found = case(framework="MLPerf Training v2.1 BERT", num_gpus=8, notes="BATCHSIZE=56", **cells)
    assert (found.plan.zero_stage, found.scenario.workload.optimizer) == (stage, "lamb")
    assert found.plan.micro_batch_size == 28  # sequences of two samples
    assert not not_understood(found.row)
    nodes = case(framework="MLPerf Training v2.1 BERT", num_gpus=32, **cells)
    assert nodes.plan.dp_shard == (8 if stage else 32)


@pytest.mark.parametrize(
    ("words", "samples"), [("MINIBS=36", 36), ("MINIBS=36 MBS=2", 18), ("minibs: 8, MBS=4", 2)]
)
def test_samples_of_a_data_ranks_step(words: str, samples: int) -> None:
    notes = f"TP=4 PP=2 {words} USE_DIST_OPTIMIZER=True MC_TP_OVERLAP_AG=True"
    found = case(**{**CELLS, **SUBMISSION}, framework="MLPerf v5.0, NeMo", notes=notes)
    assert found.plan.num_microbatches == samples
    assert found.scenario.software.overlap.chunked_tensor_traffic
    assert not not_understood(found.row)


@pytest.mark.parametrize(
    ("framework", "profile"),
    [
        ("MLPerf reference (HF)", "hf-trainer+deepspeed-zero3"),
        ("MLPerf v4.0 (HF reference)", "hf-trainer+deepspeed-zero3"),
    ],
)
def test_the_reference_of_mlperfs_lora(framework: str, profile: str) -> None:
    cells = {**CELLS, **SUBMISSION, "precision": "bf16", "peft": "lora"}
    assert case(**cells, framework=framework).scenario.software.name == profile


@pytest.mark.parametrize(
    "notes",
    ["ACT_CKPT_NUM_LAYERS=0", "recompute_granularity=full, recompute_num_layers=0", "ACL=0"],
)
def test_no_layers_are_computed_again(notes: str) -> None:
    cells = {**CELLS, "model": "gpt3-175b", "seq_len": 2048, "num_gpus": 512}
    found = case(**cells, framework="MLPerf v3.1 GPT-3", notes=f"TP=4 PP=8 VP=6; {notes}")
    assert found.plan.recompute == "none"


@pytest.mark.parametrize(
    ("precision", "notes", "stage"),
    [
        ("bf16", "ZERO_STAGE=0", 1),
        ("bf16", "ZERO_STAGE=1", 1),
        ("fp16", "ZERO_STAGE=0", 0),
    ],
)
def test_bf16_optimizer_has_partitions_at_stage_0(precision: str, notes: str, stage: int) -> None:
    cells = {**CELLS, "model": "bloom-7b1", "num_gpus": 64, "precision": precision}
    found = case(**cells, framework="Megatron-DeepSpeed (BigScience)", notes=f"TP=4 PP=4 {notes}")
    assert found.plan.zero_stage == stage


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder"])
def test_an_encoder_is_no_encoder_decoder(kind: str) -> None:
    model = {"encoder": "bert-large", "encoder-decoder": "t5-small"}[kind]
    found = case(**{**CELLS, "model": model, "seq_len": 512}, framework="FlagPerf", model_kind=kind)
    assert (found.scenario.software.name == "apex-bert") == (kind == "encoder")


@pytest.mark.parametrize(
    ("notes", "overlapped"),
    [
        ("isp, wp=8, sp=4; weight=dict(size=8, overlap=False, memory_pool=True)", 0.0),
        ("WP 8, SP 4, weight overlap=False", 0.0),
        ("WP 8, SP 4, overlap=True", 1.0),
    ],
)
def test_weights_of_internevos_ranks_are_gathered_behind_or_before(
    notes: str, overlapped: float
) -> None:
    found = case(framework="InternEvo", notes=notes)
    assert (found.plan.zero_stage, found.plan.context_parallel) == (3, 4)
    assert found.scenario.software.overlap.data_parallel == overlapped
    assert not not_understood(found.row)


@pytest.mark.parametrize(
    ("framework", "notes", "part"),
    [
        ("Modalities", "optimizer: AdamW, fused: true, foreach: false", "adamw-fused"),
        ("Modalities", "foreach=false", "adamw-for-loop"),
        (
            "ms-swift",
            "tuner_type=full; deepspeed=zero1, deepspeed_autotp_size=2",
            "deepspeed-zero1",
        ),
    ],
)
def test_engines_among_the_options_of_notes(framework: str, notes: str, part: str) -> None:
    found = case(framework=framework, notes=notes)
    assert part in found.scenario.software.name.split("+")
    assert not not_understood(found.row)


@pytest.mark.parametrize(
    "notes", ["attn_implementation=sdpa", "attention_implementation: pytorch_flash", ""]
)
@pytest.mark.parametrize("framework", ["nanotron", "TRL", "Modalities"])
def test_names_of_attention_that_is_not_written_out(framework: str, notes: str) -> None:
    found = case(framework=framework, notes=notes)
    assert found.scenario.workload.attention_kernel == "flash"
    assert not not_understood(found.row)


@pytest.mark.parametrize(
    ("framework", "cells"),
    [
        ("TRL", {"offload": "params to CPU"}),
        ("DeepSpeed", {"offload": "weights"}),
        ("LLaMA-Factory", {"notes": "deepspeed offload_param cpu"}),
    ],
)
def test_offloaded_weights_are_sharded(framework: str, cells: dict[str, Any]) -> None:
    found = case(framework=framework, **cells)
    assert (found.plan.zero_stage, found.plan.offload) == (3, "weights")
    assert why_impossible(found) is None
    stated = case(framework=framework, zero_stage=2, **cells)
    assert stated.plan.zero_stage == 2


@pytest.mark.parametrize("notes", ["data_parallel_shard_degree=-1", "dp_shard: -1", ""])
def test_minus_one_is_all_ranks(notes: str) -> None:
    found = case(framework="torchtitan", notes=f"{notes}; tensor_parallel_degree=2")
    assert (found.plan.dp_shard, found.plan.tensor_parallel) == (8, 2)


def test_a_flag_of_lora_beside_one_of_qlora() -> None:
    flags = "--use_lora --q_lora --deepspeed finetune/ds_config_zero2.json"
    found = case(framework="Qwen finetune.py", model="qwen-7b", num_gpus=2, notes=flags)
    named = case(framework="Qwen finetune.py", model="qwen-7b", num_gpus=2, notes="Q-LoRA, ZeRO-2")
    assert found.scenario.workload == named.scenario.workload
    assert found.scenario.model.num_parameters == named.scenario.model.num_parameters


@pytest.mark.parametrize(
    ("cells", "quantisation", "profile"),
    [
        ({"framework": "fsdp_qlora", "peft": "hqq_lora", "notes": "n_bits 2"}, "int2", "+hqq"),
        ({"framework": "fsdp_qlora", "peft": "hqq_lora 2-bit"}, "int2", "+hqq"),
        (
            {"framework": "fsdp_qlora", "peft": "hqq_dora", "notes": "n_bits=4"},
            "nf4_double",
            "+hqq",
        ),
        ({"framework": "swift", "model": "llama2-7b-aqlm-2bit-1x16", "peft": "lora"}, "int2", ""),
        ({"framework": "swift", "peft": "lora", "notes": "quantization_bit 2"}, "int2", ""),
        ({"framework": "swift", "model": "qwen-7b-chat-int4", "peft": "lora"}, "int4", ""),
    ],
)
def test_bases_in_two_bits(cells: dict[str, Any], quantisation: str, profile: str) -> None:
    found = case(num_gpus=2, precision="bf16", **cells).scenario
    assert (found.workload.adapter, found.workload.quantisation) == ("qlora", quantisation)
    assert profile in found.software.name


@pytest.mark.parametrize(
    ("cells", "precision"),
    [
        ({"precision": "bf16", "notes": "none (bfloat16)"}, "bf16"),
        ({"precision": "bf16", "notes": "bf16 baseline, compile"}, "bf16"),
        ({"precision": "bf16", "notes": "without float8"}, "bf16"),
        ({"precision": "bf16", "notes": "compile"}, "bf16"),  # the framework names the suite
        ({"precision": "bf16", "notes": "compile, float8"}, "fp8"),
        ({"precision": "bf16", "notes": "tensorwise scaling"}, "fp8"),
        ({"precision": "bf16", "notes": "ao fp8", "optimizer": "AdamWFp8"}, "bf16"),
    ],
)
def test_the_base_of_a_comparison_in_8_bits(cells: dict[str, Any], precision: str) -> None:
    found = case(framework="torchtitan (torchao float8)", **cells)
    assert found.scenario.workload.precision == precision


@pytest.mark.parametrize(
    "cells",
    [
        {"precision": "bf16", "peft": "LoRA r=8 (QAT)", "notes": "int4 QAT + LoRA"},
        {"precision": "nvfp4 QAT"},
        {"precision": "int8", "notes": "QAT, fake quantized weights"},
        {"precision": "bf16", "notes": "8da4w-qat: int8 activations, int4 weights"},
    ],
)
def test_rounded_weights_are_stored_and_multiplied_in_16_bits(cells: dict[str, Any]) -> None:
    found = case(framework="torchtune (torchao)", num_gpus=8, **cells)
    assert found.scenario.workload.precision == "bf16"
    assert found.scenario.workload.adapter != "qlora"
    assert any("rounding" in note for note in found.defaults)


def test_a_run_without_rounding_is_none_of_its_suite() -> None:
    found = case(framework="torchtune (QAT baseline)", num_gpus=8, notes="no QAT")
    assert not any("rounding" in note for note in found.defaults)


@pytest.mark.parametrize(
    ("notes", "data", "stages"),
    [
        ("DDP + device_map; NPROC_PER_NODE=2", 2, 4),
        ("DDP + device_map", 2, 4),
        ("ddp, device_map auto, 4 processes", 4, 2),
        ("device_map auto", 1, 8),
    ],
)
def test_processes_whose_model_lies_on_several_cards(notes: str, data: int, stages: int) -> None:
    plan = case(framework="ms-swift", num_gpus=8, peft="lora", notes=notes).plan
    assert (plan.data_parallel, plan.pipeline_parallel) == (data, stages)


def test_ulysses_over_ranks_that_divide_no_heads_is_a_ring() -> None:
    found = case(
        framework="ms-swift 3.8",
        model="qwen2.5-7b",
        num_gpus=8,
        notes="deepspeed zero3, sequence_parallel_size 8",
    )
    assert (found.plan.context_parallel, found.plan.context_parallel_method) == (8, "ring")
    assert why_impossible(found) is None


@pytest.mark.parametrize(
    ("notes", "recompute", "offload"),
    [
        ("zero3 offload, activation checkpointing", "full", "weights"),
        ("zero2 offload, activation checkpointing", "full", "optimizer"),
        ("zero3; offload activations", "none", "activations"),
    ],
)
def test_what_is_offloaded_ends_at_a_comma(notes: str, recompute: str, offload: str) -> None:
    plan = case(framework="DeepSpeed", notes=notes).plan
    assert (plan.recompute, plan.offload) == (recompute, offload)


def test_zero_offload_on_one_card_keeps_16_bit_weights_alone() -> None:
    cells = {"framework": "DeepSpeed", "optimizer": "ZeRO-Offload", "precision": "bf16"}
    found = case(num_gpus=1, seq_len=512, **cells)
    assert "deepspeed-zero2" in found.scenario.software.name
    assert found.plan.offload == "optimizer"


@pytest.mark.parametrize("words", ["mp_bf16_autocast", "bf16_autocast"])
def test_autocast_of_fsdp_qlora(words: str) -> None:
    found = case(framework="fsdp_qlora", num_gpus=2, peft="lora", precision=words)
    assert "autocast+fp32-frozen" in found.scenario.software.name
    assert not_understood(found.row) == []


@pytest.mark.parametrize(("peft", "notes"), [("unsloth+qlora", ""), ("lora", "use_unsloth")])
def test_unsloth_is_a_tuner_of_swift(peft: str, notes: str) -> None:
    found = case(framework="ms-swift", num_gpus=1, peft=peft, notes=notes)
    assert found.scenario.software.name.startswith("hf-trainer-foak")


@pytest.mark.parametrize(
    ("notes", "bytes_saved"),
    [
        ("QAT, int8 activations, int4 weights", 6.0),
        ("QAT int4 weight-only", 18.0),
        ("QAT, torch.compile", 0.0),
        ("no QAT", 0.0),
    ],
)
def test_rounding_of_quantisation_aware_training(notes: str, bytes_saved: float) -> None:
    found = case(framework="torchtune (torchao QAT)", num_gpus=8, precision="bf16", notes=notes)
    assert found.scenario.software.rounding.weight_saved_bytes == bytes_saved


@pytest.mark.parametrize(
    ("cells", "recompute"),
    [
        ({"num_gpus": 8}, "full"),
        ({"num_gpus": 8, "peft": "none", "notes": "QAT"}, "full"),
        ({"num_gpus": 1, "peft": "lora r=8", "notes": "lora_finetune_single_device"}, "full"),
        ({"num_gpus": 2, "peft": "lora r=8"}, "none"),
        ({"num_gpus": 2, "peft": "qlora"}, "full"),
        ({"num_gpus": 8, "recompute": "none"}, "none"),
        ({"num_gpus": 8, "notes": "no activation checkpointing"}, "none"),
    ],
)
def test_checkpointing_of_torchtunes_configurations(cells: dict[str, Any], recompute: str) -> None:
    assert case(framework="torchtune", **cells).plan.recompute == recompute


@pytest.mark.parametrize(
    "framework",
    ["ms-swift 3.5, Megatron-SWIFT", "Megatron-SWIFT (ms-swift 3.5)", "Megatron-SWIFT 3.5"],
)
def test_megatron_swift_is_not_the_trainer_it_comes_with(framework: str) -> None:
    found = case(framework=framework, tensor_parallel=2, zero_stage=1)
    assert found.scenario.software.name == "nemo"
    assert found.plan.zero_stage == 1


@pytest.mark.parametrize(
    ("framework", "equal"),
    [
        ("GLM-4 finetune.py, DeepSpeed ZeRO-3", False),
        ("DeepSeek-Coder finetune_deepseekcoder.py, DeepSpeed ZeRO-3", False),
        ("MiniCPM finetune.py, DeepSpeed ZeRO-3", True),
        ("Baichuan2 fine-tune.py, DeepSpeed ZeRO-3", False),
    ],
)
def test_scripts_next_to_a_model_are_transformers_trainer(framework: str, equal: bool) -> None:
    found = case(framework=framework)
    assert found.scenario.software.name == "hf-trainer+deepspeed-zero3"
    one = {"peft": "lora", "num_gpus": 1, "zero_stage": 0}
    ragged = case(framework=framework.partition(",")[0], **one).scenario.software.memory
    assert ragged.ragged_batches != equal


@pytest.mark.parametrize(
    ("notes", "kernel"),
    [
        ("sdpa attention (use_flash_attention=false)", "flash"),
        ("flash_attn=false, attn_implementation=sdpa", "flash"),
        ("use_flash_attention=false", "eager"),
    ],
)
def test_torchs_kernel_in_the_place_of_flash_attn_keeps_no_scores(notes: str, kernel: str) -> None:
    found = case(framework="fsdp_qlora", peft="lora r=64", notes=notes)
    assert found.scenario.workload.attention_kernel == kernel
    assert not_understood(found.row) == []


@pytest.mark.parametrize("framework", ["fsdp_qlora", "ms-swift", "Unsloth"])
def test_scales_are_not_quantised_where_a_row_says_so(framework: str) -> None:
    single = case(framework=framework, peft="QLoRA nf4, no double quant")
    assert single.scenario.workload.quantisation == "nf4"
    assert case(framework=framework, peft="QLoRA nf4").scenario.workload.quantisation != "nf4"


def test_fireflys_qlora_prepares_its_base() -> None:
    found = case(framework="Firefly", peft="qlora r=64", num_gpus=1)
    assert found.scenario.software.frozen.unquantised_in_fp32


@pytest.mark.parametrize(
    ("words", "stage", "offload"),
    [
        ("plugin 3d", 0, "none"),
        ("low_level_zero plugin", 1, "none"),
        ("gemini_auto", 3, "none"),
        ("GeminiDDP, shard_param_frac 1.0, offload_optim_frac 1.0", 3, "optimizer"),
        ("gemini; offload_optim_frac=0.0", 3, "none"),
        ("plugin fsdp_cpu", 3, "weights"),
    ],
)
def test_plug_ins_of_colossalai(words: str, stage: int, offload: str) -> None:
    plan = case(framework="Colossal-AI", model="llama-2-7b", notes=words, zero_stage=None).plan
    assert (plan.zero_stage, plan.offload) == (stage, offload)


def test_colossalai_cuts_the_vocabulary_of_its_loss() -> None:
    cut = {"framework": "ColossalAI", "model": "llama-2-7b", "tensor_parallel": 4, "zero_stage": 1}
    found = case(**cut, notes="plugin 3d").scenario.software
    assert not found.loss.gathers_logits
    assert found.host.dtensor_operators_forward == 0.0
    assert case(**cut | {"framework": "HF Trainer"}).scenario.software.loss.gathers_logits


@pytest.mark.parametrize(
    ("framework", "software"),
    [
        ("PEFT + bnb int8 training", "hf-trainer"),
        ("peft plain PyTorch loop", "peft"),
        ("NeMo 2.0 PEFT", "nemo"),
        ("DeepSpeed-Chat step 1, ZeRO-2", "hf-trainer+deepspeed-zero2"),
    ],
)
def test_modules_that_a_library_trains(framework: str, software: str) -> None:
    assert case(framework=framework).scenario.software.name == software


@pytest.mark.parametrize(
    ("model", "layers", "hidden_size"),
    [
        ("ViT-Giant (1.1B)", 40, 1536),
        ("DINOv2 ViT-L", 24, 1024),
        ("SAM ViT-H", 32, 1280),
        ("Llama2-1B", 24, 1536),
        ("guanaco-65b", 80, 8192),
        ("bloomz-7b1-mt", 30, 4096),
    ],
)
def test_other_names_of_published_shapes(model: str, layers: int, hidden_size: int) -> None:
    found = case(framework="PyTorch", model=model, seq_len=257).scenario.model
    assert (found.num_layers, found.hidden_size) == (layers, hidden_size)


@pytest.mark.parametrize(
    ("notes", "ranks"),
    [
        ("sequence_parallel_size 8; ulysses 2 x ring 4", 8),
        ("sequence parallel 4; cp 2", 1),  # of several runs
        ("ulysses 4", 4),
    ],
)
def test_ranks_of_a_sequence_that_is_shared_in_two_ways(notes: str, ranks: int) -> None:
    found = case(framework="ms-swift", num_gpus=8, zero_stage=3, notes=notes)
    assert found.plan.context_parallel == ranks


@pytest.mark.parametrize(
    ("stage", "notes", "elements"),
    [
        (2, "", 5e8),
        (2, "reduce_bucket_size=2e8", 2e8),
        (2, "buckets of 50M elements, no overlap", 5e7),
        (2, "buckets of 2e8, overlap_comm", 4e8),
        (2, "overlap_comm=false; allgather bucket 1e9", 1e9),
        (2, "allgather_bucket_size 5e8; reduce_bucket_size 2e8", 2e8),
        (2, "buckets of 25 MB", 5e8),
        (3, "buckets of 20 million elements, overlap_comm=true", 2e7),
        (3, "allgather bucket 2e8", 5e8),
    ],
)
def test_buckets_of_deepspeed_have_the_size_of_the_notes(
    stage: int, notes: str, elements: float
) -> None:
    framework = f"HF Trainer, DeepSpeed ZeRO-{stage}"
    found = case(framework=framework, zero_stage=stage, notes=notes).scenario.software
    assert found.sharding.bucket_elements == elements


def test_weights_that_deepspeed_keeps_are_those_of_the_notes() -> None:
    cells = {"framework": "HF Trainer, DeepSpeed ZeRO-3", "zero_stage": 3}
    kept = case(**cells, notes="stage3_max_live_parameters 1e8").scenario.software
    assert kept.sharding.live_elements == 1e8


@pytest.mark.parametrize(
    ("precision", "size"), [("int8 weight-only", 1.0), ("int8 QT", 1.0), ("BitNet b1.58", 0.0)]
)
def test_trained_weights_that_torchao_keeps_in_8_bits(precision: str, size: float) -> None:
    found = case(framework="torchao", precision=precision, num_gpus=1)
    assert found.scenario.software.fp8.trained_bytes == size
    assert found.scenario.workload.precision == "bf16"
    assert any("as those of 16 bits" in note for note in found.defaults) == (size == 0.0)
