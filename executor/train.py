"""Training steps of one plan on this process: forward, backward, gradients, update."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.plan_file import PlanFile
from executor.data.batch import Batch
from executor.data_parallel import distribute, synchronise_on_gpu
from executor.families import FAMILIES
from executor.layout import Start, fresh_start
from executor.mesh import Grid, connect, leave, local_device
from executor.models import COMPUTE_DTYPE, Stage
from executor.optimizer import (
    Held,
    Optimizer,
    clip,
    complete_gradients,
    held_parameters,
    local_square_sum,
    sum_tied_gradients,
)
from executor.pipeline import Pipeline
from executor.support import check_supported
from executor.tensor_parallel import TensorAxis
from hardware_profiles.errors import InputError


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step gave; the same on every rank, but for the seconds."""

    loss: float  # mean over the tokens of the batch
    gradient_norm: float  # of the whole model, before clipping
    seconds: dict[str, float]  # forward_backward, gradients, optimizer


class Trainer:
    """One process's part of a training job; every rank makes the same calls."""

    def __init__(
        self,
        file: PlanFile,
        *,
        seed: int = 0,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        max_grad_norm: float | None = 1.0,
        warm_up_steps: int = 0,
        device: torch.device | None = None,
        start: Start | None = None,
    ) -> None:
        check_supported(file)
        self.file, self.plan, self.seed = file, file.plan, seed
        self.learning_rate, self.max_grad_norm = learning_rate, max_grad_norm
        self.warm_up_steps, self.steps_done = warm_up_steps, 0
        self.device = device or local_device()
        connect(self.device)
        self.grid = Grid.of(self.plan, self.device)
        self.axis = TensorAxis(
            group=self.grid.group("tensor"),
            size=self.plan.tensor_parallel,
            rank=self.grid.rank("tensor"),
            sequence_parallel=self.plan.sequence_parallel,
        )
        precision = file.workload.precision
        self.stages: list[Stage] = []
        self.held: list[Held] = []
        for index in range(
            self.grid.rank("pipeline"), self.plan.num_stages, self.plan.pipeline_parallel
        ):
            stage = Stage(file, index, self.axis)
            rows = distribute(stage, self.grid, precision)
            stage.materialise(self.device, start or fresh_start(seed), rows)
            self.stages.append(stage)
            self.held += held_parameters(stage, self.grid)
        family = FAMILIES[file.model.family]
        self.tied_name = f"{family.tokens}.weight" if file.model.tie_embeddings else None
        tokens = file.workload.seq_len
        if self.plan.sequence_parallel:
            tokens //= self.plan.tensor_parallel
        message = (self.plan.micro_batch_size, tokens, file.model.hidden_size)
        self.pipeline = Pipeline(self.stages, self.grid, message, COMPUTE_DTYPE[precision])
        self.optimizer = Optimizer(self.held, file.workload.optimizer, learning_rate, weight_decay)
        self.seed_dropout()

    @property
    def rows(self) -> range:
        """The rows of a global batch that this rank trains on."""
        share = self.plan.global_batch_size // self.plan.data_parallel
        first = self.grid.rank("data") * share
        return range(first, first + share)

    def step(self, batch: Batch) -> StepResult:
        """Train on one global batch, of which a rank needs its own ``rows`` only."""
        marks = [self._mark()]
        loss = self.accumulate(batch)
        marks.append(self._mark())
        loss, norm = self.finish_gradients(loss)
        if self.max_grad_norm is not None:
            clip(self.held, norm, self.max_grad_norm)
        marks.append(self._mark())
        self.update()
        marks.append(self._mark())
        # the only place where the host waits for a GPU
        synchronise_on_gpu(self.device)
        names = ("forward_backward", "gradients", "optimizer")
        seconds = dict(zip(names, starmap(_seconds, pairwise(marks)), strict=True))
        return StepResult(float(loss), float(norm), seconds)

    def accumulate(self, batch: Batch) -> Tensor:
        """Run all micro-batches forward and backward; return this rank's summand of the loss."""
        own = batch.rows(self.rows.start, self.rows.stop)
        expected = (len(self.rows), self.file.workload.seq_len)
        shapes = {tuple(x.shape) for x in (own.inputs, own.labels, own.starts) if x is not None}
        if shapes != {expected}:
            raise InputError(
                f"rows of {sorted(shapes)} for a rank that trains on (rows, seq_len) = {expected}"
            )
        return self.pipeline.run(own.to(self.device).split(self.plan.micro_batch_size))

    def finish_gradients(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Complete the gradients; return the loss and the gradient norm of the whole model."""
        complete_gradients(self.held, self.axis)
        sum_tied_gradients(self.held, self.grid, self.tied_name)
        # tensor-parallel ranks compute the same loss: each counts for its share
        totals = torch.stack(
            [loss / self.plan.tensor_parallel, local_square_sum(self.held, self.device)]
        )
        dist.all_reduce(totals)
        return totals[0], totals[1].sqrt()

    def update(self) -> None:
        """Update the weights and drop the gradients."""
        self.steps_done += 1
        warm = min(1.0, self.steps_done / self.warm_up_steps) if self.warm_up_steps else 1.0
        self.optimizer.step(self.learning_rate * warm)
        for stage in self.stages:
            stage.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Leave the process group."""
        leave()

    def _mark(self) -> Any:
        """Return this moment: of the host's clock, or of what a GPU was asked to do so far."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seed_dropout(self) -> None:
        """Seed the coming steps' dropout, from the seed, the steps done and this rank's place.

        Ranks with different tokens draw different masks; ranks with the same tokens the same.
        """
        tensor_rank = self.axis.rank if self.plan.sequence_parallel else 0
        place = (self.grid.rank("pipeline"), self.grid.rank("data"), tensor_rank)
        text = repr((self.seed, self.steps_done, *place))
        torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))


def _seconds(begin: Any, end: Any) -> float:
    """Return the seconds between two marks that lie in the past."""
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1e3
