"""Column- and row-parallel matrices of a module, in either storage order, with LoRA adapters.

An adapted matrix has two small ones (``cost_models.model.lora``): y = x W + s x A B. For a
column-parallel matrix, A is one more column-parallel matrix that reads the same input, but whole on
every rank; for a row-parallel one, A reads the rank's slice of the input and B adds one more
partial sum. Adapters therefore need no collective of their own, only that of summed gradients at
the end of a step. The factor s multiplies x A, which is small: no copy of an output or of its
gradient.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from executor.compat import Conv1D
from executor.ops import fp8
from executor.ops.nf4 import PackedMatrix
from executor.ops.nf4 import linear as multiply
from executor.ops.recompute import block_result, matmuls
from executor.parallel.tensor_parallel import (
    UNSHARDED,
    TensorAxis,
    column_linear,
    row_linear,
    sum_over_ranks,
)


def column_parallel(axis: TensorAxis, x: Tensor, *linears: Any) -> tuple[Tensor, ...]:
    """Multiply one input with column-parallel matrices; (B, s, H) in, (B, S, features) out."""
    adapted = [linear for linear in linears if is_adapted(linear)]
    weights = [_out_in(linear) for linear in linears]
    weights += [linear.lora_A.weight for linear in adapted]
    biases = [linear.bias for linear in linears] + [None] * len(adapted)
    if axis.fp8:
        return fp8.fp8_linears(x, weights, biases)
    with matmuls([*linears, *(linear.lora_A for linear in adapted)]):
        outputs = column_linear(axis, x, weights, biases)
    if not adapted:
        return outputs
    inner = iter(outputs[len(linears) :])
    with matmuls([linear.lora_B for linear in adapted]):
        return tuple(
            y + F.linear(linear.lora_scale * next(inner), linear.lora_B.weight)
            if is_adapted(linear)
            else y
            for linear, y in zip(linears, outputs, strict=False)
        )


def row_parallel(axis: TensorAxis, x: Tensor, linear: Any) -> Tensor:
    """Multiply with a row-parallel matrix; (B, S, features) in, (B, s, H) out."""
    if axis.fp8:
        with block_result():
            (y,) = fp8.fp8_linears(x, [_out_in(linear)], [linear.bias])
        return y
    if not is_adapted(linear):
        with matmuls([linear]):
            return row_linear(axis, x, _out_in(linear), linear.bias)
    with matmuls([linear.lora_A, linear.lora_B, linear]):
        inner = F.linear(x, linear.lora_A.weight)
        with block_result(summed=axis.size > 1):
            y = F.linear(linear.lora_scale * inner, linear.lora_B.weight)
            y = y + multiply(x, _out_in(linear))  # last: a recomputation may skip it
    if axis.size > 1:
        with block_result():
            y = sum_over_ranks(axis, y)
    return y if linear.bias is None else y + linear.bias


def replicated(x: Tensor, linear: Any) -> Tensor:
    """Multiply a rank's tokens with a matrix that every rank holds."""
    (y,) = column_parallel(UNSHARDED, x, linear)
    return y


def is_adapted(linear: Any) -> bool:
    """Return whether a matrix has LoRA adapters."""
    return hasattr(linear, "lora_A")


def _out_in(linear: Any) -> Tensor | PackedMatrix:
    """Return the weight as (out, in); GPT-2's Conv1D stores (in, out)."""
    if hasattr(linear, "weight_scales"):
        return PackedMatrix(linear.weight, linear.weight_scales, linear.packed_shape)
    weight: Tensor = linear.weight
    return weight.t() if isinstance(linear, Conv1D) else weight
