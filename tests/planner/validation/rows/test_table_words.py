"""Words of other people's tables: each cell is read as its author meant it, or refused by name."""

from pathlib import Path

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


QLORA = {"peft": "qlora (nf4) r=8"}

UNCOUNTED = {"num_gpus": "", "data_parallel": "", "global_batch_size": ""}


def case(path: Path, **cells: str) -> tuple[Case, list[str]]:
    row = USUAL | cells
    text = [",".join(row), ",".join(f'"{value}"' for value in row.values())]
    file = path / "runs.csv"
    file.write_text("\n".join(text) + "\n", encoding="utf-8")
    (read,) = read_runs(file)
    return case_of(read), not_understood(read)


@pytest.mark.parametrize("peft", ["bnb_llama_pro", "hqq llama pro"])
def test_what_is_no_adapter_beside_a_matrix_is_refused(peft: str, tmp_path: Path) -> None:
    with pytest.raises(Unpriceable, match="is not priced"):
        case(tmp_path, peft=peft)


@pytest.mark.parametrize("notes", ["2 nodes", "multi-GPU", "2x A100 and 4x A100"])
def test_accelerators_that_words_leave_open_are_asked_for(notes: str, tmp_path: Path) -> None:
    with pytest.raises(Unpriceable, match="num_gpus is empty"):
        case(tmp_path, **UNCOUNTED, notes=notes)


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


@pytest.mark.parametrize(
    ("notes", "trained"), [("--lora_dim 128", True), ("--only_optimize_lora", False)]
)
def test_deepspeed_chat_trains_its_own_ends(notes: str, trained: bool, tmp_path: Path) -> None:
    cells = {"framework": "DeepSpeed-Chat step 1", "model": "opt-1.3b", "peft": "lora r=128 all"}
    model = case(tmp_path, **cells, notes=notes)[0].scenario.model
    tables = [weight for weight in model.embedding if weight.sharding == "vocab"]
    assert [weight.frozen for weight in tables] == [not trained]


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
