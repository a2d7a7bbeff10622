"""The training loop of one rank: reads batches, runs steps, calls hooks.

Display and storage happen elsewhere: rank 0 emits events, and the process that started the run
(``recorder``) writes them. A step costs little more than its computation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch.distributed as dist

from executor.activity import ACTIVITY
from executor.data import Corpus
from executor.data.batch import Batch
from executor.data.prefetch import prefetched
from executor.parallel.mesh import gather_json
from executor.training.locate_nan import Finding, locate_nonfinite
from executor.training.step_measurement import environment, measured_step, sampled_step
from executor.training.trainer import StepResult, Trainer
from hardware_profiles.errors import RunError

Emit = Callable[[dict[str, Any]], None]
FINISHED: Final = "finished"
PLAIN, SAMPLED, MEASURED = "plain", "sampled", "measured"  # how a step is measured
STOPPED: Final = "stopped"  # on request, after a complete step


class TrainingHook:
    """Callbacks around the steps; every rank has the same hooks in the same order.

    ``trainer.steps_done`` is the number of completed steps, in ``before_step`` the index of the
    next step, from 0. To stop the run, set ``trainer.stop_requested`` on any rank: all ranks then
    see ``result.stop`` in the same step, and leave the loop after its hooks.
    """

    def before_run(self) -> None:
        """Prepare the run; ``trainer.steps_done`` is not 0 in a resumed run."""

    def before_step(self) -> None:
        """Act before the batch of a step is read."""

    def after_step(self, result: StepResult) -> None:
        """Act after the weights were updated with finite gradients."""

    def after_run(self, status: str) -> None:
        """Act after the last step; ``status`` is ``finished`` or ``stopped``."""


class TrainingLoop:
    """Trains from ``trainer.steps_done`` to ``steps``.

    The second step is measured operator by operator, which slows it: its time is not counted, nor
    is that of the first step (cold caches). In every ``sample_every``-th step all ranks report
    their communication waits and memory; that costs a small gather after it.
    """

    def __init__(
        self,
        trainer: Trainer,
        corpus: Corpus,
        *,
        steps: int,
        emit: Emit,
        sample_every: int = 0,
        hooks: Sequence[TrainingHook] = (),
    ) -> None:
        self.trainer, self.corpus, self.steps, self.hooks = trainer, corpus, steps, hooks
        self.sample_every = sample_every
        self.emit = emit if dist.get_rank() == 0 else lambda event: None
        self.tokens_per_step = trainer.file.workload.tokens_per_step

    def run(self) -> str:
        """Train; return the final status."""
        trainer = self.trainer
        first, status = trainer.steps_done, FINISHED
        measured = min(first + 1, self.steps - 1)
        self.emit(
            {"kind": "start", "first_step": first, "environment": environment(trainer.device)}
        )
        for hook in self.hooks:
            hook.before_run()
        steps = range(trainer.steps_done, self.steps)
        size, rows = trainer.plan.global_batch_size, trainer.rows
        with prefetched(self.corpus, size, rows, steps) as batches:
            for step in steps:
                timed = step > first and step != measured
                sample = timed and bool(self.sample_every) and step % self.sample_every == 0
                kind = MEASURED if step == measured else SAMPLED if sample else PLAIN
                result = self._step(batches, kind, timed=timed)
                for hook in self.hooks:
                    hook.after_step(result)
                if result.stop and trainer.steps_done < self.steps:
                    status = STOPPED
                    break
        for hook in self.hooks:
            hook.after_run(status)
        return status

    def _step(self, batches: Iterator[Batch], kind: str, *, timed: bool) -> StepResult:
        """Train one step and emit its event."""
        trainer, began = self.trainer, time.perf_counter()
        ACTIVITY.begin(trainer.steps_done + 1)
        for hook in self.hooks:
            hook.before_step()
        step = trainer.steps_done
        batch = next(batches)
        data_seconds = time.perf_counter() - began
        sample: dict[str, Any] = {}
        if kind == MEASURED:
            result, own = measured_step(trainer, batch)
            self.emit({"kind": "measured", "ranks": gather_json(own, trainer.device)})
        elif kind == SAMPLED:
            result, own = sampled_step(trainer, batch)
            sample = {"ranks": gather_json(own, trainer.device)}
        else:
            result = trainer.step(batch)
        seconds = {"data": data_seconds, **result.seconds}
        total = sum(seconds.values())
        self.emit(
            {
                "kind": "step",
                "step": step + 1,
                "loss": result.loss if math.isfinite(result.loss) else None,
                "learning_rate": result.learning_rate,
                "gradient_norm": (
                    result.gradient_norm if math.isfinite(result.gradient_norm) else None
                ),
                "loss_scale": result.loss_scale,
                "skipped_steps": 0 if trainer.scaler is None else trainer.scaler.skipped,
                "tokens": (step + 1) * self.tokens_per_step,
                "seconds": total,
                "tokens_per_second": self.tokens_per_step / total,
                "phases": seconds,
                "timed": timed,
                **sample,
            }
        )
        if result.failed:
            raise RunError(_failure(step, result, locate_nonfinite(trainer, batch)))
        return result


def _failure(step: int, result: StepResult, found: list[Finding]) -> str:
    """Return the message for a step that is not finite; the same on every rank."""
    what, value = "loss", result.loss
    if math.isfinite(result.loss):
        what, value = "gradient norm", result.gradient_norm
    where = found[0].describe() if found else "every weight, value and gradient is finite in itself"
    others = len({finding.rank for finding in found}) - 1
    if others > 0:
        where += f" (and on {others} more ranks)" if others > 1 else " (and on one more rank)"
    return (
        f"step {step + 1}: the {what} is {value}; {where}; the weights are those before the step "
        f"(learning rate {result.learning_rate:g})"
    )
