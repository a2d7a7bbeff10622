"""How a run begins: fresh, from a Hugging Face folder, or where a checkpoint left it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cost_models.plan_file import PlanFile
from executor.checkpoint.adapters import is_adapter
from executor.checkpoint.agree import on_rank_0
from executor.checkpoint.folder import SUBFOLDER, CheckpointFolder
from executor.checkpoint.hugging_face import HuggingFaceFolder
from executor.checkpoint.identity import changes, require_same_data, require_same_model
from executor.checkpoint.reader import Checkpoint
from executor.checkpoint.resume import choose, restore, set_newer_aside
from executor.checkpoint.settings import Saving, find
from executor.data import Corpus
from executor.model.layout import Layout, Pieces, Start, buffer_layouts, fresh_start, layouts
from executor.parallel.tensor_parallel import WHOLE
from executor.training.trainer import Trainer
from hardware_profiles.errors import InputError


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where the values come from that a trainer starts with; every rank has the same."""

    start: Start | None  # None: fresh values
    checkpoint: Checkpoint | None
    notes: tuple[str, ...]  # for the user

    def finish(self, trainer: Trainer) -> list[str]:
        """Set what a trainer that was made with ``start`` remembers; return notes."""
        return [] if self.checkpoint is None else restore(trainer, self.checkpoint)


def beginning(
    saving: Saving,
    run: Path | None,
    file: PlanFile,
    corpus: Corpus,
    options: Mapping[str, Any],
    device: torch.device,
) -> Beginning:
    """Find, check and open what a run begins with; every rank calls this together.

    ``run``: the folder of the run (of rank 0).
    """
    notes: list[str] = []
    if saving.resume is not None:
        resumed = _resumed(saving, run, file, corpus, options, device)
        if resumed is not None:
            return resumed
        notes.append(f"no checkpoint in {run}: the run begins at its first step")
    if saving.init_from is None:
        return Beginning(None, None, tuple(notes))
    folder = HuggingFaceFolder(saving.init_from)
    table = {**layouts(file.model, WHOLE), **buffer_layouts(file.model)}
    table = {name: layout for name, layout in table.items() if not is_adapter(name)}
    notes += folder.check(file.model.config, table)
    fresh = fresh_start(corpus.seed)

    def start(layout: Layout, pieces: Pieces) -> Tensor:
        return (fresh if is_adapter(layout.name) else folder.start)(layout, pieces)

    return Beginning(start, None, (*notes, f"weights of {saving.init_from}"))


def _resumed(
    saving: Saving,
    run: Path | None,
    file: PlanFile,
    corpus: Corpus,
    options: Mapping[str, Any],
    device: torch.device,
) -> Beginning | None:
    assert saving.resume is not None
    place = find(saving.resume, run)
    choice = choose(place.candidates, device)
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
        notes += on_rank_0(lambda: set_newer_aside(own, checkpoint.folder), device)
    notes += changes(index, file, options)
    return Beginning(
        checkpoint.start, checkpoint, (f"resumed from {where} at step {index.step}", *notes)
    )
