"""Soft caps (Gemma 2, arXiv:2408.00118, sec. 2): c tanh(x / c) of logits, and of attention scores.

Torch's fused kernels know no cap. Scores are therefore made, capped and forgotten a block of
queries at a time, and made again in the backward pass (the idea of Dao et al., arXiv:2205.14135):
what is kept is what a fused kernel keeps.

Shapes   B sequences, S tokens, h query heads, k key-value heads, d head_dim, Q queries of a block
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function

BLOCK: Final = 256  # queries


def capped(x: Tensor, cap: float) -> Tensor:
    """Return c tanh(x / c), in the memory of x; the result is all that is kept."""
    y: Tensor = _Cap.apply(x, cap)
    return y


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, cap: float
) -> Tensor:
    """Attend with capped scores; queries (B, h, S, d), keys and values (B, k, S, d).

    ``mask``: whether a query sees a key, (B or 1, 1, S, S).
    """
    output: Tensor = _CappedAttention.apply(query, key, value, mask, scaling, cap)
    return output


class _Cap(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        ctx.cap = cap
        ctx.mark_dirty(x)
        x.div_(cap).tanh_().mul_(cap)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (y,) = ctx.saved_tensors
        slope = (y / ctx.cap).square_().neg_().add_(1.0)
        return slope.mul_(gradient), None


class _CappedAttention(Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        scaling: float,
        cap: float,
    ) -> Tensor:
        ctx.scaling, ctx.cap = scaling, cap
        output = torch.empty_like(query)
        exact = torch.promote_types(query.dtype, torch.float32)
        log_sums = query.new_empty(query.shape[:-1], dtype=exact)
        for rows in _blocks(query.size(2)):
            scores, _ = _scores(query[:, :, rows], key, mask[:, :, rows], scaling, cap)
            log_sum = scores.logsumexp(-1, keepdim=True)
            weights = (scores - log_sum).exp_().to(value.dtype)
            output[:, :, rows] = _ungrouped(_grouped(weights, value) @ value, query)
            log_sums[:, :, rows] = log_sum.squeeze(-1)
        ctx.save_for_backward(query, key, value, mask, output, log_sums)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, mask, output, log_sums = ctx.saved_tensors
        query_gradient = torch.empty_like(query)
        key_gradient, value_gradient = torch.zeros_like(key), torch.zeros_like(value)
        for rows in _blocks(query.size(2)):
            asked, wanted = query[:, :, rows], gradient[:, :, rows]
            scores, slope = _scores(asked, key, mask[:, :, rows], ctx.scaling, ctx.cap)
            weights = (scores - log_sums[:, :, rows, None]).exp_()
            wanted_by_key = _grouped(wanted, value)
            by_key = _grouped(weights.to(value.dtype), value)
            value_gradient += by_key.transpose(2, 3) @ wanted_by_key
            change = (wanted_by_key @ value.transpose(2, 3)).view_as(weights)
            change = change - (wanted * output[:, :, rows]).sum(-1, keepdim=True)
            change = (weights * change).mul_(slope).to(query.dtype)
            change = _grouped(change, key) * ctx.scaling
            query_gradient[:, :, rows] = _ungrouped(change @ key, query)
            key_gradient += change.transpose(2, 3) @ _grouped(asked, key)
        return query_gradient, key_gradient, value_gradient, None, None, None


def _blocks(length: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK) for start in range(0, length, BLOCK))


def _scores(
    query: Tensor, key: Tensor, mask: Tensor, scaling: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Return capped scores (B, h, Q, S), and the slope of the cap there."""
    exact = torch.promote_types(query.dtype, torch.float32)
    products = _grouped(query, key) @ key.transpose(2, 3) * scaling
    tangent = (products / cap).tanh_().to(exact).view(*query.shape[:3], -1)
    slope = 1.0 - tangent.square()
    return (tangent * cap).masked_fill_(~mask, float("-inf")), slope


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """Return (B, h, Q, n) as (B, k, h / k Q, n): the query heads that share a key head."""
    return x.reshape(x.size(0), key.size(1), -1, x.size(-1))


def _ungrouped(x: Tensor, query: Tensor) -> Tensor:
    return x.view(query.size(0), query.size(1), -1, x.size(-1))
