"""A user's file with another plan: what is changed is read back, everything else stays."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cost_models.legality.capabilities import capabilities
from hardware_profiles.errors import InputError
from planner.api.fit import fit
from planner.exchange.edits.patch import Patch, PatchedFile
from planner.exchange.job import Job
from planner.exchange.names import target_names
from planner.exchange.registry import open_config, target
from planner.request.model import resolve_model
from tests.planner.exchange.test_targets import MODELS, files_of, plan_of

REAL = Path(__file__).parent / "real"


def assert_patches_are_read_back(name: str, model: str, count: int, pairs: int) -> None:
    families = capabilities(name).families
    if families and resolve_model(model).family not in families:
        pytest.skip(f"{name} has no {model}")
    one, files = target(name), files_of(name, model, count)
    every = [(old, new) for old in files for new in files if old is not new]
    for old, new in every[:: max(1, len(every) // pairs)]:
        text = one.write(Job(old), "1")[one.file]
        patch = PatchedFile(one, text, one.file, None, Job(old)).patch(Job(new))
        read = one.read(patch.after, one.file)
        assert (read.unknown, read.notes) == ((), ())
        elsewhere = {key: value for key, (value, _) in one.not_carried(Job(new)).items()}
        assert plan_of({**read.settings, **elsewhere}) == new.plan, patch.diff(one.file)


@pytest.mark.parametrize("name", target_names())
def test_a_changed_file_is_read_back_as_the_new_plan(name: str) -> None:
    assert_patches_are_read_back(name, "qwen2.5-0.5b", 6, 3)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", target_names())
def test_every_changed_file_is_read_back(name: str, model: str) -> None:
    assert_patches_are_read_back(name, model, 12, 40)


DEEPSPEED = """{
    "bf16": { "enabled": true },
    "my_own": [1, 2],
    "optimizer": { "type": "AdamW", "params": { "lr": 2e-5, "betas": [0.9, 0.95] } },
    "zero_optimization": {
        "stage": 3, "overlap_comm": true,
        "offload_optimizer": { "device": "cpu", "pin_memory": true }
    },
    "gradient_accumulation_steps": 8,
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": 64
}
"""
ACCELERATE = """# ours
compute_environment: LOCAL_MACHINE
distributed_type: FSDP  # was MULTI_GPU
mixed_precision: bf16
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true  # ZeRO-3
  fsdp_offload_params: true
my_key: 1
"""
ARGUMENTS = """{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "bf16": true,
 "gradient_checkpointing": true, "fsdp": "full_shard auto_wrap", "learning_rate": 1e-4}"""
TRAINER = """import lightning as L
BATCH = 1
def loader(rows):
    return DataLoader(rows, batch_size=BATCH)  # ours
def main():
    L.Trainer(devices=8, strategy="ddp", precision="bf16-mixed", accumulate_grad_batches=8).fit(m)
"""
CLI = """trainer:
  devices: 8
  precision: bf16-mixed  # ours
  accumulate_grad_batches: 8
  strategy: {class_path: lightning.pytorch.strategies.FSDPStrategy}
data: {class_path: my.Data, init_args: {batch_size: 1}}
"""
SCRIPT = """export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
TP=${TP:-1}; MBS=1
FLAGS="--tensor-model-parallel-size $TP --micro-batch-size $MBS --global-batch-size 64 --bf16"
torchrun --nproc-per-node ${GPUS:-8} pretrain_gpt.py $FLAGS \\
    --seq-length 2048 --max-position-embeddings 2048 \\
    --use-distributed-optimizer  # ours
"""
TORCHTITAN = """[model]
name = "llama3"  # ours
[training]
batch_size = 1
global_batch_size = 64
seq_len = 2048
tensor_parallel_degree = 1
[activation_checkpoint]
mode = "full"
"""
WITH = {"micro_batch_size": 2}


ENGINE = """distributed_type: DEEPSPEED  # ours
mixed_precision: bf16
deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}
"""
VICUNA = """torchrun --nproc_per_node=8 train.py --bf16 True \\
    --per_device_train_batch_size 1 --gradient_accumulation_steps 8 \\
    --gradient_checkpointing True \\
    --fsdp "full_shard auto_wrap"
"""


@pytest.mark.parametrize(
    ("text", "plan", "present", "absent"),
    [
        (DEEPSPEED, {"zero_stage": 2}, ['"stage": 2, "overlap_comm": true', "my_own"], ["cpu"]),
        (DEEPSPEED, WITH, ['"gradient_accumulation_steps": 4', '_per_gpu": 2,'], []),
        (
            ACCELERATE,
            {"zero_stage": 2},
            ["fsdp_reshard_after_forward: false  # ZeRO-3", "# was MULTI", "my_key", "ses: 8\n"],
            ["offload"],
        ),
        (
            ACCELERATE,
            {"tensor_parallel": 2, "data_parallel": 4, "sequence_parallel": False, **WITH},
            ["  parallelism_config_tp_size: 2\n", "  parallelism_config_dp_shard_size: 4\n"],
            [],
        ),
        (
            ARGUMENTS,
            {"recompute": "none", **WITH},
            ['batch_size": 2, "grad', '"gradient_checkpointing": false'],
            [],
        ),
        (
            TRAINER,
            {"zero_stage": 3, **WITH},
            ["BATCH = 2", "batch_size=BATCH)  # ours", '_strategy="FULL_SHARD"', "import FSDPStr"],
            ['"ddp"'],
        ),
        (
            ENGINE,
            {"zero_stage": 2},
            ["distributed_type: FSDP  # ours", "fsdp_auto_wrap_policy"],
            ["deepspeed_config"],
        ),
        (
            VICUNA,
            {"recompute": "none", **WITH},
            ["batch_size 2 --grad", "--fsdp_config '{\"ver"],
            [],
        ),
        (CLI, {"zero_stage": 2, **WITH}, ["init_args: {batch_size: 2}", "SHARD_GRAD_OP"], []),
        (
            SCRIPT,
            {"tensor_parallel": 2, "data_parallel": 4, "sequence_parallel": True, **WITH},
            ["TP=${TP:-2}; MBS=2", "-size $TP --", "--sequence-parallel", "# ours"],
            [],
        ),
        (
            SCRIPT,
            {"zero_stage": 3},
            ["--use-megatron-fsdp", "--ckpt-format fsdp_dtensor", "optim_grads_params"],
            ["MAX_CONNECTIONS"],
        ),
        (
            SCRIPT.replace("--bf16", "--bf16 --recompute-granularity full"),
            {"recompute": "none"},
            ['-size 64 --bf16"\ntorchrun'],
            ["recompute"],
        ),
        (
            TORCHTITAN,
            {
                "recompute": "none",
                "tensor_parallel": 2,
                "data_parallel": 4,
                "sequence_parallel": True,
            },
            ["\nbatch_size = 1", 'mode = "none"', "\ntensor_parallel_degree = 2", "# ours"],
            ["[parallelism]"],
        ),
    ],
)
def test_single_values_change(
    text: str, plan: dict[str, Any], present: list[str], absent: list[str], tmp_path: Path
) -> None:
    patch = changed(text, plan, tmp_path)
    assert [one for one in present if one not in patch.after] == [], patch.diff("x")
    assert [one for one in absent if one in patch.after] == [], patch.diff("x")
    kept = [line for line in text.splitlines() if line in patch.after.splitlines()]
    assert len(kept) >= len(text.splitlines()) - patch.diff("x").count("\n-")


def changed(text: str, plan: dict[str, Any], folder: Path) -> Patch:
    """Return a file with some parts of its plan changed; what it leaves open is assumed."""
    from planner.api.improve import file_of

    (folder / "x").write_text(text)
    file = open_config(str(folder / "x"))
    open_ = {"recompute": "full", "seq_len": 2048, "micro_batch_size": 1, "zero_stage": 3}
    stated = {k: v for k, v in open_.items() if k not in file.read().settings}
    given = {**stated, "source": str(folder / "x"), "software": None}
    if "global_batch_size" not in file.read().settings:
        given["global_batch_size"] = 64
    answer = fit("llama-3.2-1b", "8xA100-80GB", **given)
    old = file_of(answer.scenario, answer.plan)
    made = replace(old.plan, offload="none", **plan)
    count = old.workload.global_batch_size // (made.micro_batch_size * made.data_parallel)
    new = Job(replace(old, plan=replace(made, num_microbatches=count)))
    return PatchedFile(file.target, text, "x", folder, Job(old)).patch(new)


def test_what_a_file_cannot_state_is_an_error(tmp_path: Path) -> None:
    script = SCRIPT.replace("$FLAGS", "$(cat flags)")
    with pytest.raises(InputError, match=r"no command with flags|no keys of a known"):
        changed(script, {"tensor_parallel": 2, "data_parallel": 4}, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("text", [DEEPSPEED, TRAINER, SCRIPT, TORCHTITAN, VICUNA, ENGINE])
def test_fit_prices_the_changed_file_as_promised(text: str, tmp_path: Path) -> None:
    from planner.api.improve import improve
    from planner.request.requests import PlanRequest

    (tmp_path / "x").write_text(text)
    given: dict[str, Any] = {"source": str(tmp_path / "x")}
    stated = open_config(given["source"]).read().settings
    given |= {} if "seq_len" in stated else {"seq_len": 2048}
    given |= (
        {} if {"global_batch_size", "num_microbatches"} & set(stated) else {"global_batch_size": 64}
    )
    found = improve(PlanRequest("llama-3.1-8b", "8xA100-80GB", **given))
    assert found.patch is not None
    assert found.after is not None
    (tmp_path / "x").write_text(found.patch.after)
    elsewhere = {name: value for name, (value, _) in found.patch.elsewhere.items()}
    again = fit("llama-3.1-8b", "8xA100-80GB", **{**given, **elsewhere})
    assert again.verdict == found.after.verdict
    assert again.assessment.time.step_seconds <= found.after.time.step_seconds * 1.001
    old, new = found.before, found.after
    assert (old.verdict != "fits" and new.fits) or new.time.step_seconds < old.time.step_seconds


def test_improve_needs_a_file_and_one_cluster(tmp_path: Path) -> None:
    from planner.api.improve import improve
    from planner.request.requests import PlanRequest

    (tmp_path / "x").write_text(DEEPSPEED)
    asked = PlanRequest("llama-2-7b", "8xA100-80GB")
    with pytest.raises(InputError, match="name it with --from"):
        improve(asked)
    for name, value in {"pareto": "time,memory", "objective": "cost", "to": "deepspeed"}.items():
        with pytest.raises(InputError, match=f"--improve: .*{name}"):
            improve(replace(asked, source=str(tmp_path / "x"), **{name: value}))
