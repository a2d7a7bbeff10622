"""Evaluation: loss and perplexity over fixed batches, forward passes only.

The stages, messages and collectives are those of training. Nothing is random (no dropout), so the
random state of training does not advance, and gradients are untouched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from executor.activity import ACTIVITY
from executor.data import Corpus
from executor.data.batch import Batch
from executor.parallel.pipeline import Pipeline
from executor.training.loop import FINISHED, Emit, TrainingHook
from executor.training.trainer import StepResult, Trainer


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Result of an evaluation, the same on every rank."""

    loss: float  # mean over the loss tokens
    tokens: int  # number of loss tokens

    @property
    def perplexity(self) -> float:
        """Return exp(loss); infinite on overflow."""
        return math.exp(self.loss) if self.loss < 700.0 else math.inf


class EvaluationHook(TrainingHook):
    """Evaluates every ``every`` steps and after the last one."""

    def __init__(
        self, trainer: Trainer, corpus: Corpus, emit: Emit, *, every: int | None, batches: int
    ) -> None:
        self.trainer, self.corpus, self.emit = trainer, corpus, emit
        self.every, self.batches = every, batches
        self.last = 0  # step of the last evaluation

    def after_step(self, result: StepResult) -> None:
        """Evaluate every ``every`` steps."""
        if self.every is not None and self.trainer.steps_done % self.every == 0:
            self._evaluate()

    def after_run(self, status: str) -> None:
        """Evaluate the final weights of a finished run, unless just done."""
        if status == FINISHED and self.last != self.trainer.steps_done:
            self._evaluate()

    def _evaluate(self) -> None:
        began = time.perf_counter()
        found = evaluate(self.trainer, self.corpus, self.batches)
        self.last = self.trainer.steps_done
        if dist.get_rank() != 0:
            return
        finite = math.isfinite(found.perplexity)
        self.emit(
            {
                "kind": "evaluation",
                "step": self.last,
                "loss": found.loss if math.isfinite(found.loss) else None,
                "perplexity": found.perplexity if finite else None,
                "tokens": found.tokens,
                "seconds": time.perf_counter() - began,
            }
        )


def evaluate(trainer: Trainer, corpus: Corpus, batches: int) -> EvaluationResult:
    """Return the mean loss over at most ``batches`` global batches; all ranks call this together.

    The batches are the first ones of the data, in its own order.
    """
    total = torch.zeros((), dtype=torch.float64, device=trainer.device)
    tokens = 0
    for stage in trainer.stages:
        stage.eval()
    try:
        with torch.no_grad():
            size = trainer.plan.global_batch_size
            for batch in corpus.evaluation(size, trainer.rows, batches=batches):
                ACTIVITY.beat()  # heartbeat: without ZeRO no collective runs here
                total += forward_only(trainer.pipeline, trainer.own(batch))
                tokens += batch.tokens
    finally:
        for stage in trainer.stages:
            stage.train()
            _reshard(stage)
    total /= trainer.loss_copies
    dist.all_reduce(total)
    return EvaluationResult(float(total) / max(1, tokens), tokens)


def forward_only(pipeline: Pipeline, batches: Sequence[Batch]) -> Tensor:
    """Run all micro-batches through the stages of this rank; return the sum of their losses.

    Stage by stage, so that a rank with several stages keeps the next one busy; both ends of every
    channel pass their messages in that order.
    """
    total = torch.zeros((), dtype=torch.float64, device=pipeline.device)
    local_inputs: dict[tuple[int, int], Tensor] = {}  # between two stages of this rank
    for index in sorted(pipeline.stages):
        stage = pipeline.stages[index]
        receives: list[Callable[[], Tensor]] = []
        for number, batch in enumerate(batches):
            received = None
            if index > 0 and index - 1 in pipeline.stages:
                received = local_inputs.pop((index, number))
            elif index > 0:
                while len(receives) < min(number + 2, len(batches)):  # receives ahead, to overlap
                    receives.append(_receive(pipeline, index))
                received = receives[number]()
                receives[number] = _consumed
            output = stage(batch, received)
            if stage.last:
                total += output
            elif index + 1 in pipeline.stages:
                local_inputs[index + 1, number] = output
            else:
                assert pipeline.channels is not None
                pipeline.channels.send("forward", index, index + 1, output)
    if pipeline.channels is not None:
        pipeline.channels.flush()
    return total


def _receive(pipeline: Pipeline, stage: int) -> Callable[[], Tensor]:
    assert pipeline.channels is not None
    return pipeline.channels.receive("forward", stage - 1, stage)


def _consumed() -> Tensor:
    raise AssertionError("a message is read once")


def _reshard(stage: torch.nn.Module) -> None:
    """Free the gathered weights: training gathers them according to its plan."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
