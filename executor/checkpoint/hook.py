"""Saves checkpoints around the steps of the loop."""

from __future__ import annotations

from collections.abc import Callable

from executor.checkpoint.manager import CheckpointManager
from executor.loop import STOPPED, Hook
from executor.train import StepResult


class SavingHook(Hook):
    """Saves where it is due and at the end; also where a run that saves nothing is told to stop."""

    def __init__(self, make: Callable[[], CheckpointManager], *, regular: bool) -> None:
        self.make = make
        self.manager = make() if regular else None

    def after_step(self, result: StepResult) -> None:
        """Save where it is due."""
        if self.manager is not None:
            self.manager.maybe_save()

    def settle(self, seconds: float) -> None:
        """Give the checkpoint under way some time, where the run failed."""
        if self.manager is not None:
            self.manager.settle(seconds)

    def after_run(self, status: str) -> None:
        """Save the last state, and wait until it is on the disk."""
        if self.manager is None and status == STOPPED:
            self.manager = self.make()
        if self.manager is not None:
            self.manager.save_now()
