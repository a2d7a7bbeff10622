"""Ulysses: two all_to_all exchange some tokens of all heads for all tokens of some heads.

Shapes   B sequences, S tokens, s = S / size of this rank, h heads, k key heads, d, e their sizes
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from executor.compat import all_to_all
from executor.ops.recompute import compute_once
from executor.parallel.context_parallel import ContextAxis


def ulysses_attention(
    axis: ContextAxis,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to all tokens with a slice of the heads, (B, h, s, d) to (B, h, s, e).

    forward   all_to_all of queries, keys and values, c B s (h d + k (d + e)), and of the output,
              c B s h e
    backward  the same two in reverse

    Fewer key heads than ranks are repeated until every rank has one (then k = size).
    """
    if key.size(1) % axis.size:
        times = axis.size // key.size(1)
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    query, key, value = _ToHeads.apply(axis, query, key, value)
    if sinks is not None:
        sinks = sinks.chunk(axis.size)[axis.rank]
    (output,) = _ToTokens.apply(axis, attend(query, key, value, sinks))
    result: Tensor = output
    return result


class _ToHeads(Function):  # type: ignore[misc]
    """(B, h, s, d) of every tensor to (B, h / size, S, d)."""

    @staticmethod
    def forward(ctx: Any, axis: ContextAxis, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return compute_once(lambda: _to_heads(axis, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, *_to_tokens(ctx.axis, gradients)


class _ToTokens(Function):  # type: ignore[misc]
    """(B, h / size, S, d) of every tensor to (B, h, s, d)."""

    @staticmethod
    def forward(ctx: Any, axis: ContextAxis, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return compute_once(lambda: _to_tokens(axis, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, *_to_heads(ctx.axis, gradients)


def _to_heads(axis: ContextAxis, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Send each rank its heads of this rank's tokens, all tensors in one all_to_all."""
    # (size, B, s, h / size, d): one part per rank, in memory as the hidden state
    parts = [x.unflatten(1, (axis.size, -1)).permute(1, 0, 3, 2, 4) for x in tensors]
    whole = []
    for x in _exchanged(axis, parts):  # by rank that sent its tokens
        heads = x.permute(1, 0, 2, 3, 4).flatten(1, 2)  # (B, S, h / size, d)
        whole.append(heads.transpose(1, 2))
    return tuple(whole)


def _to_tokens(axis: ContextAxis, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Send each rank its tokens of this rank's heads, all tensors in one all_to_all."""
    # (size, B, s, h / size, d)
    parts = [x.unflatten(2, (axis.size, -1)).permute(2, 0, 3, 1, 4) for x in tensors]
    whole = []
    for x in _exchanged(axis, parts):  # by rank that sent its heads
        tokens = x.permute(1, 2, 0, 3, 4).flatten(2, 3)  # (B, s, h, d)
        whole.append(tokens.transpose(1, 2))
    return tuple(whole)


def _exchanged(axis: ContextAxis, parts: list[Tensor]) -> list[Tensor]:
    """Send part i of every tensor to rank i; return the received parts, in the same shapes."""
    sizes = [part.numel() // axis.size for part in parts]
    sent = torch.cat([part.reshape(axis.size, -1) for part in parts], dim=1)
    received = torch.empty_like(sent)
    all_to_all(received, sent, group=axis.group)
    return [
        piece.view(part.shape) if piece.is_contiguous() else piece.reshape(part.shape)
        for piece, part in zip(received.split(sizes, dim=1), parts, strict=True)
    ]
