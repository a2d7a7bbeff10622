"""Gradients after the last backward pass, their norm, and the update.

The optimizer works on plain tensors that share memory with this rank's part of each parameter, so
one fused kernel updates them all, however they are shared out.
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
from executor.compat import in_fused_step, multiply_each_
from executor.dtypes import local_tensor
from executor.model.layout import Layout, Pieces
from executor.model.stage import Stage
from executor.ops.nf4 import Packed
from executor.parallel.mesh import Grid, data_axis
from executor.parallel.tensor_parallel import WHOLE, TensorAxis
from executor.training.lion import Lion


@dataclass(slots=True)
class Held:
    """One parameter, as far as this rank holds it."""

    name: str
    layout: Layout
    parameter: torch.nn.Parameter  # of the module
    local: Tensor  # the memory that the optimizer updates
    pieces: Pieces  # of the whole tensor: what ``local`` is
    axes: tuple[str, ...]  # of the grid, along which ranks hold different parts
    copies: int  # ranks of the stage that hold this very part
    second_copy: bool  # of a tensor that an earlier stage holds too
    packed: Packed | None = None  # a matrix in 4 bits, of which ``local`` is the codes
    unpacked: torch.dtype = torch.float32  # in which a checkpoint holds such a matrix

    @property
    def saved_dtype(self) -> torch.dtype:
        """Precision in which a checkpoint holds it."""
        return self.local.dtype if self.packed is None else self.unpacked

    def saved(self) -> Tensor:
        """Return what a checkpoint holds of it."""
        if self.packed is None:
            return self.local
        values = self.packed.matrix(self.saved_dtype)
        return values.t() if self.layout.transposed else values

    @property
    def gradient(self) -> Tensor:
        """Gradient of the part that this rank holds."""
        assert self.parameter.grad is not None, f"{self.name} has no gradient"
        return local_tensor(self.parameter.grad)


def held_parameters(stage: Stage, grid: Grid) -> list[Held]:
    """Return this rank's part of every parameter of a stage."""
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
        found.append(Held(name, layout, parameter, local, pieces, tuple(axes), copies, second))
    return found


def held_buffers(stage: Stage, grid: Grid) -> list[Held]:
    """Return the frozen weights and buffers of a stage's state; no gradient changes them."""
    ranks = grid.plan.world_size // grid.plan.pipeline_parallel
    found = []
    for name, layout in stage.layouts.items():
        if layout.frozen:
            axes = ("tensor",) if layout.shard_dim is not None else ()
            copies = ranks // math.prod(grid.size(axis) for axis in axes)
            parameter, second = stage.get_parameter(name), name in stage.copies
            pieces = stage.pieces[name]
            held = Held(name, layout, parameter, parameter, pieces, axes, copies, second)
            if layout.quantised:
                held.packed, held.unpacked = stage.packed(name), stage.master
            found.append(held)
    for name, layout in stage.buffer_layouts.items():
        local = torch.nn.Parameter(stage.get_buffer(name), requires_grad=False)
        found.append(Held(name, layout, local, local, layout.ranges(WHOLE), (), ranks, False))
    return found


def complete_gradients(held: Sequence[Held], axis: TensorAxis) -> None:
    """Add up gradients to which each tensor-parallel rank gives a summand, in one all_reduce.

    These are whole tensors read by a part of the tokens (sequence parallelism) or of the heads.
    """
    partial = [h.gradient for h in held if h.layout.partial_gradient]
    if not partial:
        return
    flat = torch.cat([gradient.flatten() for gradient in partial])
    dist.all_reduce(flat, group=axis.group)
    for gradient, total in zip(partial, flat.split([g.numel() for g in partial]), strict=True):
        gradient.copy_(total.view_as(gradient))


def sum_shared_gradients(
    held: Sequence[Held], grid: Grid, shared: Mapping[str, Sequence[int]]
) -> None:
    """Add up the gradients of the copies that several stages hold of a tensor.

    ``shared``: the pipeline ranks that hold one, by the tensor's name, in the same order on all
    ranks. Sums go up from rank to rank, and the total back: the copies stay equal bit for bit, and
    no two ranks wait for each other, which messages both ways at once might do.
    """
    rank, group = grid.rank("pipeline"), grid.group("pipeline")
    for name, ranks in shared.items():
        if rank not in ranks:
            continue
        total, *others = [h.gradient for h in held if h.layout.name == name]
        for other in others:  # of further stages of this rank
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


def local_square_sum(held: Sequence[Held], device: torch.device) -> Tensor:
    """Return this rank's summand of the squared norm of the whole model's gradient.

    A part that several ranks hold counts on each for its share; copies on other stages do not.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_copies: dict[int, list[Tensor]] = {}
    for h in held:
        if not h.second_copy:
            by_copies.setdefault(h.copies, []).append(h.gradient)
    for copies, gradients in by_copies.items():
        norm = total_norm(gradients)
        total += norm.double().square() / copies
    return total


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all elements; of 16-bit ones in fp32, as sums of them need it."""
    if gradients[0].dtype.itemsize > 2:
        return torch.nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def clipping_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return by what gradients shrink to a global norm, as in torch.nn.utils.clip_grad_norm_."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def multiply_gradients(held: Sequence[Held], factor: Tensor) -> None:
    """Multiply all gradients with one number."""
    gradients = [h.gradient for h in held]  # all in the master precision
    multiply_each_(gradients, factor.to(gradients[0].dtype))


MOMENTUM: Final = 0.9  # of sgd_momentum


def torch_optimizer(
    name: OptimizerName,
    groups: list[dict[str, Any]],
    *,
    betas: tuple[float, float],
    epsilon: float,
) -> torch.optim.Optimizer:
    """Return an optimizer that updates every element for itself, however tensors are shared out."""
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
    # torch would make buffers without values where its first step is one that changes nothing
    for group in groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class Optimizer:
    """An optimizer over this rank's parts; matrices decay, norms and biases do not."""

    def __init__(
        self,
        held: Sequence[Held],
        name: OptimizerName,
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        updated: Callable[[Held], Tensor] = lambda held: held.local,
    ) -> None:
        """``updated``: gives the tensor that is updated for a part, where it is not the part's."""
        self.held = [h for h in held if h.local.numel() > 0]  # an uneven split may leave nothing
        self.updated = {id(h): updated(h) for h in self.held}
        groups = [
            {
                "params": [self.updated[id(h)] for h in self.held if h.layout.is_matrix == decays],
                "weight_decay": weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        self.inner = torch_optimizer(name, groups, betas=betas, epsilon=epsilon)
        self.fused = name != "lion"  # leaves weights and states alone where it is told so
        # the kernel's factor is a number in fp32
        exact = any(h.local.dtype == torch.float64 for h in self.held)
        self.multiplies = self.fused and not exact

    def step(
        self,
        learning_rate: float,
        spoiled: Tensor | None = None,
        factor: Tensor | None = None,
        *,
        gradients: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Update the weights with the gradients of the step times ``factor``, and drop them.

        ``spoiled``: whether the gradients are not finite; then the fused kernel leaves weights and
        states as they are, without asking the host (one that is not fused asks). ``gradients``:
        copies, by the id of a part.
        """
        factor = self.left_to_kernel(factor)
        copies = gradients or {}
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
        for h in self.held:
            self.updated[id(h)].grad = copies.get(id(h), h.gradient)
        if self.fused:
            in_fused_step(self.inner, spoiled, factor)
            self.inner.step()
        elif spoiled is None or not bool(spoiled):
            self.inner.step()
        for h in self.held:
            self.updated[id(h)].grad = None

    def left_to_kernel(self, factor: Tensor | None) -> Tensor | None:
        """Multiply the gradients where the kernel does not; return what it still has to."""
        if factor is None or self.multiplies:
            return factor
        multiply_gradients(self.held, factor)
        return None

    def state(self, held: Held) -> dict[str, Tensor]:
        """Return what is remembered of one part: moments in its shape, and scalars."""
        updated = self.updated.get(id(held))
        found = {} if updated is None else self.inner.state.get(updated, {})
        return {name: value for name, value in found.items() if torch.is_tensor(value)}

    def restore(self, held: Held, state: Mapping[str, Tensor]) -> None:
        """Set what is remembered of one part; the values are copied to where it is."""
        updated = self.updated[id(held)]
        self.inner.state[updated] = {
            name: value.to(updated.device, copy=True) for name, value in state.items()
        }
