"""Resumption of a run from its newest intact checkpoint, under the same plan or another one.

Every rank calls these functions together. Weights, moments and step numbers are read in any layout;
batches and learning rates depend on the step alone, and dropout is seeded in every step from the
run's seed, the step and the rank's coordinates (``Trainer.seed_dropout``). Under the same plan a
run therefore continues bit for bit; under another one only dropout and the order of summation
differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from executor.activity import ACTIVITY
from executor.checkpoint.agreement import on_all_ranks, on_rank_0
from executor.checkpoint.format.folder import CheckpointFolder
from executor.checkpoint.format.index import check_file
from executor.checkpoint.format.tensor_file import DTYPES
from executor.checkpoint.loading.checkpoint_reader import Checkpoint
from executor.training.trainer import Trainer
from hardware_profiles.errors import InputError


@dataclass(frozen=True, slots=True)
class CheckedCheckpoint:
    """A checkpoint that was read and checked, and notes for the user."""

    checkpoint: Checkpoint
    notes: tuple[str, ...]


def first_intact(candidates: Sequence[Path], device: torch.device) -> CheckedCheckpoint | None:
    """Return the first intact checkpoint; every rank checks its share of the files.

    ``candidates``: of rank 0, the newest first. None if there are none; an InputError if none is
    usable.
    """
    names: list[str] = on_rank_0(lambda: [str(folder) for folder in candidates], device)
    notes: list[str] = []
    for name in names:
        try:
            checkpoint = _checked(Path(name), device)
        except InputError as error:
            notes.append(f"skipped {Path(name).name}: {error}")
            continue
        return CheckedCheckpoint(checkpoint, tuple(notes))
    if names:
        raise InputError(f"no usable checkpoint: {'; '.join(notes)}")
    return None


def _checked(folder: Path, device: torch.device) -> Checkpoint:
    """Open a checkpoint; raise the same error on every rank if it is damaged."""
    opened: list[Checkpoint] = []

    def check() -> None:
        checkpoint = Checkpoint(folder)
        for name in sorted(checkpoint.index.files)[dist.get_rank() :: dist.get_world_size()]:
            check_file(folder / name, checkpoint.index.files[name], ACTIVITY.beat)
        opened.append(checkpoint)

    on_all_ranks(check, device)
    return opened[0]


def set_aside_newer(folder: CheckpointFolder, chosen: Path) -> list[str]:
    """Rename the checkpoints that are newer than the chosen one; return notes.

    They do not belong to this run's history: a later run must not resume from them.
    """
    notes = []
    for newer in folder.complete():
        if newer.resolve() == chosen.resolve():
            break
        notes.append(f"{newer.name} renamed to {folder.set_aside(newer).name}")
    return notes


def restore(trainer: Trainer, checkpoint: Checkpoint) -> list[str]:
    """Restore the state of a trainer that started with the checkpoint's weights; return notes."""
    index, file, notes = checkpoint.index, trainer.file, []
    trainer.restore(index.trainer)
    saved: str = index.about["workload"]["optimizer"]
    if saved == file.workload.optimizer:
        for shard in trainer.optimizer.shards:
            ACTIVITY.beat()
            state = checkpoint.state(shard.layout.name, shard.pieces)
            dtype = DTYPES[index.tensors[shard.layout.name].dtype]
            if dtype != shard.local.dtype:  # saved under another precision
                state = {k: v.to(shard.local.dtype) if v.dim() else v for k, v in state.items()}
            trainer.optimizer.restore(shard, state)
    else:
        notes.append(f"optimizer {file.workload.optimizer} starts without state (saved: {saved})")
    return notes
