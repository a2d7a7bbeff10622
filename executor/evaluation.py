"""Evaluation: loss and perplexity over the same batches every time, forward passes only.

The stages, messages and collectives are those of training; nothing is random (no dropout), so no
random number of the training is used up, and no gradient is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from executor.data import Corpus
from executor.data.batch import Batch
from executor.pipeline import Pipeline
from executor.train import Trainer


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The same on every rank."""

    loss: float  # mean over the tokens that count
    tokens: int  # that count

    @property
    def perplexity(self) -> float:
        """Return exp(loss); infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700.0 else math.inf


def evaluate(trainer: Trainer, corpus: Corpus, batches: int, first_batch: int = 0) -> Evaluated:
    """Return the mean loss over ``batches`` global batches; all ranks call this together."""
    total = torch.zeros((), dtype=torch.float64, device=trainer.device)
    tokens = 0
    for stage in trainer.stages:
        stage.eval()
    try:
        with torch.no_grad():
            for number in range(first_batch, first_batch + batches):
                batch = corpus.batch(number, trainer.plan.global_batch_size, trainer.rows)
                total += forward_only(trainer.pipeline, trainer.own(batch))
                tokens += batch.tokens
    finally:
        for stage in trainer.stages:
            stage.train()
            _reshard(stage)
    total /= trainer.loss_copies
    dist.all_reduce(total)
    return Evaluated(float(total) / max(1, tokens), tokens)


def forward_only(pipeline: Pipeline, batches: Sequence[Batch]) -> Tensor:
    """Send all micro-batches through the stages of this rank; return the sum of their losses.

    Stage by stage, so that a rank with several stages keeps the next one fed; both ends of every
    channel pass their messages in that order.
    """
    total = torch.zeros((), dtype=torch.float64, device=pipeline.device)
    handed_on: dict[tuple[int, int], Tensor] = {}  # between two stages of this rank
    for index in sorted(pipeline.stages):
        stage = pipeline.stages[index]
        coming: list[Callable[[], Tensor]] = []
        for number, batch in enumerate(batches):
            received = None
            if index > 0 and index - 1 in pipeline.stages:
                received = handed_on.pop((index, number))
            elif index > 0:
                while len(coming) < min(number + 2, len(batches)):  # the next travels meanwhile
                    coming.append(_receive(pipeline, index))
                received = coming[number]()
                coming[number] = _gone
            output = stage(batch, received)
            if stage.last:
                total += output
            elif index + 1 in pipeline.stages:
                handed_on[index + 1, number] = output
            else:
                assert pipeline.channels is not None
                pipeline.channels.send("forward", index, index + 1, output)
    if pipeline.channels is not None:
        pipeline.channels.flush()
    return total


def _receive(pipeline: Pipeline, stage: int) -> Callable[[], Tensor]:
    assert pipeline.channels is not None
    return pipeline.channels.receive("forward", stage - 1, stage)


def _gone() -> Tensor:
    raise AssertionError("a message is read once")


def _reshard(stage: torch.nn.Module) -> None:
    """Free the gathered weights: training gathers them where its plan says so."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
