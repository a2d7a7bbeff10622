"""Tensor and sequence parallelism: sharded matrices and the collectives between them.

Megatron's scheme (Shoeybi et al., arXiv:1909.08053, sec. 3): a column-parallel matrix reads the
whole hidden state and computes a slice of the features, a row-parallel one reads the slice and
computes a partial sum. With sequence parallelism (Korthikanti et al., arXiv:2205.05198, sec. 4.2.2)
the hidden state between them is split along the sequence: the two all_reduce of a block become
all_gather and reduce_scatter, and only the split input is saved for the backward pass, which
gathers it again.

Parameters are plain tensors that hold this rank's slice; every collective is explicit.

Shapes   B sequences, S tokens of a sequence, s = S / size, H hidden_size
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from executor.compat import all_gather, reduce_scatter
from executor.ops import host_reads
from executor.ops.deferred_weight_gradients import DeferredGradient, deferral_queue
from executor.ops.nf4 import PackedMatrix, linear, unpacked
from executor.ops.recompute import block_result, compute_once, is_recomputing


@dataclass(frozen=True, slots=True)
class TensorAxis:
    """The ranks that share every matrix."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0
    sequence_parallel: bool = False
    defers_weights: bool = False  # the schedule may defer weight gradients
    fp8: bool = False  # layers multiply in 8 bits

    def slice_of(self, length: int) -> tuple[int, int]:
        """Return this rank's range [start, stop): ceil(length / size) long, less on the last."""
        chunk = -(-length // self.size)
        return min(length, self.rank * chunk), min(length, (self.rank + 1) * chunk)

    def sequence_slice(self, seq_len: int) -> tuple[int, int]:
        """Return the token range [start, stop) of each sequence in this rank's hidden state."""
        return self.slice_of(seq_len) if self.sequence_parallel else (0, seq_len)


UNSHARDED = TensorAxis()


def column_linear(
    axis: TensorAxis,
    x: Tensor,
    weights: Sequence[Tensor | PackedMatrix],
    biases: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """Multiply one input with several column-parallel matrices (out, in), in one collective.

    forward: all_gather (B, s, H) -> (B, S, H) with sequence parallelism, otherwise nothing.
    backward: the same all_gather and a reduce_scatter, or an all_reduce of the input's gradient.
    """
    if axis.size == 1 and not axis.defers_weights:
        return tuple(linear(x, w, b) for w, b in zip(weights, biases, strict=True))
    outputs: tuple[Tensor, ...] = _ColumnLinear.apply(axis, len(weights), x, *weights, *biases)
    return outputs


def row_linear(axis: TensorAxis, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply with a row-parallel matrix and sum over the ranks.

    forward: reduce_scatter (B, S, H) -> (B, s, H) with sequence parallelism, otherwise all_reduce.
    backward: all_gather, or nothing.
    """
    if axis.size == 1 and not axis.defers_weights:
        with block_result():
            return F.linear(x, weight, bias)
    with block_result(summed=axis.size > 1):
        y = _row_linear(axis, x, weight)
    if axis.size > 1:
        with block_result():
            y = sum_over_ranks(axis, y)
    return y if bias is None else y + bias


def vocabulary_embedding(
    axis: TensorAxis, tokens: Tensor, weight: Tensor, start: int, padding_index: int | None
) -> Tensor:
    """Look up tokens in this rank's rows of the vocabulary (from ``start``); sum over the ranks."""
    if axis.size == 1:
        return F.embedding(tokens, weight, padding_index)
    local = tokens - start
    elsewhere = (local < 0) | (local >= weight.size(0))
    if padding_index is not None:
        padding_index -= start
        padding_index = padding_index if 0 <= padding_index < weight.size(0) else None
    found = F.embedding(local.masked_fill(elsewhere, 0), weight, padding_index)
    return sum_over_ranks(axis, found.masked_fill(elsewhere.unsqueeze(-1), 0.0))


def sum_over_ranks(axis: TensorAxis, x: Tensor) -> Tensor:
    """Sum partial results over the ranks; with sequence parallelism each rank keeps its tokens."""
    y: Tensor = _SumOverRanks.apply(axis, x)
    return y


def all_reduce_both_ways(axis: TensorAxis, x: Tensor) -> Tensor:
    """Sum a tensor over the ranks, all of which continue with the total: all_reduce both ways."""
    y: Tensor = _Total.apply(axis, x)
    return y


def gather_tokens(axis: TensorAxis, x: Tensor) -> Tensor:
    """Return every token's features on all ranks; each rank computes a partial gradient of them.

    forward: all_gather (B, s, H) -> (B, S, H) with sequence parallelism, otherwise nothing.
    backward: reduce_scatter or all_reduce.
    """
    y: Tensor = _WholeTokens.apply(axis, x) if axis.size > 1 else x
    return y


def local_tokens(axis: TensorAxis, x: Tensor) -> Tensor:
    """Return this rank's tokens of a hidden state that all ranks hold; backward: all_gather."""
    y: Tensor = _OwnTokens.apply(axis, x)
    return y


def concatenate_tokens(axis: TensorAxis, x: Tensor) -> Tensor:
    """Concatenate the tokens of all ranks: all_gather; backward: this rank's tokens."""
    y: Tensor = _EveryToken.apply(axis, x)
    return y


@contextmanager
def rank_random_state(axis: TensorAxis, *, isolated: bool = False) -> Iterator[None]:
    """Let dropout differ between ranks that hold different heads, and nowhere else.

    The seed is drawn from the generator that all ranks share, so recomputation draws it again.
    ``isolated``: random numbers drawn inside do not advance the outer generator.
    """
    # with sequence parallelism every rank has its own seed already
    if (axis.size == 1 or axis.sequence_parallel) and not isolated:
        yield
        return
    (seed,) = host_reads.read_values(torch.randint(2**62, (1,)))
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + axis.rank)
        yield


class _ColumnLinear(Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, axis: TensorAxis, count: int, x: Tensor, *parameters: Any
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.axis, ctx.has_bias = axis, [bias is not None for bias in biases]
        ctx.sources = weights  # unchanged: a gradient passes through a view to its parameter
        ctx.trained = [number for number in range(count) if ctx.needs_input_grad[3 + number]]
        ctx.save_for_backward(x, *(None if isinstance(w, PackedMatrix) else w for w in weights))

        def outputs() -> tuple[Tensor, ...]:
            whole = _gather(axis, x)() if axis.sequence_parallel else x
            return tuple(linear(whole, w, b) for w, b in zip(weights, biases, strict=True))

        return compute_once(outputs, by_matmul=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, *kept = ctx.saved_tensors
        weights = [
            source if isinstance(source, PackedMatrix) else weight
            for source, weight in zip(ctx.sources, kept, strict=True)
        ]
        axis: TensorAxis = ctx.axis
        later = deferral_queue() if axis.defers_weights else None
        now = later is None and bool(ctx.trained)
        gathered = _gather(axis, x) if axis.sequence_parallel and now else None
        flat = [gradient.flatten(0, -2) for gradient in gradients]
        input_gradient = flat[0] @ unpacked(weights[0], x.dtype)
        for gradient, weight in zip(flat[1:], weights[1:], strict=True):
            input_gradient.addmm_(gradient, unpacked(weight, x.dtype))
        reduced = _reduce(axis, input_gradient.view(*gradients[0].shape[:-1], -1))
        asked = [flat[number] for number in ctx.trained]  # frees the others

        def weight_gradients() -> list[Tensor]:
            pending = gathered or (_gather(axis, x) if axis.sequence_parallel else None)
            whole = (x if pending is None else pending()).flatten(0, -2)
            return [gradient.t() @ whole for gradient in asked]

        of_weights: list[Tensor | None] = [None] * len(weights)
        if later is not None and ctx.trained:
            sources = tuple(ctx.sources[number] for number in ctx.trained)
            later.append(DeferredGradient(sources, weight_gradients))
        elif ctx.trained:  # overlaps the reduction
            for number, of_weight in zip(ctx.trained, weight_gradients(), strict=True):
                of_weights[number] = of_weight
        bias_gradients = [
            gradient.sum(0) if has_bias and trained else None
            for gradient, has_bias, trained in zip(
                flat, ctx.has_bias, ctx.needs_input_grad[3 + len(weights) :], strict=True
            )
        ]
        return None, None, reduced(), *of_weights, *bias_gradients


def _row_linear(axis: TensorAxis, x: Tensor, weight: Tensor) -> Tensor:
    """Multiply so that the weight's gradient can be deferred where the schedule needs it.

    The input is saved before the matmul runs, so that a recomputation, which ends with the last
    saved tensor, skips the matmul; a hook catches the gradient of the output.
    """
    if not axis.defers_weights or not weight.requires_grad:
        return F.linear(x, weight)
    caught: list[Tensor] = []
    y = F.linear(_KeepInput.apply(caught, x, weight), weight.detach())
    if y.requires_grad:
        y.register_hook(caught.append)
    return y


class _KeepInput(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, caught: list[Tensor], x: Tensor, weight: Tensor) -> Tensor:
        ctx.caught, ctx.sources = caught, (weight,)
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, input_gradient: Tensor) -> tuple[None, Tensor, Tensor | None]:
        (x,) = ctx.saved_tensors
        gradient, later = ctx.caught.pop().flatten(0, -2), deferral_queue()

        def weight_gradients() -> list[Tensor]:
            return [gradient.t() @ x.flatten(0, -2)]

        if later is None:
            return None, input_gradient, *weight_gradients()
        later.append(DeferredGradient(ctx.sources, weight_gradients))
        return None, input_gradient, None


class _SumOverRanks(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, x: Tensor) -> Tensor:
        ctx.axis = axis
        if not axis.sequence_parallel and not is_recomputing():
            ctx.mark_dirty(x)
        return compute_once(lambda: _reduce(axis, x)())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        axis: TensorAxis = ctx.axis
        return None, _gather(axis, gradient)() if axis.sequence_parallel else gradient


class _Total(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, x: Tensor) -> Tensor:
        ctx.axis = axis
        return compute_once(lambda: _all_reduced(axis, x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, _all_reduced(ctx.axis, gradient)


def _all_reduced(axis: TensorAxis, x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


class _WholeTokens(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, x: Tensor) -> Tensor:
        ctx.axis = axis
        if not axis.sequence_parallel:
            return x.view_as(x)
        return compute_once(lambda: _gather(axis, x)(), by_matmul=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        axis: TensorAxis = ctx.axis
        # in place: the caller's gradient may be read elsewhere as well
        summand = gradient.contiguous() if axis.sequence_parallel else gradient.clone()
        return None, _reduce(axis, summand)()


class _OwnTokens(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, x: Tensor) -> Tensor:
        ctx.axis = axis
        return _own(axis, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, _gather(ctx.axis, gradient)()


class _EveryToken(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, x: Tensor) -> Tensor:
        ctx.axis = axis
        return compute_once(lambda: _gather(axis, x)(), by_matmul=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, _own(ctx.axis, gradient)


def _own(axis: TensorAxis, x: Tensor) -> Tensor:
    start, stop = axis.slice_of(x.size(1))
    return x[:, start:stop].contiguous()


class _Pending:
    """A collective in flight; calling it waits and returns the result."""

    def __init__(self, work: Any, result: Tensor, tokens_apart: int = 0) -> None:
        self.work, self.result, self.tokens_apart = work, result, tokens_apart

    def __call__(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        if not self.tokens_apart:
            return self.result
        size, (tokens, width) = self.tokens_apart, self.result.shape[1:]
        parts = self.result.view(size, -1, tokens, width)
        return parts.transpose(0, 1).reshape(-1, size * tokens, width)  # (B, S, H); B = 1: no copy


def _gather(axis: TensorAxis, x: Tensor) -> _Pending:
    """All-gather (B, s, H) to (B, S, H)."""
    whole = x.new_empty(axis.size * x.size(0), *x.shape[1:])
    work = all_gather(whole, x.contiguous(), group=axis.group, async_op=True)
    return _Pending(work, whole, axis.size)


def _reduce(axis: TensorAxis, x: Tensor) -> _Pending:
    """Sum (B, S, H) over the ranks, in place, or scattered to (B, s, H)."""
    if axis.size == 1:
        return _Pending(None, x)
    if not axis.sequence_parallel:
        return _Pending(dist.all_reduce(x, group=axis.group, async_op=True), x)
    sequences, tokens, width = x.size(0), x.size(1) // axis.size, x.size(2)
    parts = x.view(sequences, axis.size, tokens, width).transpose(0, 1).contiguous()
    own = x.new_empty(sequences, tokens, width)
    parts = parts.view(-1, tokens, width)
    return _Pending(reduce_scatter(own, parts, group=axis.group, async_op=True), own)
