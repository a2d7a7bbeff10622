"""Grouped matmul: rows sorted by expert, each block multiplied with its expert's matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from executor.compat import grouped_mm
from executor.ops.deferred_weight_gradients import DeferredGradient, deferral_queue
from executor.ops.recompute import compute_once


def grouped_linear(
    rows: Tensor,
    counts: Sequence[int],
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    adds_bias: bool = True,
) -> Tensor:
    """Multiply block e of the rows, ``counts[e]`` long, with ``weight[e]``; (R, in) -> (R, out).

    weight   (experts, out, in), or ``transposed`` (experts, in, out)       bias   (experts, out)

    ``adds_bias``: false on all but one of the ranks whose results are summed. Every expert's
    gradient is written, zeros for an expert without rows; frozen weights and their biases have
    none.
    """
    result: Tensor = _GroupedLinear.apply(rows, list(counts), weight, bias, transposed, adds_bias)
    return result


class _GroupedLinear(Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        counts: list[int],
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
        adds_bias: bool,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.sources = (weight,)
        ctx.counts, ctx.transposed = counts, transposed
        ctx.bias, ctx.adds_bias = bias is not None, adds_bias

        def result() -> Tensor:
            product = _multiply(rows, counts, weight if transposed else weight.transpose(1, 2))
            if bias is not None and adds_bias:
                for index, block in _blocks(counts):
                    product[block].add_(bias[index])
            return product

        return compute_once(result, by_matmul=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        rows, weight = ctx.saved_tensors
        counts, transposed = ctx.counts, ctx.transposed
        of_rows = _multiply(gradient, counts, weight.transpose(1, 2) if transposed else weight)
        first, second = (rows, gradient) if transposed else (gradient, rows)

        def weight_gradients() -> list[Tensor]:
            return [_outer(first, second, counts)]

        later, of_weight, of_bias = deferral_queue(), None, None
        if not ctx.needs_input_grad[2]:  # frozen
            return of_rows, None, None, None, None, None
        if later is None:
            (of_weight,) = weight_gradients()
        else:
            later.append(DeferredGradient(ctx.sources, weight_gradients))
        if ctx.bias:
            of_bias = gradient.new_zeros(len(counts), gradient.size(1))
            if ctx.adds_bias:
                for index, block in _blocks(counts):
                    torch.sum(gradient[block], 0, out=of_bias[index])
        return of_rows, None, of_weight, of_bias, None, None


def _multiply(rows: Tensor, counts: list[int], matrices: Tensor) -> Tensor:
    """Return block e of the rows times ``matrices[e]`` (in, out)."""
    if _has_kernel(rows, matrices.size(1), matrices.size(2)):
        product: Tensor = grouped_mm(rows, matrices, offs=_ends(rows, counts))
        return product
    result = rows.new_empty(rows.size(0), matrices.size(2))
    for index, block in _blocks(counts):
        torch.mm(rows[block], matrices[index], out=result[block])
    return result


def _outer(first: Tensor, second: Tensor, counts: list[int]) -> Tensor:
    """Return, for every expert, block e of ``first`` transposed times block e of ``second``."""
    if _has_kernel(first, first.size(1), second.size(1)):
        product: Tensor = grouped_mm(first.t(), second, offs=_ends(first, counts))
        return product
    result = first.new_empty(len(counts), first.size(1), second.size(1))
    for index, block in _blocks(counts):
        torch.mm(first[block].t(), second[block], out=result[index])
    return result


def _has_kernel(rows: Tensor, *widths: int) -> bool:
    """Return whether torch's grouped kernel supports these matrices: 16 bits, rows of 16 bytes."""
    aligned = all(width % 8 == 0 for width in widths)
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and rows.size(0) > 0


def _ends(rows: Tensor, counts: list[int]) -> Tensor:
    return torch.tensor(counts, device=rows.device).cumsum(0, dtype=torch.int32)


def _blocks(counts: list[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for index, count in enumerate(counts):
        yield index, slice(start, start + count)
        start += count
