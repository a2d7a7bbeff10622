"""What the tests of checkpoints run in forked ranks: train, save, resume."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from cost_models.plan_file import PlanFile
from executor.checkpoint.format.folder import CheckpointFolder
from executor.checkpoint.loading.resume import CheckedCheckpoint, first_intact, restore
from executor.checkpoint.saving.manager import CheckpointManager
from executor.parallel.mesh import local_device
from executor.processes.fork import run_forked
from executor.training.trainer import Trainer
from tests.executor.tiny import random_batch

SEED, LEARNING_RATE = 3, 1e-2


def digest(trainer: Trainer) -> str:
    """Return a hash of all that this rank holds."""
    found = hashlib.sha256()
    for shard in trainer.shards:
        state = trainer.optimizer.state(shard)
        for tensor in (shard.local, *(state[key] for key in sorted(state))):
            found.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def begin(file: PlanFile, folder: Path) -> tuple[Trainer, CheckedCheckpoint | None]:
    """Return a trainer that continues from the newest checkpoint, if there is one."""
    found = first_intact(CheckpointFolder(folder).complete(), local_device())
    start = found.checkpoint.start if found else None
    trainer = Trainer(file, seed=SEED, learning_rate=LEARNING_RATE, start=start)
    if found:
        restore(trainer, found.checkpoint)
    return trainer, found


def step(trainer: Trainer) -> float:
    """Train one step on a batch that depends on the step alone."""
    return trainer.step(random_batch(trainer.file, seed=trainer.steps_done)).loss


def train(rank: int, file: PlanFile, folder: str, steps: int, every: int | None) -> dict[str, Any]:
    """Train to a step, from the newest checkpoint or from the start; save on the way."""
    trainer, found = begin(file, Path(folder))
    manager = CheckpointManager(trainer, Path(folder), every=every, keep=2)
    losses = []
    while trainer.steps_done < steps:
        losses.append(step(trainer))
        manager.maybe_save()
    manager.wait()
    notes = list(found.notes) if found else []
    return {"losses": losses, "digest": digest(trainer), "notes": notes}


def trained(
    file: PlanFile, folder: Path, steps: int, every: int | None = None
) -> list[dict[str, Any]]:
    """Run ``train`` on the plan's ranks."""
    return run_forked(train, file.plan.world_size, file, str(folder), steps, every)
