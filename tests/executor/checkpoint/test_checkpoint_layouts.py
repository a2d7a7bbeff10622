"""What was saved under one plan continues under the same plan bit for bit, and under any other."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from cost_models.plan import Plan
from cost_models.plan_file import PlanFile
from executor.checkpoint.folder import CheckpointFolder
from executor.checkpoint.manager import CheckpointManager
from executor.checkpoint.resume import choose, restore
from executor.forked import run_forked
from executor.mesh import local_device
from executor.train import Trainer
from tests.executor.tiny import random_batch, tiny

pytestmark = pytest.mark.distributed

STEPS, SAVED = 5, 2
DROPOUT = {"resid_pdrop": 0.2, "attn_pdrop": 0.3, "embd_pdrop": 0.1}


def _digest(trainer: Trainer) -> str:
    """Return a hash of all that this rank holds."""
    found = hashlib.sha256()
    for held in trainer.held:
        state = trainer.optimizer.state(held)
        for tensor in (held.local, *(state[key] for key in sorted(state))):
            found.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def train(rank: int, file: PlanFile, folder: str, save_at: int | None, resume: bool) -> Any:
    """Train to the last step, from the newest checkpoint or from the start; save on the way."""
    found = choose(CheckpointFolder(Path(folder)).complete(), local_device()) if resume else None
    start = found.checkpoint.start if found else None
    trainer = Trainer(file, seed=3, learning_rate=1e-2, start=start)
    if found:
        restore(trainer, found.checkpoint)
    manager = CheckpointManager(trainer, Path(folder), every=save_at)
    losses = []
    while trainer.steps_done < STEPS:
        losses.append(trainer.step(random_batch(file, seed=trainer.steps_done)).loss)
        if trainer.steps_done == save_at:
            assert manager.maybe_save()
    manager.wait()
    return {"losses": losses, "digest": _digest(trainer)}


def run(file: PlanFile, folder: Path, save_at: int | None, *, resume: bool) -> list[Any]:
    return run_forked(train, file.plan.world_size, file, str(folder), save_at, resume)


PLANS = {
    "dp4": Plan(4, zero_stage=0, micro_batch_size=2),
    "tp2·pp2": Plan(1, 2, 2, sequence_parallel=True, micro_batch_size=4, num_microbatches=2),
    "zero3·tp2": Plan(2, 2, zero_stage=3, micro_batch_size=4),
    "pp2·v2·zero1": Plan(
        2, 1, 2, 2, "interleaved_1f1b", zero_stage=1, micro_batch_size=2, num_microbatches=2
    ),
    "hsdp": Plan(4, dp_replicate=2, zero_stage=2, micro_batch_size=2),
    "single": Plan(micro_batch_size=8),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_same_plan_continues_bit_for_bit(name: str, tmp_path: Path):
    file = tiny(PLANS[name], "gpt2", tied=True, optimizer="adamw", precision="fp32", **DROPOUT)
    whole = run(file, tmp_path, SAVED, resume=False)
    resumed = run(file, tmp_path, None, resume=True)
    for before, after in zip(whole, resumed, strict=True):
        assert after["losses"] == before["losses"][SAVED:]
        assert after["digest"] == before["digest"]


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("dp4", "tp2·pp2"),
        ("tp2·pp2", "zero3·tp2"),
        ("zero3·tp2", "pp2·v2·zero1"),
        ("pp2·v2·zero1", "hsdp"),
        ("hsdp", "single"),
        ("single", "dp4"),
    ],
)
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_another_plan_continues_with_equal_losses(
    family: str, saved: str, resumed: str, tmp_path: Path
):
    options: dict[str, Any] = {"tied": True, "optimizer": "adamw", "vocab_size": 131}
    options |= dict.fromkeys(DROPOUT, 0.0) if family == "gpt2" else {}
    before = tiny(PLANS[saved], family, **options)
    after = tiny(PLANS[resumed], family, **options)
    whole = run(before, tmp_path, SAVED, resume=False)[0]["losses"]
    found = run(after, tmp_path, None, resume=True)[0]["losses"]
    assert found == pytest.approx(whole[SAVED:], rel=1e-12)
