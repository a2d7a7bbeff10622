"""Gradient completion, gradient norm, clipping, and the optimizer update.

The optimizer works on plain tensors that share memory with this rank's shard of each parameter, so
one fused kernel updates them all, however they are sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.plan.workload import Optimizer as OptimizerName
from executor.compat import foreach_multiply_, set_fused_step_inputs
from executor.dtypes import local_tensor
from executor.model.parameter_layout import ParameterLayout, Pieces
from executor.model.stage import Stage
from executor.ops.nf4 import PackedMatrix
from executor.parallel.mesh import ProcessGrid, data_axis
from executor.parallel.tensor_parallel import UNSHARDED, TensorAxis
from executor.training.lion import Lion


@dataclass(slots=True)
class ParameterShard:
    """The shard of one parameter on this rank."""

    name: str
    layout: ParameterLayout
    parameter: torch.nn.Parameter  # of the module
    local: Tensor  # the memory that the optimizer updates
    pieces: Pieces  # ranges of the whole tensor in ``local``
    axes: tuple[str, ...]  # of the grid, along which ranks hold different shards
    copies: int  # ranks of the stage that hold the same shard
    second_copy: bool  # of a tensor that an earlier stage holds too
    packed: PackedMatrix | None = None  # a matrix in 4 bits; ``local`` is its codes
    unpacked: torch.dtype = torch.float32  # precision of such a matrix in checkpoints

    @property
    def saved_dtype(self) -> torch.dtype:
        """Precision in checkpoints."""
        return self.local.dtype if self.packed is None else self.unpacked

    def saved(self) -> Tensor:
        """Return the values that a checkpoint stores."""
        if self.packed is None:
            return self.local
        values = self.packed.matrix(self.saved_dtype)
        return values.t() if self.layout.transposed else values

    @property
    def gradient(self) -> Tensor:
        """Gradient of this shard."""
        assert self.parameter.grad is not None, f"{self.name} has no gradient"
        return local_tensor(self.parameter.grad)


def parameter_shards(stage: Stage, grid: ProcessGrid) -> list[ParameterShard]:
    """Return this rank's shard of every parameter of a stage."""
    plan = grid.plan
    ranks = plan.world_size // plan.pipeline_parallel
    found = []
    for name, layout in stage.layouts.items():
        if layout.frozen:
            continue
        parameter = stage.get_parameter(name)
        apart = plan.experts_apart and layout.of_experts
        whole_experts = layout.of_experts and not plan.expert_tensor_parallel
        axes = ["expert"] if apart else []
        axes += [data_axis(plan, of_experts=layout.of_experts)] if plan.zero_stage > 0 else []
        axes += ["tensor"] if layout.shard_dim is not None and not whole_experts else []
        copies = ranks // math.prod(grid.size(axis) for axis in axes)
        local = torch.nn.Parameter(local_tensor(parameter.detach()))
        second = name in stage.copies
        pieces = stage.pieces[name]
        found.append(
            ParameterShard(name, layout, parameter, local, pieces, tuple(axes), copies, second)
        )
    return found


def buffer_shards(stage: Stage, grid: ProcessGrid) -> list[ParameterShard]:
    """Return the frozen weights and persistent buffers of a stage, which have no gradient."""
    ranks = grid.plan.world_size // grid.plan.pipeline_parallel
    found = []
    for name, layout in stage.layouts.items():
        if layout.frozen:
            axes = ("tensor",) if layout.shard_dim is not None else ()
            copies = ranks // math.prod(grid.size(axis) for axis in axes)
            parameter, second = stage.get_parameter(name), name in stage.copies
            pieces = stage.pieces[name]
            shard = ParameterShard(name, layout, parameter, parameter, pieces, axes, copies, second)
            if layout.quantised:
                shard.packed, shard.unpacked = stage.packed_matrix(name), stage.master
            found.append(shard)
    for name, layout in stage.buffer_layouts.items():
        local = torch.nn.Parameter(stage.get_buffer(name), requires_grad=False)
        found.append(
            ParameterShard(name, layout, local, local, layout.ranges(UNSHARDED), (), ranks, False)
        )
    return found


def sum_partial_gradients(shards: Sequence[ParameterShard], axis: TensorAxis) -> None:
    """Sum partial gradients over the tensor-parallel ranks, in one all_reduce.

    Partial gradients belong to replicated tensors that each rank applies to a part of the tokens
    (sequence parallelism) or of the heads.
    """
    partial = [h.gradient for h in shards if h.layout.partial_gradient]
    if not partial:
        return
    flat = torch.cat([gradient.flatten() for gradient in partial])
    dist.all_reduce(flat, group=axis.group)
    for gradient, total in zip(partial, flat.split([g.numel() for g in partial]), strict=True):
        gradient.copy_(total.view_as(gradient))


def sum_shared_gradients(
    shards: Sequence[ParameterShard], grid: ProcessGrid, shared: Mapping[str, Sequence[int]]
) -> None:
    """Sum the gradients of a tensor's copies on several stages.

    ``shared``: the pipeline ranks that hold a copy, by the tensor's name, in the same order on all
    ranks. Sums go up from rank to rank, and the total back: the copies stay equal bit for bit, and
    no two ranks wait for each other, as with simultaneous messages in both directions.
    """
    rank, group = grid.rank("pipeline"), grid.group("pipeline")
    for name, ranks in shared.items():
        if rank not in ranks:
            continue
        total, *others = [h.gradient for h in shards if h.layout.name == name]
        for other in others:  # on further stages of this rank
            total.add_(other)
        place = ranks.index(rank)
        below = [grid.pipeline_peer(r) for r in ranks[:place]][-1:]
        above = [grid.pipeline_peer(r) for r in ranks[place + 1 :]][:1]
        for peer in below:
            received = torch.empty_like(total)
            dist.recv(received, peer, group=group)
            total.add_(received)
        for peer in above:
            dist.send(total, peer, group=group)
            dist.recv(total, peer, group=group)
        for peer in below:
            dist.send(total, peer, group=group)
        for other in others:
            other.copy_(total)


def local_square_sum(shards: Sequence[ParameterShard], device: torch.device) -> Tensor:
    """Return this rank's contribution to the squared gradient norm of the whole model.

    A shard on several ranks counts on each for its share; copies on other stages do not count.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_copies: dict[int, list[Tensor]] = {}
    for h in shards:
        if not h.second_copy:
            by_copies.setdefault(h.copies, []).append(h.gradient)
    for copies, gradients in by_copies.items():
        norm = total_norm(gradients)
        total += norm.double().square() / copies
    return total


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all elements; 16-bit gradients are summed in fp32."""
    if gradients[0].dtype.itemsize > 2:
        return torch.nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def clipping_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that clips gradients to a norm, as torch.nn.utils.clip_grad_norm_."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def multiply_gradients(shards: Sequence[ParameterShard], factor: Tensor) -> None:
    """Multiply all gradients by one number."""
    gradients = [h.gradient for h in shards]  # all in the master precision
    foreach_multiply_(gradients, factor.to(gradients[0].dtype))


MOMENTUM: Final = 0.9  # of sgd_momentum


def torch_optimizer(
    name: OptimizerName, groups: list[dict[str, Any]], *, betas: tuple[float, float], epsilon: float
) -> torch.optim.Optimizer:
    """Return an elementwise optimizer, which works on any sharding of the tensors."""
    if name == "lion":
        return Lion(groups, betas=betas)
    if name in ("adamw", "adam"):
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
        made: torch.optim.Optimizer = kind(groups, betas=betas, eps=epsilon, fused=True)
        return made
    assert name in ("sgd", "sgd_momentum"), name  # the plan was checked
    if name == "sgd":
        return torch.optim.SGD(groups, fused=True)
    optimizer = torch.optim.SGD(groups, momentum=MOMENTUM, fused=True)
    # torch would create uninitialised buffers if its first step changes nothing
    for group in groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class Optimizer:
    """An optimizer over this rank's shards; weight decay applies to matrices only."""

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        name: OptimizerName,
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        updated: Callable[[ParameterShard], Tensor] = lambda shard: shard.local,
    ) -> None:
        """Create the optimizer. ``updated``.

        The tensor to update for a shard, by default its own.
        """
        self.shards = [h for h in shards if h.local.numel() > 0]  # empty after an uneven split
        self.updated = {id(h): updated(h) for h in self.shards}
        groups = [
            {
                "params": [
                    self.updated[id(h)] for h in self.shards if h.layout.is_matrix == decays
                ],
                "weight_decay": weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        self.inner = torch_optimizer(name, groups, betas=betas, epsilon=epsilon)
        self.fused = name != "lion"  # can skip the update on a device flag
        # the kernel's factor is an fp32 number
        exact = any(h.local.dtype == torch.float64 for h in self.shards)
        self.multiplies = self.fused and not exact

    def step(
        self,
        learning_rate: float,
        nonfinite: Tensor | None = None,
        factor: Tensor | None = None,
        *,
        gradients: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Update the weights with the gradients times ``factor``, and drop the gradients.

        ``nonfinite``: whether the gradients are not finite; then the fused kernel skips the update,
        without a host synchronisation (an unfused one synchronises). ``gradients``: copies, by the
        id of a shard.
        """
        factor = self.prescaled(factor)
        copies = gradients or {}
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
        for h in self.shards:
            self.updated[id(h)].grad = copies.get(id(h), h.gradient)
        if self.fused:
            set_fused_step_inputs(self.inner, nonfinite, factor)
            self.inner.step()
        elif nonfinite is None or not bool(nonfinite):
            self.inner.step()
        for h in self.shards:
            self.updated[id(h)].grad = None

    def prescaled(self, factor: Tensor | None) -> Tensor | None:
        """Multiply the gradients where the kernel cannot; return the factor left to the kernel."""
        if factor is None or self.multiplies:
            return factor
        multiply_gradients(self.shards, factor)
        return None

    def state(self, shard: ParameterShard) -> dict[str, Tensor]:
        """Return the optimizer state of one shard: moments in its shape, and scalars."""
        updated = self.updated.get(id(shard))
        found = {} if updated is None else self.inner.state.get(updated, {})
        return {name: value for name, value in found.items() if torch.is_tensor(value)}

    def restore(self, shard: ParameterShard, state: Mapping[str, Tensor]) -> None:
        """Set the optimizer state of one shard; values are copied to its device."""
        updated = self.updated[id(shard)]
        self.inner.state[updated] = {
            name: value.to(updated.device, copy=True) for name, value in state.items()
        }
