"""Words of other people's tables: each cell is read as its author meant it, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.validation.rows.case import Case, case_of
from planner.validation.rows.counts import not_understood
from planner.validation.rows.reading import Unpriceable
from planner.validation.rows.runs_file import read_runs

USUAL = {
    "source_group": "x",
    "model": "llama3-8b",
    "gpu": "A100-SXM",
    "gpu_mem_gb": "80",
    "num_gpus": "8",
    "data_parallel": "8",
    "seq_len": "4096",
    "global_batch_size": "8",
    "micro_batch_size": "1",
    "precision": "bf16",
    "framework": "PyTorch",
    "optimizer": "adamw",
    "recompute": "none",
}


LORA = {"peft": "LoRA r=8"}

UNSAID = {"recompute": ""}

ALONE = {"num_gpus": "1", "data_parallel": "1"}

QLORA = {"peft": "qlora (nf4) r=8"}

UNCOUNTED = {"num_gpus": "", "data_parallel": "", "global_batch_size": ""}


def case(path: Path, **cells: str) -> tuple[Case, list[str]]:
    row = USUAL | cells
    text = [",".join(row), ",".join(f'"{value}"' for value in row.values())]
    file = path / "runs.csv"
    file.write_text("\n".join(text) + "\n", encoding="utf-8")
    (read,) = read_runs(file)
    return case_of(read), not_understood(read)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"framework": "DeepSpeed ZeRO-3 Offload"}, {"zero_stage": 3, "offload": "weights"}),
        ({"offload": "ZeRO-3 Offload"}, {"zero_stage": 3, "offload": "weights"}),
        ({"offload": "zero3_offload"}, {"zero_stage": 3, "offload": "weights"}),
        ({"framework": "DeepSpeed", "offload": "ZeRO-Offload"}, {"offload": "optimizer"}),
        ({"framework": "DeepSpeed ZeRO-2 offload"}, {"zero_stage": 2, "offload": "optimizer"}),
        ({"framework": "DeepSpeed ZeRO-2", "offload": "CPU"}, {"offload": "optimizer"}),
        ({"framework": "PyTorch FSDP", "offload": "CPU"}, {"offload": "weights"}),
        ({"framework": "PyTorch FSDP", "offload": "yes"}, {"offload": "weights"}),
        ({"framework": "FSDP full shard auto wrap"}, {"zero_stage": 3, "offload": "none"}),
        ({"framework": "FairScale FSDP"}, {"zero_stage": 3}),
        ({"framework": "PyTorch DDP (static_graph=True)"}, {"zero_stage": 0}),
        ({"framework": "fsdp_qlora", "peft": "HQQ DoRA"}, {"zero_stage": 3, "bits": "nf4_double"}),
        ({"framework": "HF Trainer", "peft": "bnb int8 LoRA r=16"}, {"bits": "int8"}),
        ({"framework": "HF Trainer", "peft": "full ft"}, {"adapters": False}),
        ({"framework": "HF Trainer", "peft": "full-param"}, {"adapters": False}),
        ({"optimizer": "AdamW 8bit"}, {"optimizer": "adamw_8bit"}),
        ({"optimizer": "AdamWFp8"}, {"optimizer": "adamw_8bit"}),
        ({"optimizer": "fp8 AdamW"}, {"optimizer": "adamw_8bit"}),
        ({"optimizer": "paged_adamw_32bit"}, {"optimizer": "paged_adamw"}),
        (
            {"optimizer": "CPUOffloadOptimizer(AdamW)"},
            {"optimizer": "adamw", "offload": "optimizer"},
        ),
        ({"optimizer": "CPU offload optimizer"}, {"optimizer": "adamw", "offload": "optimizer"}),
        ({"recompute": "gc on"}, {"recompute": "full"}),
        ({"recompute": "no gc"}, {"recompute": "none"}),
        ({"recompute": "grad ckpt"}, {"recompute": "full"}),
        ({"recompute": "", "notes": "with gradient ckpt"}, {"recompute": "full"}),
        ({"notes": "w/o flash attn"}, {"attention": "eager"}),
        ({"notes": "flash attention off"}, {"attention": "eager"}),
        ({"notes": "flash attention 2"}, {"attention": "flash"}),
        ({"precision": "16-mixed"}, {"precision": "fp16", "software": "torch-trainer+autocast"}),
        ({"precision": "amp O2"}, {"precision": "fp16", "software": "torch-trainer"}),
        ({"precision": "fp16 amp O1"}, {"precision": "fp16", "software": "torch-trainer+autocast"}),
        (
            {"precision": "fp16 + GradScaler"},
            {"precision": "fp16", "software": "torch-trainer+autocast"},
        ),
        ({"precision": "bf16-true"}, {"precision": "bf16", "masters": False}),
        ({"precision": "32-true"}, {"precision": "fp32"}),
        ({"notes": "torch.compile(mode=max-autotune)"}, {"software": "torch-compile"}),
        (
            {"framework": "torchtitan, chunked CE"},
            {"software": "eager-fsdp2+chunked-backward-loss"},
        ),
        ({"framework": "torchtitan 2025, chunked CE"}, {"software": "eager-fsdp2+chunked-loss"}),
        ({"framework": "torchtitan", "notes": "without chunked CE"}, {"software": "eager-fsdp2"}),
        (ALONE | {"framework": "DeepSpeed ZeRO-3", "offload": "CPU"}, {"zero_stage": 3}),
        (ALONE | {"framework": "DeepSpeed ZeRO-2", "offload": "CPU"}, {"zero_stage": 2}),
        (ALONE | {"framework": "DeepSpeed ZeRO-2"}, {"zero_stage": 0}),
        (QLORA | {"framework": "TRL"}, {"software": "hf-trainer+kbit-preparation"}),
        (QLORA | {"framework": "TRL (2026)"}, {"software": "hf-trainer+adamw-fused"}),
        (QLORA | {"framework": "TRL 0.26.2"}, {"software": "hf-trainer+adamw-fused"}),
        (
            QLORA | {"framework": "TRL 0.25.1"},
            {"software": "hf-trainer+adamw-fused+kbit-preparation"},
        ),
        (
            QLORA | {"framework": "backpropagate 1.7 (TRL 1.14.1)"},
            {"software": "hf-trainer+adamw-fused+kbit-preparation", "bits": "nf4_double"},
        ),
        ({"framework": "HF Trainer, nn.DataParallel"}, {"software": "hf-trainer+data-parallel"}),
        ({"framework": "HF Trainer, DDP"}, {"software": "hf-trainer+ddp"}),
        (
            ALONE | {"framework": "Unsloth", "recompute": "use_gradient_checkpointing=unsloth"},
            {"recompute": "full", "offload": "activations"},
        ),
        (ALONE | {"framework": "Unsloth", "recompute": "full"}, {"offload": "none"}),
        ({"framework": "plain PyTorch (CS336 assignment 2)"}, {"attention": "eager"}),
        (
            {"framework": "plain PyTorch (CS336 assignment 2)", "flash_attention": "1"},
            {"attention": "flash"},
        ),
        (QLORA | {"framework": "TRL", "zero_stage": "3"}, {"software": "hf-trainer"}),
        (QLORA | {"framework": "Unsloth (SFTTrainer)"}, {"software": "hf-trainer-foak"}),
        (QLORA | {"framework": "HF Trainer"}, {"software": "hf-trainer"}),
        (
            QLORA | {"framework": "HF Trainer", "notes": "prepare_model_for_kbit_training"},
            {"software": "hf-trainer+kbit-preparation"},
        ),
        ({"optimizer": "dana-star (momentum, second moment)"}, {"optimizer": "adamw"}),
        ({"model": "gemma-2-9b", "flash_attention": "1"}, {"attention": "eager"}),
        ({"model": "gemma-2-9b", "notes": "flash attention 2"}, {"attention": "flash"}),
        ({"model": "gemma-2-9b", "notes": "flex attention"}, {"attention": "flash"}),
        # a base in few bits, wherever it is said
        (LORA | {"model": "Qwen1.5-7B-Chat-GPTQ-Int4"}, {"adapter": "qlora", "bits": "int4"}),
        (LORA | {"model": "unsloth/llama-3-8b-bnb-4bit"}, {"adapter": "qlora", "bits": "nf4"}),
        (LORA | {"notes": "load_in_4bit=True"}, {"adapter": "qlora", "bits": "nf4"}),
        (LORA | {"notes": "load_in_4bit=False"}, {"adapter": "lora"}),
        (LORA | {"notes": "w/o QLoRA; 8-bit Adam"}, {"adapter": "lora"}),
        (LORA | {"notes": "quant_method eetq"}, {"adapter": "qlora", "bits": "int8"}),
        (LORA | {"framework": "ms-swift (QLoRA)"}, {"adapter": "qlora", "bits": "nf4_double"}),
        (LORA | {"precision": "nf4 base, bf16 compute"}, {"adapter": "qlora", "precision": "bf16"}),
        ({"peft": "no (full ft)"}, {"adapters": False}),
        # DeepSpeed or FSDP, which notes name
        (
            {"framework": "LLaMA-Factory", "notes": "deepspeed ds_z3_config.json"},
            {"zero_stage": 3, "software": "hf-trainer+deepspeed-zero3", "masters": True},
        ),
        (
            {"framework": "HF Trainer", "notes": "ds_config stage 2"},
            {"zero_stage": 2, "software": "hf-trainer+deepspeed-zero2"},
        ),
        (
            {"framework": "ms-swift", "notes": "FSDP"},
            {"zero_stage": 3, "software": "hf-trainer+fsdp1"},
        ),
        (
            {"framework": "TRL + DeepSpeed", "notes": "stage 3, offload_optimizer device: none"},
            {"zero_stage": 3, "offload": "none"},
        ),
        (
            {"framework": "accelerate", "notes": "zero3 offload, offload_param_device: none"},
            {"zero_stage": 3, "offload": "optimizer"},
        ),
        (
            {"framework": "HF Trainer", "notes": "ds_z3_offload_config.json"},
            {"zero_stage": 3, "offload": "weights"},
        ),
        ({"framework": "FlagPerf deepspeed"}, {"zero_stage": 3}),
        (UNSAID | {"notes": "gc=true"}, {"recompute": "full"}),
        (
            UNSAID | LORA | {"framework": "ms-swift", "notes": "gradient_checkpointing=false"},
            {"recompute": "none"},
        ),
        ({"recompute": "enabled"}, {"recompute": "full"}),
        ({"recompute": "not used"}, {"recompute": "none"}),
        (ALONE | {"recompute": "offload"}, {"recompute": "full", "offload": "activations"}),
        ({"notes": "attn_impl=eager"}, {"attention": "eager"}),
        ({"precision": "fp32 (tf32)"}, {"precision": "tf32"}),
        ({"precision": "bf16, fp32 master weights, tf32"}, {"precision": "bf16"}),
        ({"optimizer": "AnyPrecisionAdamW"}, {"optimizer": "adamw"}),
        ({"optimizer": "paged_lion_32bit"}, {"optimizer": "lion"}),
        ({"optimizer": "RMSprop"}, {"optimizer": "sgd_momentum"}),
        (
            {"global_batch_size": "", "notes": "bs 1 x ga 16"},
            {"global_batch_size": 128},
        ),
        (
            {"global_batch_size": "", "notes": "gradient_accumulation_steps: 4"},
            {"global_batch_size": 32},
        ),
        (
            {"global_batch_size": "", "notes": "batch_accumulation_per_replica=4"},
            {"global_batch_size": 32},
        ),
        ({"global_batch_size": "", "notes": "dp8_tp1_acc4_mbs1"}, {"global_batch_size": 32}),
        ({"global_batch_size": "", "notes": "micro_num=4"}, {"global_batch_size": 32}),
        ({"global_batch_size": "", "notes": "8 micro-batches"}, {"global_batch_size": 64}),
        ({"global_batch_size": "", "notes": "accuracy 0.93, acc 52"}, {"global_batch_size": 8}),
        ({"global_batch_size": "", "notes": "accumulate in fp32"}, {"global_batch_size": 8}),
        ({"data_parallel": "", "notes": "tp2pp2dp2mbs1"}, {"ranks": (2, 1, 2)}),
        ({"data_parallel": "", "notes": "TP=2, pp 2"}, {"ranks": (2, 1, 2)}),
        (
            {"data_parallel": "", "framework": "ms-swift", "notes": "--sequence_parallel_size 4"},
            {"ranks": (1, 4, 1)},
        ),
        ({"framework": "HF Trainer", "notes": "no DeepSpeed"}, {"software": "hf-trainer"}),
        (
            {"framework": "TRL", "notes": "ZeRO stage-3 w/ cpu offload of optimizer"},
            {"software": "hf-trainer+deepspeed-zero3", "offload": "optimizer"},
        ),
        (
            {"framework": "TRL", "notes": "zero-3 (param + opt offload)"},
            {"zero_stage": 3, "offload": "weights"},
        ),
        ({"optimizer": "DeepSpeedCPUAdam"}, {"optimizer": "adamw", "offload": "optimizer"}),
        (
            ALONE | {"recompute": "act ckpt + cpu offload"},
            {"recompute": "full", "offload": "activations"},
        ),
        (
            {"framework": "HF Trainer", "precision": "BF16 + FP32 master"},
            {"precision": "bf16", "masters": True},
        ),
        ({"peft": "lora_r=64 lora_alpha=16; adapters in fp32"}, {"rank": 64, "targets": "all"}),
        ({"framework": "LLaMA-Efficient-Tuning"}, {"software": "hf-trainer"}),
        ({"framework": "alpaca-lora"}, {"software": "hf-trainer"}),
        (ALONE | {"gpu": "A10G (g5.2xlarge)", "gpu_mem_gb": ""}, {"gpu": "A10G"}),
        (ALONE | {"gpu": "MTT S4000", "gpu_mem_gb": "48"}, {"gpu": "MTT-S4000"}),
        ({"seq_len": "", "notes": "max_length 2048, bf16"}, {"seq_len": 2048}),
        ({"seq_len": "", "notes": "model_max_length: 512"}, {"seq_len": 512}),
        ({"seq_len": "", "notes": "q-lora (int4), seq 4k"}, {"seq_len": 4096}),
        (
            {"seq_len": "", "framework": "fsdp_qlora", "notes": "context_length=512"},
            {"seq_len": 512},
        ),
        (UNCOUNTED | {"notes": "single A100 80G"}, {"global_batch_size": 1}),
        (UNCOUNTED | {"gpu": "2xA100-80GB"}, {"global_batch_size": 2}),
        (UNCOUNTED | {"notes": "8 GPUs, ddp"}, {"global_batch_size": 8}),
        (UNCOUNTED | {"gpu": "4 * A100-SXM"}, {"global_batch_size": 4}),
        ({"zero_stage": "3", "notes": "CPU offload not used"}, {"offload": "none"}),
        ({"zero_stage": "3", "notes": "CPU offload: not enabled"}, {"offload": "none"}),
        ({"framework": "DeepSpeed", "offload": "cpu"}, {"zero_stage": 2, "offload": "optimizer"}),
        (
            {"framework": "torchtitan", "notes": "tensorwise float8 all-gather"},
            {"precision": "fp8"},
        ),
        ({"framework": "torchtitan (torchao float8)"}, {"precision": "bf16"}),
        ({"framework": "torchtitan", "notes": "no float8, compile"}, {"precision": "bf16"}),
        (
            {"framework": "torchtitan", "notes": "fp8_full quantizes all matmuls"},
            {"precision": "bf16"},
        ),
        ({"framework": "torchtitan", "precision": "rowwise_with_gw_hp"}, {"precision": "fp8"}),
        ({"optimizer": "", "notes": "compile, PagedAdamW8bit"}, {"optimizer": "paged_adamw_8bit"}),
        ({"optimizer": "", "notes": "optimizer states are sharded"}, {"optimizer": "adamw"}),
        (
            {"framework": "ms-swift", "peft": "full + galore128", "optimizer": ""},
            {"optimizer": "galore_adamw"},
        ),
        ({"framework": "ms-swift 2.1", "peft": "LoRA8"}, {"rank": 8, "targets": "q,k,v"}),
        (
            LORA | {"framework": "ms-swift 2.1", "notes": "lora_target_modules ALL"},
            {"targets": "all"},
        ),
        (
            {"framework": "fsdp_qlora", "peft": "hqq_lora", "precision": "bf16_autocast"},
            {"adapter": "qlora", "software": "hf-trainer+fsdp1-half-layers+kbit-preparation"},
        ),
        (
            {"framework": "Qwen2.5 SFT script", "peft": "full", "zero_stage": ""},
            {"zero_stage": 3, "masters": True},
        ),
        (LORA | {"framework": "ms-swift", "notes": "use_unsloth"}, {"software": "hf-trainer-foak"}),
        (
            {"framework": "ms-swift", "data_parallel": "", "notes": "2 MP * 4 DDP"},
            {"ranks": (1, 1, 2)},
        ),
        (
            {"framework": "ms-swift", "data_parallel": "", "notes": "model parallel"},
            {"ranks": (1, 1, 8)},
        ),
        (
            {"framework": "ms-swift", "data_parallel": "", "notes": "DDP_size=1 MP=4"},
            {"ranks": (1, 1, 4)},
        ),
        ({"framework": "ms-swift", "notes": "no model parallelism, DDP"}, {"ranks": (1, 1, 1)}),
        ({"framework": "HF Trainer", "notes": "bf16 MP; mp.spawn"}, {"ranks": (1, 1, 1)}),
        (
            UNCOUNTED | {"framework": "ms-swift", "micro_batch_size": "", "notes": "1 GPU, bsz 4"},
            {"global_batch_size": 4},
        ),
        (
            {"framework": "fsdp_qlora", "peft": "HQQ QLoRA"},
            {"adapter": "qlora", "software": "hf-trainer+fsdp1-half-layers+hqq"},
        ),
        (
            {"recompute": "activation checkpointing: selective, op"},
            {"recompute": "ops:every-2nd-mm"},
        ),
        ({"optimizer": "ao fp8"}, {"optimizer": "adamw_8bit"}),
        ({"framework": "torchtitan + torchao"}, {"software": "torchtitan", "masters": True}),
        ({"framework": "torchao", "notes": "with torchtitan"}, {"software": "torchtitan"}),
        ({"framework": "pytorch/ao", "precision": "float8 rowwise"}, {"software": "torchtitan"}),
        (
            {"framework": "ms-swift + DeepSpeed ZeRO-2"},
            {"software": "hf-trainer+deepspeed-zero2+deepspeed-two-buckets", "zero_stage": 2},
        ),
        ({"framework": "Qwen finetune.py, November 2023"}, {"attention": "flash"}),
        ({"framework": "HF Trainer, November 2023"}, {"attention": "eager"}),
        ({"framework": "torchao", "notes": "torchtune recipe"}, {"software": "torchtune"}),
        ({"offload": "not used"}, {"offload": "none"}),
        ({"framework": "torchtune qat_distributed", "notes": "QAT, 8da4w"}, {"precision": "bf16"}),
    ],
    ids=lambda cells: "; ".join(str(value) for value in cells.values()),
)
def test_a_cell_is_read(cells: dict[str, str], expected: dict[str, Any], tmp_path: Path) -> None:
    read, rest = case(tmp_path, **cells)
    workload, plan = read.scenario.workload, read.plan
    found = {
        "software": read.scenario.software.name,
        "gpu": read.scenario.cluster.accelerator.name,
        "precision": workload.precision,
        "optimizer": workload.optimizer,
        "masters": workload.master_weights,
        "attention": workload.attention_kernel,
        "adapters": workload.adapter != "none",
        "adapter": workload.adapter,
        "rank": workload.adapter_rank,
        "targets": workload.adapter_targets,
        "ranks": (plan.tensor_parallel, plan.context_parallel, plan.pipeline_parallel),
        "global_batch_size": workload.global_batch_size,
        "seq_len": workload.seq_len,
        "bits": workload.quantisation,
        "zero_stage": plan.zero_stage,
        "offload": plan.offload,
        "recompute": plan.recompute,
    }
    assert {name: found[name] for name in expected} == expected
    assert rest == []


@pytest.mark.parametrize("peft", ["bnb_llama_pro", "hqq llama pro"])
def test_what_is_no_adapter_beside_a_matrix_is_refused(peft: str, tmp_path: Path) -> None:
    with pytest.raises(Unpriceable, match="is not priced"):
        case(tmp_path, peft=peft)


@pytest.mark.parametrize("notes", ["2 nodes", "multi-GPU", "2x A100 and 4x A100"])
def test_accelerators_that_words_leave_open_are_asked_for(notes: str, tmp_path: Path) -> None:
    with pytest.raises(Unpriceable, match="num_gpus is empty"):
        case(tmp_path, **UNCOUNTED, notes=notes)


@pytest.mark.parametrize(
    ("cell", "stage", "profile"),
    [
        ("FULL_SHARD", 3, "torch-trainer+fsdp1"),
        ("full_shard auto_wrap", 3, "torch-trainer+fsdp1"),
        ("SHARD_GRAD_OP", 2, "torch-trainer+fsdp1"),
        ("NO_SHARD", 0, "torch-trainer+fsdp1-no-shard"),
        ("HYBRID_SHARD", 3, "torch-trainer"),
        ("ddp", 0, "torch-trainer+ddp+autocast"),
        ("fsdp", 3, "torch-trainer"),
        ("FSDP2", 3, "torch-trainer+fsdp2"),
        ("stage 2 (deepspeed)", 2, "torch-trainer"),
        ("none", 0, "torch-trainer+autocast"),
    ],
)
def test_words_for_sharding_may_stand_in_its_column(
    cell: str, stage: int, profile: str, tmp_path: Path
) -> None:
    read, unknown = case(tmp_path, zero_stage=cell)
    assert (read.plan.zero_stage, read.scenario.software.name) == (stage, profile)
    assert not unknown


@pytest.mark.parametrize(
    ("cells", "total"),
    [
        ({"notes": "2 nodes, 8 GPUs each"}, 16),
        ({"notes": "4 nodes x 8 GPUs"}, 32),
        ({"notes": "8 GPUs per node, 4 nodes"}, 32),
        ({"notes": "16 GPUs in total, 2 nodes"}, 16),
        ({"notes": "32 A100s over 4 nodes"}, 32),
        ({"gpu": "A100-SXM x 4"}, 4),
        ({"gpu": "A100-SXM (8x)"}, 8),
        ({"gpu": "16x A100 (2 nodes)"}, 16),
        ({"num_gpus": "2 x 8"}, 16),
        ({"num_gpus": "16 (2 nodes)"}, 16),
    ],
)
def test_accelerators_are_counted_over_nodes(
    cells: dict[str, str], total: int, tmp_path: Path
) -> None:
    read, _ = case(tmp_path, **UNCOUNTED | cells)
    assert read.scenario.cluster.num_gpus == total


@pytest.mark.parametrize(
    "notes",
    [
        "interleaved 2",
        "interleaved 1F1B, v=2",
        "interleaved schedule (2 chunks)",
        "2 model chunks per stage",
        "num_model_chunks 2",
    ],
)
def test_chunks_of_an_interleaved_pipeline_are_counted(notes: str, tmp_path: Path) -> None:
    ranks = {"pipeline_parallel": "4", "data_parallel": "2"}
    read, _ = case(tmp_path, framework="Megatron-LM", notes=notes, **ranks)
    assert (read.plan.virtual_stages, read.plan.pipeline_schedule) == (2, "interleaved_1f1b")


@pytest.mark.parametrize(
    ("notes", "precision"),
    [
        ("float8 dynamic scaling", "fp8"),
        ("enable_float8_linear=True", "fp8"),
        ("Float8Linear", "fp8"),
        ("fp8 GEMMs", "fp8"),
        ("no float8", "bf16"),
        ("fp8 KV cache", "bf16"),
        ("float8 optimizer states", "bf16"),
    ],
)
def test_eight_bits_of_matmuls_may_stand_in_notes(
    notes: str, precision: str, tmp_path: Path
) -> None:
    read, _ = case(tmp_path, framework="torchtitan", gpu="H100", notes=notes)
    assert read.scenario.workload.precision == precision


@pytest.mark.parametrize(
    ("optimizer", "named", "rank"),
    [
        ("GaLoreAdamW8bit rank 1024", "galore_adamw_8bit", 1024),
        ("GaLoreAdamW r=64", "galore_adamw", 64),
        ("galore_adamw_8bit_layerwise", "galore_adamw_8bit", 128),
    ],
)
def test_projected_optimizers_are_read_with_their_rank(
    optimizer: str, named: str, rank: int, tmp_path: Path
) -> None:
    workload = case(tmp_path, optimizer=optimizer)[0].scenario.workload
    assert (workload.optimizer, workload.optimizer_rank) == (named, rank)


@pytest.mark.parametrize(
    ("offload", "parts", "device"),
    [
        ("nvme", "weights", "nvme"),
        ("full", "weights", "cpu"),
        ("gradients", "optimizer", "cpu"),
        ("activations", "activations", "cpu"),
    ],
)
def test_what_is_offloaded_goes_to_the_named_device(
    offload: str, parts: str, device: str, tmp_path: Path
) -> None:
    plan = case(tmp_path, zero_stage="3", offload=offload)[0].plan
    assert (plan.offload, plan.offload_device) == (parts, device)


@pytest.mark.parametrize(
    ("cells", "cut", "priced"),
    [
        ({"framework": "TRL SFTTrainer (Accelerate FSDP2)"}, 1, 4),
        ({"framework": "TRL", "notes": "tp_plan=auto"}, 2, 8),
        ({"framework": "TRL (DeepSpeed AutoTP)"}, 2, 8),
        ({"framework": "HF Trainer"}, 2, 8),
    ],
)
def test_trl_repeats_work_on_ranks_that_cut_nothing(
    cells: dict[str, str], cut: int, priced: int, tmp_path: Path
) -> None:
    ranks = {"tensor_parallel": "2", "data_parallel": "4", "zero_stage": "3"}
    found = case(tmp_path, **ranks | cells)[0]
    assert (found.plan.tensor_parallel, found.scenario.cluster.num_gpus) == (cut, priced)
    assert found.scenario.workload.global_batch_size == 8


def test_notes_may_stand_for_the_column_of_lengths(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    file.write_text("model,gpu,notes\nllama3-8b,A100-80G,1 GPU; seq 2048\n", encoding="utf-8")
    (read,) = read_runs(file)
    assert case_of(read).scenario.workload.seq_len == 2048


@pytest.mark.parametrize(
    ("peft", "trained"),
    [("LoRA", True), ("LoRA w/o emb & lm_head", False), ("LoRA, no modules_to_save", False)],
)
def test_qwen_trains_its_ends_beside_adapters(peft: str, trained: bool, tmp_path: Path) -> None:
    read, _ = case(tmp_path, framework="Qwen finetune.py", model="qwen-7b", peft=peft)
    assert (read.scenario.model.num_parameters > 9e9) == trained


@pytest.mark.parametrize(
    ("notes", "trained"),
    [("LoRA (emb)", True), ("no emb", False), ("without trainable embedding", False)],
)
def test_notes_say_whether_ends_are_trained(notes: str, trained: bool, tmp_path: Path) -> None:
    cells = {"framework": "Qwen finetune.py", "model": "qwen-7b", "notes": notes}
    read, _ = case(tmp_path, **LORA, **cells)
    assert (read.scenario.model.num_parameters > 8.5e9) == trained


@pytest.mark.parametrize(("offload", "whole"), [("cpu", True), ("none", False)])
def test_offloaded_weights_come_with_no_sync(offload: str, whole: bool, tmp_path: Path) -> None:
    cells = {"framework": "fsdp_qlora", "offload": offload, "zero_stage": "3"}
    read, _ = case(tmp_path, **QLORA, **cells)
    assert read.scenario.software.gradients.accumulated_unsharded == whole


@pytest.mark.parametrize("trainer", ["torchtitan", "torchtune"])
def test_a_library_leaves_a_trainer_its_loss(trainer: str, tmp_path: Path) -> None:
    alone, _ = case(tmp_path, framework=trainer, notes="compile")
    read, _ = case(tmp_path, framework=f"torchao, {trainer}", notes="compile")
    assert read.scenario.software.loss == alone.scenario.software.loss


def test_rounding_of_quantisation_aware_training_is_left_out(tmp_path: Path) -> None:
    read, _ = case(tmp_path, framework="torchtune", notes="QAT")
    assert any("quantisation-aware" in default for default in read.defaults)


@pytest.mark.parametrize(
    ("framework", "num_gpus", "sixteen_bits"),
    [("Qwen finetune.py", "2", True), ("Qwen finetune.py", "1", False), ("Qwen1.5", "2", False)],
)
def test_logits_of_qwen_are_of_16_bits_under_deepspeed(
    framework: str, num_gpus: str, sixteen_bits: bool, tmp_path: Path
) -> None:
    cells = {"framework": framework, "num_gpus": num_gpus, "data_parallel": num_gpus}
    loss = case(tmp_path, **LORA, **cells)[0].scenario.software.loss
    assert (loss.fp32_logits_copies == 0.0) == sixteen_bits


@pytest.mark.parametrize(
    "optimizer",
    ["paged AdEMAMix 8bit", "MeZO"],
)
def test_an_optimizer_without_a_price_is_refused(optimizer: str, tmp_path: Path) -> None:
    """Not priced as the AdamW whose name it has."""
    with pytest.raises(Unpriceable, match="is not priced"):
        case(tmp_path, optimizer=optimizer)
