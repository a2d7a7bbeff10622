"""Training steps of one plan in this process: forward, backward, gradients, update."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
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
from executor.counters.pass_times import seconds_between, time_mark
from executor.data.batch import Batch
from executor.dtypes import COMPUTE_DTYPE
from executor.model.encoder_decoder import EncoderDecoderStage
from executor.model.families import FAMILIES
from executor.model.parameter_layout import Initializer, random_initializer
from executor.model.shared_tensor_names import names_by_stage
from executor.model.stage import Stage
from executor.ops import fp8, host_reads
from executor.parallel.context_parallel import ContextAxis
from executor.parallel.data_parallel import enable_gradient_reducer, shard_parameters, synchronize
from executor.parallel.expert_parallel import ExpertAxis
from executor.parallel.mesh import ProcessGrid, connect, disconnect, local_device
from executor.parallel.pipeline import Pipeline
from executor.parallel.tensor_parallel import TensorAxis
from executor.support import check_supported
from executor.training.loss_scaling import LossScaler
from executor.training.offloaded_optimizer import OffloadedOptimizer
from executor.training.optimizer import (
    Optimizer,
    ParameterShard,
    buffer_shards,
    clipping_factor,
    local_square_sum,
    parameter_shards,
    sum_partial_gradients,
    sum_shared_gradients,
)
from hardware_profiles.errors import InputError


class StepTotals(NamedTuple):
    """Values that a step sums over all ranks, in one all_reduce."""

    loss: Tensor  # mean over the tokens of the batch
    gradient_norm: Tensor  # of the whole model, before clipping
    stop_votes: Tensor  # number of ranks that request a stop


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one optimizer step; the same on every rank, except the seconds.

    Where loss or norm are not finite the weights were not updated: the step was ``skipped``, or it
    ``failed``, and then the weights still have its gradients.
    """

    loss: float  # mean over the tokens of the batch
    gradient_norm: float  # of the whole model, before clipping
    learning_rate: float
    stop: bool  # some rank requested a stop after this step
    loss_scale: float | None  # fp16: multiplier of the loss
    skipped: bool  # fp16: the gradients overflowed; the next scale is smaller
    seconds: dict[str, float]  # forward_backward, gradients, optimizer

    @property
    def failed(self) -> bool:
        """Whether training cannot continue."""
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
        start: Initializer | None = None,
    ) -> None:
        check_supported(file)
        self.file, self.plan, self.seed = file, file.plan, seed
        if not isinstance(learning_rate, LearningRate):
            learning_rate = LearningRate(learning_rate)
        self.learning_rate, self.max_grad_norm = learning_rate, max_grad_norm
        self.steps_done = 0
        self.stop_requested = False  # any rank may set it; shared with all in the next step
        self.device = device or local_device()
        if file.workload.precision == "fp8":
            fp8.check_device(self.device)
        connect(self.device, file.rank_order)
        self.grid = ProcessGrid.of(self.plan, self.device)
        self._create_axes()
        self.scaler = LossScaler() if file.workload.precision == "fp16" else None
        self._create_stages(start or random_initializer(seed))
        self.pipeline = self._create_pipeline()
        kind = OffloadedOptimizer if self.plan.offloads_optimizer else Optimizer
        self.optimizer = kind(
            self.shards,
            file.workload.optimizer,
            betas=betas,
            epsilon=epsilon,
            weight_decay=weight_decay,
        )

    def _create_axes(self) -> None:
        """Describe this rank's tensor, expert and context groups."""
        plan, grid = self.plan, self.grid
        self.axis = TensorAxis(
            group=grid.group("tensor"),
            size=plan.tensor_parallel,
            rank=grid.rank("tensor"),
            sequence_parallel=plan.sequence_parallel,
            defers_weights=plan.pipeline_schedule in SPLIT,
        )
        has_expert_group = "expert" in grid.by_axis
        self.experts = ExpertAxis(
            group=grid.group("expert") if has_expert_group else None,
            size=plan.expert_parallel,
            rank=grid.rank("expert") if has_expert_group else 0,
            tensor_sharded=plan.expert_tensor_parallel,
        )
        self.context = ContextAxis(
            group=grid.group("context"),
            size=plan.context_parallel,
            rank=grid.rank("context"),
            method=plan.context_parallel_method,
        )

    def _create_stages(self, start: Initializer) -> None:
        """Build the stages of this rank, shard their parameters and write the initial values."""
        file, plan = self.file, self.plan
        self.stages: list[Stage] = []
        self.shards: list[ParameterShard] = []
        self.buffers: list[ParameterShard] = []  # persistent buffers, saved in checkpoints
        for index in stages_of_rank(plan, self.grid.rank("pipeline")):
            if FAMILIES[file.model.family].encoder_decoder:
                stage: Stage = EncoderDecoderStage(file, index, self.axis)
            else:
                stage = Stage(file, index, self.axis, self.experts, self.context)
            data_slices = shard_parameters(stage, self.grid, file.workload)
            stage.materialise(self.device, start, data_slices)
            enable_gradient_reducer(stage, self.grid, file.workload)
            self.stages.append(stage)
            self.shards += parameter_shards(stage, self.grid)
            self.buffers += buffer_shards(stage, self.grid)
        # the pipeline ranks that hold copies of a tensor, whose gradients are summed
        self.shared: dict[str, list[int]] = {
            name: sorted({rank_of_stage(plan, stage) for stage in names})
            for name, names in names_by_stage(file).items()
            if not embedding_is_frozen(file.model)
        }

    def _create_pipeline(self) -> Pipeline:
        """Connect the stages; a message is one or two hidden states of a micro-batch."""
        file, plan = self.file, self.plan
        ranks = plan.context_parallel * (plan.tensor_parallel if plan.sequence_parallel else 1)
        lengths = (file.workload.seq_len, file.workload.target_tokens)
        source, target = (
            (plan.micro_batch_size, length // ranks, file.model.hidden_size) for length in lengths
        )
        both = (math.prod(source) + math.prod(target),)
        states = states_between(file.model, file.layer_ranges)
        shapes = [source if number == 1 else both for number in states]
        return Pipeline(self.stages, self.grid, shapes, COMPUTE_DTYPE[file.workload.precision])

    @property
    def rows(self) -> range:
        """The rows of a global batch that this rank trains on."""
        share = self.plan.global_batch_size // self.plan.data_parallel
        first = self.grid.samples_rank * share
        return range(first, first + share)

    def step(self, batch: Batch, inspect: Callable[[StepTotals], None] | None = None) -> StepResult:
        """Train on one global batch, of which a rank needs its own ``rows`` only.

        ``inspect`` is called with complete gradients, before they update the weights.
        """
        marks = [time_mark(self.device)]
        self.seed_dropout()
        loss = self.accumulate(batch)
        marks.append(time_mark(self.device))
        totals = self.finish_gradients(loss)
        if inspect is not None:
            inspect(totals)
        marks.append(time_mark(self.device))
        learning_rate = self._apply(totals)
        marks.append(time_mark(self.device))
        # the only synchronisation of the host with a GPU
        synchronize(self.device)
        names = ("forward_backward", "gradients", "optimizer")
        seconds = dict(zip(names, starmap(seconds_between, pairwise(marks)), strict=True))
        found, norm, votes = host_reads.read_values(torch.stack(totals))
        scale, skipped = None, False
        if self.scaler is not None:
            scale = self.scaler.scale
            self.scaler.update(overflowed=not math.isfinite(norm))
            # the loss is not scaled: if it is not finite, no other scale helps
            skipped = not math.isfinite(norm) and math.isfinite(found)
            skipped = skipped and not self.scaler.always_overflows
        result = StepResult(found, norm, learning_rate, votes > 0, scale, skipped, seconds)
        if not result.failed:
            self.drop_gradients()
        return result

    def accumulate(self, batch: Batch) -> Tensor:
        """Run all micro-batches forward and backward; return this rank's share of the loss."""
        scale = 1.0 if self.scaler is None else self.scaler.scale
        return self.pipeline.run(self.own(batch), scale)

    def own(self, batch: Batch) -> list[Batch]:
        """Return the micro-batches of this rank, on its device."""
        own = batch.rows(self.rows.start, self.rows.stop)
        workload, rows = self.file.workload, len(self.rows)
        expected, targets = (rows, workload.seq_len), (rows, workload.target_tokens)
        shapes = {tuple(x.shape) for x in (own.inputs, own.starts) if x is not None}
        if shapes != {expected} or tuple(own.labels.shape) != targets:
            shapes.add(tuple(own.labels.shape))
            raise InputError(
                f"a batch of shape {sorted(shapes)}, but this rank trains on (rows, seq_len) = "
                f"{expected}" + f", targets of {targets}" * (targets != expected)
            )
        if self.context.size > 1:
            own = own.at(self.context.places(self.file.workload.seq_len))
        return own.to(self.device).split(self.plan.micro_batch_size)

    @property
    def loss_copies(self) -> int:
        """Number of ranks that compute the same share of the loss."""
        return self.plan.tensor_parallel

    def finish_gradients(self, loss: Tensor) -> StepTotals:
        """Complete the gradients; return the loss and the gradient norm of the whole model."""
        sum_partial_gradients(self.shards, self.axis)
        sum_shared_gradients(self.shards, self.grid, self.shared)
        loss = loss / self.loss_copies
        square_sum = local_square_sum(self.shards, self.device)
        totals = torch.stack([loss, square_sum, torch.full_like(loss, self.stop_requested)])
        dist.all_reduce(totals)
        norm = totals[1].sqrt()
        return StepTotals(
            totals[0], norm if self.scaler is None else norm / self.scaler.scale, totals[2]
        )

    def _factor(self, norm: Tensor) -> Tensor | None:
        """Return the factor of the gradients: unscaling times clipping."""
        if self.max_grad_norm is not None:
            factor = clipping_factor(norm, self.max_grad_norm)
        elif self.scaler is not None:
            factor = torch.ones_like(norm)
        else:
            return None
        if self.scaler is not None:
            factor /= self.scaler.scale
        return torch.where(
            torch.isfinite(norm), factor, 1.0
        )  # keep non-finite gradients for inspection

    def update(self) -> None:
        """Update the weights and drop the gradients."""
        self._apply(None)
        self.drop_gradients()

    def _apply(self, totals: StepTotals | None) -> float:
        """Update the weights with clipped gradients unless the totals are not finite.

        Returns the learning rate.
        """
        learning_rate = self.learning_rate.at(self.steps_done)
        self.steps_done += 1
        nonfinite = factor = None
        if totals is not None:
            nonfinite = ~torch.isfinite(totals.loss + totals.gradient_norm)
            factor = self._factor(totals.gradient_norm)
        self.optimizer.step(learning_rate, nonfinite, factor)
        return learning_rate

    def drop_gradients(self) -> None:
        """Drop the gradients of the step."""
        for stage in self.stages:
            stage.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Return the non-tensor state for a checkpoint, as JSON values."""
        scaler = None if self.scaler is None else self.scaler.state()
        return {"steps_done": self.steps_done, "loss_scaler": scaler}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``."""
        self.steps_done = int(state["steps_done"])
        if self.scaler is not None and state["loss_scaler"] is not None:
            self.scaler.restore(state["loss_scaler"])

    def request_stop(self) -> None:
        """Request all ranks to stop after the current step.

        Callable from any thread of any rank.
        """
        self.stop_requested = True

    def close(self) -> None:
        """Leave the process group."""
        disconnect()

    def seed_dropout(self) -> None:
        """Seed the dropout of the next step from seed, steps done and the rank's coordinates.

        Ranks with different tokens draw different masks, ranks with the same tokens the same ones.
        A resumed run draws them again.
        """
        tensor_rank = self.axis.rank if self.plan.sequence_parallel else 0
        place = [self.grid.rank("pipeline"), self.grid.samples_rank, tensor_rank]
        if self.context.size > 1:
            place.append(self.context.rank)
        text = repr((self.seed, self.steps_done, *place))
        torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))
