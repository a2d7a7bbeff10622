"""Soft caps (Gemma 2, arXiv:2408.00118, sec. 2): c tanh(x / c) of logits and attention scores.

Torch's fused kernels support no cap. Scores are therefore computed, capped and dropped one block of
queries at a time, and recomputed in the backward pass (the idea of Dao et al., arXiv:2205.14135):
the same tensors are saved as by a fused kernel.

Shapes   B sequences, S tokens, h query heads, k key-value heads, d head_dim, Q queries of a block
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function

from executor.ops.recompute import compute_once

QUERY_BLOCK: Final = 128  # queries, as priced in cost_models.activations.operators
KeyMask = Callable[[slice], Tensor]  # mask of the keys of some queries: (B or 1, 1, Q, S)


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """Return c tanh(x / c) of logits, in the memory of x; only the result is saved.

    The backward pass overwrites its incoming gradient and the result.
    """
    y: Tensor = _Cap.apply(x, cap)
    return y


def soft_capped_attention(
    query: Tensor, key: Tensor, value: Tensor, seen: KeyMask, scaling: float, cap: float
) -> Tensor:
    """Attend with capped scores; queries (B, h, S, d), keys and values (B, k, S, d)."""
    output: Tensor = _CappedAttention.apply(query, key, value, seen, scaling, cap)
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
        # logits are the largest tensors of a step: 1 - tanh^2 overwrites the saved result, and the
        # product overwrites the gradient, which nothing else reads (the loss made it)
        gradient.mul_(y.square_().mul_(-(ctx.cap**-2)).add_(1.0))
        return gradient, None


class _CappedAttention(Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seen: KeyMask,
        scaling: float,
        cap: float,
    ) -> Tensor:
        ctx.seen, ctx.scaling, ctx.cap = seen, scaling, cap
        output, log_sums = compute_once(lambda: _forward(query, key, value, seen, scaling, cap))
        ctx.save_for_backward(query, key, value, output, log_sums)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, output, log_sums = ctx.saved_tensors
        query_gradient = torch.empty_like(query)
        key_gradient, value_gradient = torch.zeros_like(key), torch.zeros_like(value)
        for rows in _blocks(query.size(2)):
            queries, upstream = query[:, :, rows], gradient[:, :, rows]
            upstream_by_key = _grouped(upstream, value)
            tangents = _tangents(queries, key, ctx.scaling / ctx.cap)
            weights = torch.mul(tangents, ctx.cap).sub_(log_sums[:, :, rows, None]).exp_()
            weights.masked_fill_(~ctx.seen(rows), 0.0)
            by_key = _grouped(weights.to(value.dtype), value)
            value_gradient += by_key.transpose(2, 3) @ upstream_by_key
            del by_key
            # gradient of the scores: softmax, then the slope of the cap, 1 - tanh^2
            change = (upstream_by_key @ value.transpose(2, 3)).to(weights.dtype).view_as(weights)
            change.sub_((upstream * output[:, :, rows]).sum(-1, keepdim=True)).mul_(weights)
            del weights
            change.mul_(tangents.square_().neg_().add_(1.0)).mul_(ctx.scaling)
            del tangents
            by_key = _grouped(change.to(query.dtype), key)
            del change
            query_gradient[:, :, rows] = _ungrouped(by_key @ key, query)
            key_gradient += by_key.transpose(2, 3) @ _grouped(queries, key)
        return query_gradient, key_gradient, value_gradient, None, None, None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, seen: KeyMask, scaling: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of every query's scores."""
    output = torch.empty_like(query)
    exact = torch.promote_types(query.dtype, torch.float32)
    log_sums = query.new_empty(query.shape[:-1], dtype=exact)
    for rows in _blocks(query.size(2)):
        scores = _tangents(query[:, :, rows], key, scaling / cap).mul_(cap)
        scores.masked_fill_(~seen(rows), float("-inf"))
        log_sum = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(log_sum).exp_().to(value.dtype)
        output[:, :, rows] = _ungrouped(_grouped(weights, value) @ value, query)
        log_sums[:, :, rows] = log_sum.squeeze(-1)
    return output, log_sums


def _blocks(length: int) -> Iterator[slice]:
    return (slice(start, start + QUERY_BLOCK) for start in range(0, length, QUERY_BLOCK))


def _tangents(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Return tanh of the scaled scores in fp32 (fp64 for fp64), (B, h, Q, S)."""
    products = _grouped(query, key) @ key.transpose(2, 3)
    exact = products.to(torch.promote_types(query.dtype, torch.float32))
    return exact.mul_(scaling).tanh_().view(*query.shape[:3], -1)


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """Return (B, h, Q, n) as (B, k, h / k Q, n): the query heads that share a key head."""
    return x.reshape(x.size(0), key.size(1), -1, x.size(-1))


def _ungrouped(x: Tensor, query: Tensor) -> Tensor:
    return x.view(query.size(0), query.size(1), -1, x.size(-1))
