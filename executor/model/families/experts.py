"""Mixtures of experts: the router of the module chooses, its experts run where they are held."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from executor.model.families.description import FeedForward, Layer
from executor.model.families.mlp import gated
from executor.ops.grouped_matmul import grouped_linear
from executor.parallel.expert_parallel import mixture
from executor.parallel.tensor_parallel import every_token, own_tokens, sum_over_ranks, whole_tokens

_DENSE = gated("gate_proj", "up_proj", "down_proj")


def gated_experts(module: Any, layer: Layer, rows: Tensor, counts: list[int]) -> Tensor:
    """Experts with a gate: both projections in one matrix, the gate's rows first."""
    gate, up = grouped_linear(rows, counts, module.gate_up_proj).chunk(2, -1)
    return grouped_linear(module.act_fn(gate) * up, counts, module.down_proj)


def clamped_experts(module: Any, layer: Layer, rows: Tensor, counts: list[int]) -> Tensor:
    """gpt-oss's experts: gate and up projection alternate, both clamped, with biases.

    (up + 1) gate sigmoid(alpha gate); source: arXiv:2508.10925, sec. 2.1, and transformers.
    """
    both = grouped_linear(
        rows, counts, module.gate_up_proj, module.gate_up_proj_bias, transposed=True
    )
    inner = _Clamped.apply(both, module.limit, module.alpha)
    first = not layer.experts.cut_over_tensor or layer.axis.rank == 0
    return grouped_linear(
        inner, counts, module.down_proj, module.down_proj_bias, transposed=True, adds_bias=first
    )


class _Clamped(Function):  # type: ignore[misc]
    """The activation of gpt-oss's experts; keeps its input only."""

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


def sparse(
    router: str = "gate", *, shared: str | None = None, shared_gate: str | None = None
) -> FeedForward:
    """Mixture of experts, beside one that every token meets.

    Experts cut over the tensor-parallel ranks: each of these sees all tokens and gives a summand.
    Whole experts: each of these ranks routes its own share of the tokens.
    """

    def forward(module: Any, layer: Layer, x: Tensor) -> Tensor:
        added = None
        if shared is not None:
            added = _DENSE(getattr(module, shared), layer, x)
        if shared_gate is not None:
            added = torch.sigmoid(getattr(module, shared_gate)(x)) * added
        routed = _routed(getattr(module, router), module.experts, layer, x)
        return routed if added is None else routed + added

    return forward


def _routed(router: Any, experts: Any, layer: Layer, x: Tensor) -> Tensor:
    axis, cut = layer.axis, layer.experts.cut_over_tensor
    splits = axis.size > 1 and not cut and not axis.sequence_parallel
    if cut:
        x = whole_tokens(axis, x)
    elif splits:
        x = own_tokens(axis, x)
    _, weights, indices = router(x.flatten(0, -2))
    num_experts = layer.kind.feed_forward.num_experts
    y = mixture(layer.experts, x, indices, weights, num_experts, experts)
    if cut and axis.size > 1:
        return sum_over_ranks(axis, y)
    return every_token(axis, y) if splits else y


def by_kind(dense: FeedForward, mixed: FeedForward) -> FeedForward:
    """Run a mixture in the layers that have experts, and a dense MLP in the others."""

    def forward(module: Any, layer: Layer, x: Tensor) -> Tensor:
        return (mixed if layer.kind.feed_forward.num_experts else dense)(module, layer, x)

    return forward


def prepare_experts(block: Any, layer: Layer) -> None:
    """Have the module of a layer's experts run its rows our way."""
    if layer.kind.feed_forward.num_experts and layer.family.experts is not None:
        block.experts.forward = partial(layer.family.experts, block.experts, layer)
