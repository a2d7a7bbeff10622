"""Training steps of one plan on this process: forward, backward, gradients, update."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.model.lora import embedding_is_frozen
from cost_models.partition.schedules import SPLIT, rank_of_stage, stages_of_rank
from cost_models.partition.stages import states_between
from cost_models.plan_file import PlanFile
from executor.config.learning_rate import LearningRate
from executor.data.batch import Batch
from executor.dtypes import COMPUTE_DTYPE
from executor.model.encoder_decoder import EncoderDecoderStage
from executor.model.families import FAMILIES
from executor.model.layout import Start, fresh_start
from executor.model.shared_tensors import names_by_stage
from executor.model.stage import Stage
from executor.ops import fp8, host_reads
from executor.parallel.context_parallel import ContextAxis
from executor.parallel.data_parallel import add_up_gradients, distribute, synchronise_on_gpu
from executor.parallel.expert_parallel import ExpertAxis
from executor.parallel.mesh import Grid, connect, leave, local_device
from executor.parallel.pipeline import Pipeline
from executor.parallel.tensor_parallel import TensorAxis
from executor.support import check_supported
from executor.training.loss_scaling import LossScaler
from executor.training.offloaded_optimizer import OffloadedOptimizer
from executor.training.optimizer import (
    Held,
    Optimizer,
    clipping_factor,
    complete_gradients,
    held_buffers,
    held_parameters,
    local_square_sum,
    sum_shared_gradients,
)
from hardware_profiles.errors import InputError


class Totals(NamedTuple):
    """What a step adds up over all ranks, in one all_reduce."""

    loss: Tensor  # mean over the tokens of the batch
    gradient_norm: Tensor  # of the whole model, before clipping
    stop_votes: Tensor  # ranks that want to stop


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step gave; the same on every rank, but for the seconds.

    Where loss or norm are not finite the weights were not updated: the step was ``skipped``, or it
    ``failed``, and then the weights still have its gradients.
    """

    loss: float  # mean over the tokens of the batch
    gradient_norm: float  # of the whole model, before clipping
    learning_rate: float
    stop: bool  # some rank wants to stop after this step
    loss_scale: float | None  # fp16: by which the loss was multiplied
    skipped: bool  # fp16: the gradients overflowed; the next scale is smaller
    seconds: dict[str, float]  # forward_backward, gradients, optimizer

    @property
    def failed(self) -> bool:
        """Whether there is no use in going on."""
        finite = math.isfinite(self.loss) and math.isfinite(self.gradient_norm)
        return not finite and not self.skipped


class Trainer:
    """One process's part of a training job; every rank makes the same calls."""

    def __init__(
        self,
        file: PlanFile,
        *,
        seed: int = 0,
        learning_rate: LearningRate | float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 0.1,
        max_grad_norm: float | None = 1.0,
        device: torch.device | None = None,
        start: Start | None = None,
    ) -> None:
        check_supported(file)
        self.file, self.plan, self.seed = file, file.plan, seed
        if not isinstance(learning_rate, LearningRate):
            learning_rate = LearningRate(learning_rate)
        self.learning_rate, self.max_grad_norm = learning_rate, max_grad_norm
        self.steps_done = 0
        self.stop_requested = False  # any rank may set it; all hear of it with the next step
        self.device = device or local_device()
        if file.workload.precision == "fp8":
            fp8.check_device(self.device)
        connect(self.device, file.rank_order)
        self.grid = Grid.of(self.plan, self.device)
        self.axis = TensorAxis(
            group=self.grid.group("tensor"),
            size=self.plan.tensor_parallel,
            rank=self.grid.rank("tensor"),
            sequence_parallel=self.plan.sequence_parallel,
            weights_later=self.plan.pipeline_schedule in SPLIT,
        )
        apart = "expert" in self.grid.by_axis
        self.experts = ExpertAxis(
            group=self.grid.group("expert") if apart else None,
            size=self.plan.expert_parallel,
            rank=self.grid.rank("expert") if apart else 0,
            cut_over_tensor=self.plan.expert_tensor_parallel,
        )
        self.context = ContextAxis(
            group=self.grid.group("context"),
            size=self.plan.context_parallel,
            rank=self.grid.rank("context"),
            method=self.plan.context_parallel_method,
        )
        precision = file.workload.precision
        self.scaler = LossScaler() if precision == "fp16" else None
        self.stages: list[Stage] = []
        self.held: list[Held] = []
        self.buffers: list[Held] = []  # of the model's state, kept in checkpoints
        for index in stages_of_rank(self.plan, self.grid.rank("pipeline")):
            if FAMILIES[file.model.family].encoder_decoder:
                stage: Stage = EncoderDecoderStage(file, index, self.axis)
            else:
                stage = Stage(file, index, self.axis, self.experts, self.context)
            rows = distribute(stage, self.grid, file.workload)
            stage.materialise(self.device, start or fresh_start(seed), rows)
            add_up_gradients(stage, self.grid, file.workload)
            self.stages.append(stage)
            self.held += held_parameters(stage, self.grid)
            self.buffers += held_buffers(stage, self.grid)
        # the pipeline ranks that hold copies of a tensor, whose gradients are added up
        self.shared: dict[str, list[int]] = {
            name: sorted({rank_of_stage(self.plan, stage) for stage in names})
            for name, names in names_by_stage(file).items()
            if not embedding_is_frozen(file.model)
        }
        tokens = file.workload.seq_len // self.plan.context_parallel
        if self.plan.sequence_parallel:
            tokens //= self.plan.tensor_parallel
        message = (self.plan.micro_batch_size, tokens, file.model.hidden_size)
        states = states_between(file.model, file.layer_ranges)
        shapes = [message if number == 1 else (number, *message) for number in states]
        self.pipeline = Pipeline(self.stages, self.grid, shapes, COMPUTE_DTYPE[precision])
        kind = OffloadedOptimizer if self.plan.offloads_optimizer else Optimizer
        self.optimizer = kind(
            self.held,
            file.workload.optimizer,
            betas=betas,
            epsilon=epsilon,
            weight_decay=weight_decay,
        )

    @property
    def rows(self) -> range:
        """The rows of a global batch that this rank trains on."""
        share = self.plan.global_batch_size // self.plan.data_parallel
        first = self.grid.samples_rank * share
        return range(first, first + share)

    def step(self, batch: Batch) -> StepResult:
        """Train on one global batch, of which a rank needs its own ``rows`` only."""
        marks = [self._mark()]
        self.seed_dropout()
        loss = self.accumulate(batch)
        marks.append(self._mark())
        totals = self.finish_gradients(loss)
        marks.append(self._mark())
        learning_rate = self._apply(totals)
        marks.append(self._mark())
        # the only place where the host waits for a GPU
        synchronise_on_gpu(self.device)
        names = ("forward_backward", "gradients", "optimizer")
        seconds = dict(zip(names, starmap(_seconds, pairwise(marks)), strict=True))
        found, norm, votes = host_reads.numbers(torch.stack(totals))
        scale, skipped = None, False
        if self.scaler is not None:
            scale = self.scaler.scale
            self.scaler.update(overflowed=not math.isfinite(norm))
            # the loss itself knows no scale: where it is spoiled no other scale helps
            skipped = not math.isfinite(norm) and math.isfinite(found)
            skipped = skipped and not self.scaler.hopeless
        result = StepResult(found, norm, learning_rate, votes > 0, scale, skipped, seconds)
        if not result.failed:
            self.drop_gradients()
        return result

    def accumulate(self, batch: Batch) -> Tensor:
        """Run all micro-batches forward and backward; return this rank's summand of the loss."""
        scale = 1.0 if self.scaler is None else self.scaler.scale
        return self.pipeline.run(self.own(batch), scale)

    def own(self, batch: Batch) -> list[Batch]:
        """Return the micro-batches of this rank, on its device."""
        own = batch.rows(self.rows.start, self.rows.stop)
        expected = (len(self.rows), self.file.workload.seq_len)
        shapes = {tuple(x.shape) for x in (own.inputs, own.labels, own.starts) if x is not None}
        if shapes != {expected}:
            raise InputError(
                f"rows of {sorted(shapes)} for a rank that trains on (rows, seq_len) = {expected}"
            )
        if self.context.size > 1:
            own = own.at(self.context.places(self.file.workload.seq_len))
        return own.to(self.device).split(self.plan.micro_batch_size)

    @property
    def loss_copies(self) -> int:
        """How many ranks compute the very same summand of the loss."""
        return self.plan.tensor_parallel

    def finish_gradients(self, loss: Tensor) -> Totals:
        """Complete the gradients; return the loss and the gradient norm of the whole model."""
        complete_gradients(self.held, self.axis)
        sum_shared_gradients(self.held, self.grid, self.shared)
        loss = loss / self.loss_copies
        square_sum = local_square_sum(self.held, self.device)
        totals = torch.stack([loss, square_sum, torch.full_like(loss, self.stop_requested)])
        dist.all_reduce(totals)
        norm = totals[1].sqrt()
        return Totals(
            totals[0], norm if self.scaler is None else norm / self.scaler.scale, totals[2]
        )

    def _factor(self, norm: Tensor) -> Tensor | None:
        """Return what takes the scale of the loss out of the gradients, and shortens them."""
        if self.max_grad_norm is not None:
            factor = clipping_factor(norm, self.max_grad_norm)
        elif self.scaler is not None:
            factor = torch.ones_like(norm)
        else:
            return None
        if self.scaler is not None:
            factor /= self.scaler.scale
        return torch.where(torch.isfinite(norm), factor, 1.0)  # what is spoiled can be looked at

    def update(self) -> None:
        """Update the weights and drop the gradients."""
        self._apply(None)
        self.drop_gradients()

    def _apply(self, totals: Totals | None) -> float:
        """Update the weights with clipped gradients unless the totals are not finite.

        Returns the learning rate.
        """
        learning_rate = self.learning_rate.at(self.steps_done)
        self.steps_done += 1
        spoiled = factor = None
        if totals is not None:
            spoiled = ~torch.isfinite(totals.loss + totals.gradient_norm)
            factor = self._factor(totals.gradient_norm)
        self.optimizer.step(learning_rate, spoiled, factor)
        return learning_rate

    def drop_gradients(self) -> None:
        """Forget the gradients of the step."""
        for stage in self.stages:
            stage.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside tensors, as JSON values."""
        scaler = None if self.scaler is None else self.scaler.state()
        return {"steps_done": self.steps_done, "loss_scaler": scaler}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken."""
        self.steps_done = int(state["steps_done"])
        if self.scaler is not None and state["loss_scaler"] is not None:
            self.scaler.restore(state["loss_scaler"])

    def request_stop(self) -> None:
        """Ask all ranks to stop after the step that runs; any thread of any rank may call it."""
        self.stop_requested = True

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
        """Seed the dropout of the coming step, from the seed, the steps done and the rank's place.

        Ranks with different tokens draw different masks; ranks with the same tokens the same. A
        resumed run draws them again.
        """
        tensor_rank = self.axis.rank if self.plan.sequence_parallel else 0
        place = [self.grid.rank("pipeline"), self.grid.samples_rank, tensor_rank]
        if self.context.size > 1:
            place.append(self.context.rank)
        text = repr((self.seed, self.steps_done, *place))
        torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))


def _seconds(begin: Any, end: Any) -> float:
    """Return the seconds between two marks that lie in the past."""
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1e3
