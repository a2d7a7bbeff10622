"""Mixtures of experts: the module's router selects, experts run on the ranks that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from executor.model.families.description import FeedForward, Layer
from executor.model.families.linears import replicated
from executor.model.families.mlp import gated
from executor.ops.discarded_results import Discarded
from executor.ops.grouped_matmul import grouped_linear
from executor.ops.recompute import checkpointed
from executor.parallel.expert_parallel import run_on_experts
from executor.parallel.tensor_parallel import (
    concatenate_tokens,
    gather_tokens,
    local_tokens,
    sum_over_ranks,
)

_DENSE = gated("gate_proj", "up_proj", "down_proj")


def gated_experts(module: Any, layer: Layer, rows: Tensor, counts: list[int]) -> Tensor:
    """Gated experts: gate and up projection in one matrix, the gate's rows first."""
    gate, up = grouped_linear(rows, counts, module.gate_up_proj).chunk(2, -1)

    def activation(gate: Tensor, up: Tensor) -> tuple[Tensor]:
        return (module.act_fn(gate) * up,)

    with _activated(layer, activation, gate, up) as inner:
        return grouped_linear(inner, counts, module.down_proj)


def clamped_experts(module: Any, layer: Layer, rows: Tensor, counts: list[int]) -> Tensor:
    """gpt-oss's experts: gate and up projection interleaved, both clamped, with biases.

    (up + 1) gate sigmoid(alpha gate); source: arXiv:2508.10925, sec. 2.1, and transformers.
    """
    both = grouped_linear(
        rows, counts, module.gate_up_proj, module.gate_up_proj_bias, transposed=True
    )
    first = not layer.experts.tensor_sharded or layer.axis.rank == 0

    def activation(both: Tensor) -> tuple[Tensor]:
        return (_Clamped.apply(both, module.limit, module.alpha),)

    with _activated(layer, activation, both) as inner:
        return grouped_linear(
            inner, counts, module.down_proj, module.down_proj_bias, transposed=True, adds_bias=first
        )


@contextmanager
def _activated(
    layer: Layer, activation: Callable[..., tuple[Tensor]], *arguments: Tensor
) -> Iterator[Tensor]:
    """Yield the input of the experts' last matrices, which the backward pass may compute again."""
    if layer.repeats("moe_act") and not layer.repeats("moe"):
        with Discarded(activation, *arguments, random=False).readers() as (inner,):
            yield inner
    else:
        (inner,) = activation(*arguments)
        yield inner


class _Clamped(Function):  # type: ignore[misc]
    """The activation of gpt-oss's experts; saves its input only."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, limit: float, alpha: float) -> Tensor:
        ctx.save_for_backward(both)
        ctx.limit, ctx.alpha = limit, alpha
        gate, up = _clamped(both, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (both,) = ctx.saved_tensors
        limit, alpha = ctx.limit, ctx.alpha
        gate, up = _clamped(both, limit)
        share = torch.sigmoid(gate * alpha)
        of_both = torch.empty_like(both)
        slope = share * (1 + alpha * gate * (1 - share))
        of_both[..., ::2] = gradient * (up + 1) * slope * (both[..., ::2] <= limit)
        inside = both[..., 1::2].abs() <= limit
        of_both[..., 1::2] = gradient * gate * share * inside
        return of_both, None, None


def _clamped(both: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    return both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)


def mixture_of_experts(
    router: str = "gate", *, shared: str | None = None, shared_gate: str | None = None
) -> FeedForward:
    """Mixture of experts, optionally with shared experts that process every token.

    Experts sharded over the tensor-parallel ranks: each rank processes all tokens and returns a
    partial sum. Whole experts: each rank routes its own share of the tokens.
    """

    def forward(module: Any, layer: Layer, x: Tensor) -> Tensor:
        added = None
        if shared is not None:
            run: Any = _DENSE
            if layer.repeats("shared_experts") and not layer.repeats("moe"):
                run = partial(checkpointed, run, random=layer.random)
            added = run(getattr(module, shared), layer, x)
        if shared_gate is not None:
            added = torch.sigmoid(replicated(x, getattr(module, shared_gate))) * added
        routed = _routed(getattr(module, router), module.experts, layer, x)
        return routed if added is None else routed + added

    return forward


def _routed(router: Any, experts: Any, layer: Layer, x: Tensor) -> Tensor:
    axis, cut = layer.axis, layer.experts.tensor_sharded
    splits = axis.size > 1 and not cut and not axis.sequence_parallel
    if cut:
        x = gather_tokens(axis, x)
    elif splits:
        x = local_tokens(axis, x)
    _, weights, indices = router(x.flatten(0, -2))
    num_experts = layer.kind.feed_forward.num_experts
    y = run_on_experts(layer.experts, x, indices, weights, num_experts, experts)
    if cut and axis.size > 1:
        return sum_over_ranks(axis, y)
    return concatenate_tokens(axis, y) if splits else y


def dense_or_mixture(dense: FeedForward, mixed: FeedForward) -> FeedForward:
    """Run a mixture of experts in the layers that have experts, and a dense MLP in the others."""

    def forward(module: Any, layer: Layer, x: Tensor) -> Tensor:
        return (mixed if layer.kind.feed_forward.num_experts else dense)(module, layer, x)

    return forward


def prepare_experts(block: Any, layer: Layer) -> None:
    """Replace the forward pass of a layer's experts module."""
    if layer.kind.feed_forward.num_experts and layer.family.experts is not None:
        block.experts.forward = partial(layer.family.experts, block.experts, layer)
