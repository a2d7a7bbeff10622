"""Saves a run's checkpoints during training.

A checkpoint is taken between two steps: the parts that a rank writes are copied to host memory, and
a thread writes them while training continues. Training waits for the disk only when the next
checkpoint is due before the last one is finished, and at the end of the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from cost_models.memory.optimizer_states import OPTIMIZER_TRAITS
from executor.activity import ACTIVITY, BACKGROUND_THREAD
from executor.checkpoint.format.checkpoint_errors import CheckpointError
from executor.checkpoint.format.folder import CheckpointFolder
from executor.checkpoint.loading.initial_state import InitialState
from executor.checkpoint.options import CheckpointOptions
from executor.checkpoint.saving.assignment import assigned_shards
from executor.checkpoint.saving.writer import CheckpointWriter, Files, Snapshot
from executor.dtypes import master_dtype
from executor.run_folder import SUBFOLDER
from executor.training.loop import STOPPED, TrainingHook
from executor.training.trainer import StepResult, Trainer

BEAT_SECONDS: Final = 1.0


class CheckpointManager:
    """The checkpoints of one run; every rank makes the same calls, between steps."""

    def __init__(
        self,
        trainer: Trainer,
        folder: Path,
        *,
        every: int | None,
        keep: int = 2,
        keep_every: int | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Create the folder; ``about``: JSON values for the index (data, options, environment)."""
        self.trainer, self.every = trainer, every
        share = assigned_shards([*trainer.shards, *trainer.buffers], trainer.device)
        self.snapshot = Snapshot(trainer, share)
        self.writer = CheckpointWriter(
            CheckpointFolder(folder),
            share,
            {**_identity(trainer), **(about or {})},
            keep=keep,
            keep_every=keep_every,
        )
        self.thread: threading.Thread | None = None
        self.failure: CheckpointError | None = None
        self.saved_step: int | None = None  # step that is saved, or being saved
        self.newest: Path | None = None  # the newest complete checkpoint
        self.writer.prepare(_expected_bytes(trainer))

    def resumed_from(self, folder: Path) -> None:
        """Record the checkpoint the trainer resumed from.

        In this folder it need not be saved again.
        """
        self.newest = folder
        if folder.parent.resolve() == self.writer.folder.path.resolve():
            self.saved_step = self.trainer.steps_done

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint of this run."""
        return self.newest

    def maybe_save(self) -> bool:
        """Save after a step if due; raise a CheckpointError if an earlier one failed."""
        self._raise_failure()
        step = self.trainer.steps_done
        if self.every is None or step % self.every or step == self.saved_step:
            return False
        self._start()
        return True

    def save_now(self) -> Path:
        """Save the current state unless saved, wait for the disk, return the folder."""
        if self.trainer.steps_done != self.saved_step:
            self._start()
        self.wait()
        assert self.newest is not None
        return self.newest

    def wait(self) -> None:
        """Wait for the checkpoint in progress; raise a CheckpointError if it failed."""
        while self.thread is not None:
            self.thread.join(timeout=BEAT_SECONDS)
            ACTIVITY.beat()  # heartbeat: a slow disk is not a hang
            if not self.thread.is_alive():
                self.thread = None
        self._raise_failure()

    def settle(self, seconds: float) -> None:
        """Give the checkpoint in progress some time; for a run that ends with an error anyway."""
        if self.thread is not None:
            self.thread.join(timeout=seconds)

    def _start(self) -> None:
        """Copy the state, and start a thread that writes it."""
        self.wait()
        step, state = self.trainer.steps_done, self.trainer.state()
        files = self.snapshot.take()
        self.saved_step = step
        arguments = (step, state, files)
        self.thread = threading.Thread(
            target=self._write, args=arguments, name=BACKGROUND_THREAD, daemon=True
        )
        self.thread.start()

    def _write(self, step: int, state: Mapping[str, Any], files: Files) -> None:
        """Write a checkpoint; store a failure for the training thread."""
        try:
            self.newest = self.writer.write(step, state, files)
        except Exception as error:
            last = f"the last complete one is {self.newest}" if self.newest else "there is none yet"
            self.failure = CheckpointError(f"checkpoint after step {step}: {error}; {last}")

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure


def _identity(trainer: Trainer) -> dict[str, Any]:
    """Return the model, workload and layout for the index."""
    file = trainer.file
    return {
        "model": {"name": file.model.name, "config": dict(file.model.config)},
        "workload": file.workload.to_dict(),
        "plan": file.plan.to_dict(),
        "layer_ranges": [list(pair) for pair in file.layer_ranges],
        "stage_recompute_layers": file.stage_recompute_layers,
        "device": trainer.device.type,
    }


def _expected_bytes(trainer: Trainer) -> float:
    """Return the approximate size of a checkpoint of the whole model in bytes."""
    workload = trainer.file.workload
    tensors = 1.0 + OPTIMIZER_TRAITS[workload.optimizer].states
    each: int = master_dtype(workload).itemsize
    return float(trainer.file.model.num_parameters) * tensors * each


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
