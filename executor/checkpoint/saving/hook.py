"""Training hook that saves checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from executor.checkpoint.loading.initial_state import InitialState
from executor.checkpoint.options import CheckpointOptions
from executor.checkpoint.saving.manager import CheckpointManager
from executor.run_folder import SUBFOLDER
from executor.training.loop import STOPPED, TrainingHook
from executor.training.trainer import StepResult, Trainer


class CheckpointHook(TrainingHook):
    """Saves regularly and at the end; without regular saving, only when the run is stopped."""

    def __init__(self, make: Callable[[], CheckpointManager], *, regular: bool) -> None:
        self.make = make
        self.manager = make() if regular else None

    def after_step(self, result: StepResult) -> None:
        """Save every ``every`` steps."""
        if self.manager is not None:
            self.manager.maybe_save()

    def after_run(self, status: str) -> None:
        """Save the last state, and wait until it is on the disk."""
        if self.manager is None and status == STOPPED:
            self.manager = self.make()
        if self.manager is not None:
            self.manager.save_now()

    def settle(self, seconds: float) -> None:
        """Give a checkpoint in progress some time, after a failure of the run."""
        if self.manager is not None:
            self.manager.settle(seconds)


def checkpoint_hook(
    trainer: Trainer,
    run: Path,
    saving: CheckpointOptions,
    begun: InitialState,
    about: Mapping[str, Any],
) -> CheckpointHook:
    """Return the hook for a run's folder; every rank calls this together."""

    def make() -> CheckpointManager:
        manager = CheckpointManager(
            trainer,
            run / SUBFOLDER,
            every=saving.checkpoint_every,
            keep=saving.keep,
            keep_every=saving.keep_every,
            about=about,
        )
        if begun.checkpoint is not None:
            manager.resumed_from(begun.checkpoint.folder)
        return manager

    return CheckpointHook(
        make, regular=saving.checkpoint_every is not None or begun.checkpoint is not None
    )
