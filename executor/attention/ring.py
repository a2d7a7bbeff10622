"""Attention over the keys of all ranks, by ring exchange or all-gather.

Only this rank's keys and values are saved for the backward pass, which transfers the others again.

Shapes   B sequences, S tokens, s = S / size of this rank, h heads, k key heads, d, e their sizes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from executor.attention.blockwise import Inputs, Kernel, RunningSoftmax, sink_gradients
from executor.compat import all_gather, reduce_scatter
from executor.ops.recompute import compute_once
from executor.parallel.context_parallel import AttentionBlock, AttentionPattern, ContextAxis


def blockwise_attention(
    pattern: AttentionPattern,
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally to the keys of all ranks (ring, allgather), (B, h, s, d) to (B, h, s, e).

    ``sinks`` (h,): scores included in each softmax without a value.

    Traffic with n ranks, c and x bytes per element of the keys and of their gradients (fp32 at
    least):

    ring       forward   n - 1 sends of keys and values, c B k s (d + e) each
               backward  the same, and n sends of their gradients, x B k s (d + e) each
    allgather  forward   one all_gather, c B k S (d + e)
               backward  the same, and one reduce_scatter, x B k S (d + e)
    """
    output: Tensor = _Blockwise.apply(pattern, kernel, query, key, value, sinks)
    return output


class _Blockwise(Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        pattern: AttentionPattern,
        kernel: Kernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        output, lse = compute_once(lambda: _attended(pattern, kernel, query, key, value, sinks))
        ctx.pattern, ctx.kernel = pattern, kernel
        ctx.save_for_backward(query, key, value, output, lse, sinks)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, output, lse, sinks = ctx.saved_tensors
        pattern, kernel = ctx.pattern, ctx.kernel
        of_query = torch.zeros_like(query, dtype=lse.dtype)
        exchange = _exchange(pattern.axis, key, value)
        for rank, keys, values in exchange():
            of_keys, of_values = exchange.gradients(rank)
            for block in pattern.blocks(rank, query.size(2)):
                rows = block.queries
                inputs = _inputs(pattern, block, rank, query, keys, values)
                of_block = (x[:, :, rows] for x in (gradient, output, lse))
                found = kernel.backward(inputs, *of_block)
                of_query[:, :, rows] += found[0]
                of_keys[:, :, block.keys] += found[1]
                of_values[:, :, block.keys] += found[2]
            exchange.done(rank)
        of_key, of_value = exchange.own_gradients()
        of_sinks = None if sinks is None else sink_gradients(sinks, lse, output, gradient)
        return None, None, of_query.to(query.dtype), of_key, of_value, of_sinks


def _attended(
    pattern: AttentionPattern,
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of every query's scores."""
    total = RunningSoftmax(query, value)
    for rank, keys, values in _exchange(pattern.axis, key, value)():
        for block in pattern.blocks(rank, query.size(2)):
            part = kernel.forward(_inputs(pattern, block, rank, query, keys, values))
            total.add(block.queries, *part)
    if sinks is not None:
        total.add_sinks(sinks)
    return total.output.to(query.dtype), total.lse


def _inputs(
    pattern: AttentionPattern,
    block: AttentionBlock,
    rank: int,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Inputs:
    """Return the inputs of one block; ``rank``: whose keys and values these are."""
    mask = pattern.mask(block, rank, query)
    seen = keys[:, :, block.keys], values[:, :, block.keys]
    return Inputs(query[:, :, block.queries], *seen, block.causal, mask)


class _Pairs:
    """Flat buffers of keys and values (or their gradients), one after the other."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value
        self.exact = torch.promote_types(key.dtype, torch.float32)
        self.numel = key.numel() + value.numel()

    def packed(self) -> Tensor:
        """Return this rank's keys and values in one buffer."""
        flat = self.key.new_empty(self.numel)
        for view, x in zip(self.views(flat), (self.key, self.value), strict=True):
            view.copy_(x)
        return flat

    def views(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys (B, k, s, d) and the values (B, k, s, e) of a buffer."""
        first, second = flat.split([self.key.numel(), self.value.numel()])
        return _as_heads(first, self.key), _as_heads(second, self.value)

    def unpacked(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of keys and values in their own precision."""
        of_key, of_value = self.views(flat.to(self.key.dtype))
        return of_key, of_value


def _as_heads(flat: Tensor, like: Tensor) -> Tensor:
    """View a buffer as (B, k, s, d), in memory as (B, s, k, d)."""
    batch, heads, tokens, width = like.shape
    return flat.view(batch, tokens, heads, width).transpose(1, 2)


class _RingExchange:
    """Ring exchange.

    Every rank passes its current keys and values to the next rank at each step.
    """

    def __init__(self, axis: ContextAxis, key: Tensor, value: Tensor) -> None:
        assert axis.group is not None
        self.axis, self.pairs = axis, _Pairs(key, value)
        self.next = dist.get_global_rank(axis.group, (axis.rank + 1) % axis.size)
        self.previous = dist.get_global_rank(axis.group, (axis.rank - 1) % axis.size)
        self.summed: Callable[[], Tensor] | None = None  # gradients received from the previous rank

    def __call__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield a rank and its keys and values, this rank's first; the next block is in flight."""
        flat = self.pairs.packed()
        for step in range(self.axis.size):
            upcoming = self._shift(flat) if step < self.axis.size - 1 else None
            yield (self.axis.rank - step) % self.axis.size, *self.pairs.views(flat)
            if upcoming is not None:
                flat = upcoming()

    def gradients(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return buffers for the gradients of the current block."""
        self.flat = torch.zeros(
            self.pairs.numel, dtype=self.pairs.exact, device=self.pairs.key.device
        )
        return self.pairs.views(self.flat)

    def done(self, rank: int) -> None:
        """Pass on the gradients of the block, summed with those of the previous ranks."""
        if self.summed is not None:
            self.flat += self.summed()
        self.summed = self._shift(self.flat)

    def own_gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's keys and values, after a full round."""
        assert self.summed is not None
        return self.pairs.unpacked(self.summed())

    def _shift(self, flat: Tensor) -> Callable[[], Tensor]:
        """Start to pass a buffer on; calling the result waits for the buffer received instead."""
        received = torch.empty_like(flat)
        # batched: nccl would serialise the two, and every rank would wait to send
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, flat, self.next, self.axis.group),
                dist.P2POp(dist.irecv, received, self.previous, self.axis.group),
            ]
        )

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return received

        return wait


class _GatherExchange:
    """All-gather exchange: keys and values of all ranks at once."""

    def __init__(self, axis: ContextAxis, key: Tensor, value: Tensor) -> None:
        self.axis, self.pairs = axis, _Pairs(key, value)
        self.gathered_gradients: Tensor | None = None

    def __call__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield a rank and its keys and values, this rank's first, which need no transfer."""
        whole = self.pairs.key.new_empty(self.axis.size * self.pairs.numel)
        work = all_gather(whole, self.pairs.packed(), group=self.axis.group, async_op=True)
        yield self.axis.rank, self.pairs.key, self.pairs.value
        work.wait()
        parts = whole.view(self.axis.size, -1)
        for step in range(1, self.axis.size):
            rank = (self.axis.rank - step) % self.axis.size
            yield rank, *self.pairs.views(parts[rank])

    def gradients(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return buffers for the gradients of a rank's block."""
        if self.gathered_gradients is None:
            shape = (self.axis.size, self.pairs.numel)
            self.gathered_gradients = torch.zeros(
                shape, dtype=self.pairs.exact, device=self.pairs.key.device
            )
        return self.pairs.views(self.gathered_gradients[rank])

    def done(self, rank: int) -> None:
        """Do nothing: the gradients of all blocks are reduced at the end."""

    def own_gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's keys and values, summed over the ranks."""
        assert self.gathered_gradients is not None
        flat = self.gathered_gradients.new_empty(self.pairs.numel)
        reduce_scatter(flat, self.gathered_gradients.flatten(), group=self.axis.group)
        return self.pairs.unpacked(flat)


def _exchange(axis: ContextAxis, key: Tensor, value: Tensor) -> _RingExchange | _GatherExchange:
    kind = _RingExchange if axis.method == "ring" else _GatherExchange
    return kind(axis, key, value)
