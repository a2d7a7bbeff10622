"""Expert parallelism: tokens travel to the ranks that hold their experts, and back.

Each rank of an expert group holds num_experts / size experts whole (or its tensor-parallel slice of
each) and its own tokens. The router selects k experts for every token; no token is dropped. The
rows, one per token and expert, are sorted by expert, so that one all_to_all carries them: first the
row counts, then the rows; the results return the same way (Lepikhin et al., GShard,
arXiv:2006.16668, sec. 3.2). The backward pass sends gradients along the same routes.

Shapes   N tokens of this rank, H hidden_size, k experts_per_token, E num_experts
         R rows that this rank's experts receive
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from executor.compat import all_to_all
from executor.ops import host_reads
from executor.ops.recompute import compute_once


@dataclass(frozen=True, slots=True)
class ExpertAxis:
    """The ranks that share the experts of a layer."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0
    tensor_sharded: bool = True  # each expert's matrices are cut over the tensor-parallel ranks

    def slice_of(self, num_experts: int) -> tuple[int, int]:
        """Return the experts [start, stop) of this rank."""
        each = num_experts // self.size
        return self.rank * each, (self.rank + 1) * each


ALL_EXPERTS = ExpertAxis()
# rows sorted by expert (R, H), rows of each local expert -> (R, H)
RunExperts = Callable[[Tensor, list[int]], Tensor]


def run_on_experts(
    axis: ExpertAxis,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    num_experts: int,
    experts: RunExperts,
) -> Tensor:
    """Return the weighted sum of the expert outputs of each token, (..., H).

    ``x`` is (..., H), ``indices`` and ``weights`` are (N, k). Forward: an all_to_all of counts, of
    rows and of results; backward: of gradients, twice.
    """
    per_token = indices.size(1)
    order = indices.flatten().argsort(stable=True)
    rows = _Spread.apply(x.flatten(0, -2), order, per_token)
    counts = indices.new_zeros(num_experts)
    counts.scatter_add_(0, indices.flatten(), torch.ones_like(indices).flatten())
    if axis.size == 1:
        rows = experts(rows, host_reads.read_counts(counts, rows.size(0)))
    else:
        rows = _run_on_expert_ranks(axis, rows, counts, experts)
    result: Tensor = _Collect.apply(rows, order, weights, x.shape)
    return result


def _run_on_expert_ranks(
    axis: ExpertAxis, rows: Tensor, counts: Tensor, experts: RunExperts
) -> Tensor:
    """Compute every row on the rank that holds its expert."""
    received = compute_once(lambda: _counts_of_others(axis, counts))
    by_source = received.view(axis.size, -1)
    sent = counts.view(axis.size, -1).sum(1)
    sizes = torch.stack([sent, by_source.sum(1)])
    send_counts, receive_counts = host_reads.read_counts(sizes, rows.size(0))  # needed on the host
    rows = _Exchange.apply(axis.group, send_counts, receive_counts, rows)
    local = torch.arange(by_source.size(1), device=rows.device).repeat(axis.size)
    # rows arrive sorted by rank, then by expert
    order = local.repeat_interleave(received, output_size=rows.size(0)).argsort(stable=True)
    rows = _Spread.apply(rows, order, 1)
    rows = experts(rows, host_reads.read_counts(by_source.sum(0), rows.size(0)))
    rows = _Unsort.apply(rows, order)
    result: Tensor = _Exchange.apply(axis.group, receive_counts, send_counts, rows)
    return result


def _counts_of_others(axis: ExpertAxis, counts: Tensor) -> Tensor:
    received = torch.empty_like(counts)
    all_to_all(received, counts, group=axis.group)
    return received


class _Exchange(Function):  # type: ignore[misc]
    """Send ``send_counts[i]`` rows to rank i and receive ``receive_counts[i]`` rows from it."""

    @staticmethod
    def forward(
        ctx: Any, group: Any, send_counts: list[int], receive_counts: list[int], rows: Tensor
    ) -> Tensor:
        ctx.group, ctx.send_counts, ctx.receive_counts = group, send_counts, receive_counts
        return compute_once(lambda: _exchanged(group, send_counts, receive_counts, rows))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return (
            None,
            None,
            None,
            _exchanged(ctx.group, ctx.receive_counts, ctx.send_counts, gradient),
        )


def _exchanged(
    group: Any, send_counts: list[int], receive_counts: list[int], rows: Tensor
) -> Tensor:
    received = rows.new_empty(sum(receive_counts), rows.size(1))
    all_to_all(received, rows.contiguous(), receive_counts, send_counts, group=group)
    return received


class _Spread(Function):  # type: ignore[misc]
    """Copy every token k times and sort the copies by expert: (N, H) -> (N k, H)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return x.index_select(0, order // copies if copies > 1 else order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (order,) = ctx.saved_tensors
        unsorted = _unsorted(gradient, order)
        if ctx.copies > 1:
            unsorted = unsorted.unflatten(0, (-1, ctx.copies)).sum(1)
        return unsorted, None, None


class _Unsort(Function):  # type: ignore[misc]
    """Restore the order of rows before sorting."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return _unsorted(rows, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, order), None


class _Collect(Function):  # type: ignore[misc]
    """Unsort the results and sum each token's, weighted: (N k, H) -> (..., H)."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, order: Tensor, weights: Tensor, shape: torch.Size
    ) -> Tensor:
        results = _unsorted(rows, order).unflatten(0, weights.shape)
        ctx.save_for_backward(results, order, weights)
        weighted = (results * weights[..., None]).view(*shape[:-1], -1, shape[-1])
        return weighted.sum(-2).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        results, order, weights = ctx.saved_tensors
        gradient = gradient.reshape(-1, 1, gradient.size(-1))
        of_weights = (results * gradient).sum(-1).to(weights.dtype)
        of_results = (gradient * weights[..., None]).to(results.dtype)
        return of_results.flatten(0, 1).index_select(0, order), None, of_weights, None


def _unsorted(rows: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(rows).index_copy_(0, order, rows)
