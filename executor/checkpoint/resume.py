"""Continues a run from its newest checkpoint that is whole, under the same plan or another one.

Every rank calls these functions together. Weights, moments and step numbers are read, whoever wrote
them; batches and learning rates depend on the step alone, and dropout is seeded in every step from
the run's seed, the step and the rank's place (``Trainer.seed_dropout``). So under the same plan a
run goes on bit for bit; under another one only dropout differs, and the order of summation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from executor.breadcrumbs import TRAIL
from executor.checkpoint.agree import on_rank_0, together
from executor.checkpoint.folder import CheckpointFolder
from executor.checkpoint.index import check_file
from executor.checkpoint.reader import Checkpoint
from executor.checkpoint.tensor_file import DTYPES
from executor.training.trainer import Trainer
from hardware_profiles.errors import InputError


@dataclass(frozen=True, slots=True)
class Choice:
    """A checkpoint that was read and checked, and what the user should know."""

    checkpoint: Checkpoint
    notes: tuple[str, ...]


def choose(candidates: Sequence[Path], device: torch.device) -> Choice | None:
    """Return the first checkpoint that is whole; every rank checks its share of the files.

    ``candidates``: of rank 0, the newest first. None if there are none; an InputError if none can
    be used.
    """
    names: list[str] = on_rank_0(lambda: [str(folder) for folder in candidates], device)
    notes: list[str] = []
    for name in names:
        try:
            checkpoint = _checked(Path(name), device)
        except InputError as error:
            notes.append(f"passed over {Path(name).name}: {error}")
            continue
        return Choice(checkpoint, tuple(notes))
    if names:
        raise InputError(f"no checkpoint can be used: {'; '.join(notes)}")
    return None


def _checked(folder: Path, device: torch.device) -> Checkpoint:
    """Open a checkpoint; raise the same error on every rank if it is not whole."""
    opened: list[Checkpoint] = []

    def check() -> None:
        checkpoint = Checkpoint(folder)
        for name in sorted(checkpoint.index.files)[dist.get_rank() :: dist.get_world_size()]:
            check_file(folder / name, checkpoint.index.files[name], TRAIL.beat)
        opened.append(checkpoint)

    together(check, device)
    return opened[0]


def set_newer_aside(folder: CheckpointFolder, chosen: Path) -> list[str]:
    """Rename the checkpoints that are newer than the chosen one; return what was done, in words.

    They belong to a past that this run does not share: a later run must not resume from them.
    """
    notes = []
    for newer in folder.complete():
        if newer.resolve() == chosen.resolve():
            break
        notes.append(f"{newer.name} is now called {folder.set_aside(newer).name}")
    return notes


def restore(trainer: Trainer, checkpoint: Checkpoint) -> list[str]:
    """Set what a trainer that started with the checkpoint's weights remembers; return notes."""
    index, file, notes = checkpoint.index, trainer.file, []
    trainer.restore(index.trainer)
    saved: str = index.about["workload"]["optimizer"]
    if saved == file.workload.optimizer:
        for held in trainer.optimizer.held:
            TRAIL.beat()
            state = checkpoint.state(held.layout.name, held.pieces)
            dtype = DTYPES[index.tensors[held.layout.name].dtype]
            if dtype != held.local.dtype:  # saved under another precision
                state = {k: v.to(held.local.dtype) if v.dim() else v for k, v in state.items()}
            trainer.optimizer.restore(held, state)
    else:
        notes.append(f"optimizer {file.workload.optimizer} starts anew (saved: {saved})")
    return notes
