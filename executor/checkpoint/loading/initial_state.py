"""Initial state of a run: random, from a Hugging Face folder, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cost_models.plan_file import PlanFile
from executor.checkpoint.agreement import on_rank_0
from executor.checkpoint.format.folder import CheckpointFolder
from executor.checkpoint.loading.checkpoint_reader import Checkpoint
from executor.checkpoint.loading.compatibility import (
    describe_changes,
    require_same_data,
    require_same_model,
)
from executor.checkpoint.loading.hugging_face import HuggingFaceFolder
from executor.checkpoint.loading.merged_adapters import is_adapter
from executor.checkpoint.loading.resume import first_intact, restore, set_aside_newer
from executor.checkpoint.options import CheckpointOptions, resume_source
from executor.data import Corpus
from executor.model.parameter_layout import (
    Initializer,
    ParameterLayout,
    Pieces,
    buffer_layouts,
    parameter_layouts,
    random_initializer,
)
from executor.parallel.tensor_parallel import UNSHARDED
from executor.run_folder import SUBFOLDER
from executor.training.trainer import Trainer
from hardware_profiles.errors import InputError


@dataclass(frozen=True, slots=True)
class InitialState:
    """Source of a trainer's initial weights and state; the same on every rank."""

    start: Initializer | None  # None: random values
    checkpoint: Checkpoint | None
    notes: tuple[str, ...]  # for the user

    def finish(self, trainer: Trainer) -> list[str]:
        """Restore the state of a trainer created with ``start``; return notes."""
        return [] if self.checkpoint is None else restore(trainer, self.checkpoint)


def initial_state(
    saving: CheckpointOptions,
    run: Path | None,
    file: PlanFile,
    corpus: Corpus,
    options: Mapping[str, Any],
    device: torch.device,
) -> InitialState:
    """Find, check and open the source of a run's initial state; every rank calls this together.

    ``run``: the folder of the run (of rank 0).
    """
    notes: list[str] = []
    if saving.resume is not None:
        resumed = _resumed(saving, run, file, corpus, options, device)
        if resumed is not None:
            return resumed
        notes.append(f"no checkpoint in {run}: the run begins at its first step")
    if saving.init_from is None:
        return InitialState(None, None, tuple(notes))
    folder = HuggingFaceFolder(saving.init_from)
    table = {**parameter_layouts(file.model, UNSHARDED), **buffer_layouts(file.model)}
    table = {name: layout for name, layout in table.items() if not is_adapter(name)}
    notes += folder.check(file.model.config, table)
    fresh = random_initializer(corpus.seed)

    def start(layout: ParameterLayout, pieces: Pieces) -> Tensor:
        return (fresh if is_adapter(layout.name) else folder.start)(layout, pieces)

    return InitialState(start, None, (*notes, f"weights of {saving.init_from}"))


def _resumed(
    saving: CheckpointOptions,
    run: Path | None,
    file: PlanFile,
    corpus: Corpus,
    options: Mapping[str, Any],
    device: torch.device,
) -> InitialState | None:
    assert saving.resume is not None
    place = resume_source(saving.resume, run)
    choice = first_intact(place.candidates, device)
    if choice is None:
        return None
    checkpoint, notes = choice.checkpoint, list(choice.notes)
    index, where = checkpoint.index, str(checkpoint.folder)
    require_same_model(index, file, where)
    if saving.allow_other_data:
        try:
            require_same_data(index, file, corpus, where)
        except InputError as error:
            notes.append(str(error).partition(" (--allow-other-data")[0])
    else:
        require_same_data(index, file, corpus, where)
    own = None if run is None else CheckpointFolder(run / SUBFOLDER)
    if own is not None and checkpoint.folder.parent.resolve() == own.path.resolve():
        notes += on_rank_0(lambda: set_aside_newer(own, checkpoint.folder), device)
    notes += describe_changes(index, file, options)
    return InitialState(
        checkpoint.start, checkpoint, (f"resumed from {where} at step {index.step}", *notes)
    )
