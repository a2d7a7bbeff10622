"""Saves checkpoints around the steps of the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from executor.checkpoint.begin import Beginning
from executor.checkpoint.folder import SUBFOLDER
from executor.checkpoint.manager import CheckpointManager
from executor.checkpoint.settings import Saving
from executor.training.loop import STOPPED, Hook
from executor.training.trainer import StepResult, Trainer


class SavingHook(Hook):
    """Saves where it is due and at the end; also where a run that saves nothing is told to stop."""

    def __init__(self, make: Callable[[], CheckpointManager], *, regular: bool) -> None:
        self.make = make
        self.manager = make() if regular else None

    def after_step(self, result: StepResult) -> None:
        """Save where it is due."""
        if self.manager is not None:
            self.manager.maybe_save()

    def after_run(self, status: str) -> None:
        """Save the last state, and wait until it is on the disk."""
        if self.manager is None and status == STOPPED:
            self.manager = self.make()
        if self.manager is not None:
            self.manager.save_now()

    def settle(self, seconds: float) -> None:
        """Give the checkpoint under way some time, where the run failed."""
        if self.manager is not None:
            self.manager.settle(seconds)


def saving_hook(
    trainer: Trainer, run: Path, saving: Saving, begun: Beginning, about: Mapping[str, Any]
) -> SavingHook:
    """Return the hook for a run's folder; every rank calls this together."""

    def make() -> CheckpointManager:
        manager = CheckpointManager(
            trainer,
            run / SUBFOLDER,
            every=saving.every,
            keep=saving.keep,
            keep_every=saving.keep_every,
            about=about,
        )
        if begun.checkpoint is not None:
            manager.resumed_from(begun.checkpoint.folder)
        return manager

    return SavingHook(make, regular=saving.every is not None or begun.checkpoint is not None)
