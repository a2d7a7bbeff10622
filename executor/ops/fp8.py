"""Matmuls in 8 bits (Micikevicius et al., arXiv:2209.05433), on torch's scaled matmul.

Inputs and weights are rounded to e4m3, gradients to e5m2, each tensor with one scale that maps its
largest element to the largest number of the format. Scaling is dynamic: no history to save in
checkpoints, no synchronisation with the host. Sums and results have 16 bits or more; norms,
attention, embedding and head, and the weights themselves stay in 16 bits.

The 8-bit input is saved for the backward pass. Weights are not saved but rounded again, since ZeRO
may free them in between.

Shapes   T tokens, I inputs, O outputs of a matrix (O, I); all are multiples of 16
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from executor.compat import scaled_matmul
from executor.ops.recompute import compute_once
from hardware_profiles.errors import InputError

FORWARD_DTYPE: Final = torch.float8_e4m3fn  # more digits
BACKWARD_DTYPE: Final = torch.float8_e5m2  # more range
MIN_CAPABILITY: Final = (8, 9)
SMALLEST_SCALE: Final = 2.0**-126  # scale of a tensor of zeros


def check_device(device: torch.device) -> None:
    """Raise an InputError for a GPU without 8-bit scaled matmuls."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        own = ".".join(map(str, torch.cuda.get_device_capability(device)))
        needed = ".".join(map(str, MIN_CAPABILITY))
        raise InputError(
            f"precision = fp8: {torch.cuda.get_device_name(device)} has compute capability {own} "
            f"(must be {needed} or newer: Ada, Hopper, Blackwell)"
        )


class QuantizedMatrix(NamedTuple):
    """A matrix in 8 bits and its scale."""

    values: Tensor  # row-major
    scale: Tensor  # fp32, no dimension


def quantize(matrix: Tensor, kind: torch.dtype) -> QuantizedMatrix:
    """Quantize a matrix to an 8-bit format with one scale."""
    largest = torch.linalg.vector_norm(matrix, math.inf).float()
    scale = (largest / torch.finfo(kind).max).clamp(min=SMALLEST_SCALE)
    return QuantizedMatrix((matrix / scale).to(kind), scale)


def fp8_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Multiply one input (..., I) with several matrices (O, I) in 8 bits; it is quantized once."""
    outputs: tuple[Tensor, ...] = _Linears.apply(len(weights), x, *weights, *biases)
    return outputs


class _Linears(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, count: int, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        eight = quantize(x.flatten(0, -2), FORWARD_DTYPE)
        ctx.has_bias, ctx.dtype, ctx.shape = [b is not None for b in biases], x.dtype, x.shape
        ctx.save_for_backward(*eight, *weights)

        def outputs() -> tuple[Tensor, ...]:
            found = []
            for weight, bias in zip(weights, biases, strict=True):
                y = _product(eight, quantize(weight, FORWARD_DTYPE), x.dtype)
                y = y if bias is None else y.add_(bias)
                found.append(y.view(*x.shape[:-1], -1))
            return tuple(found)

        return compute_once(outputs, by_matmul=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        values, scale, *weights = ctx.saved_tensors
        x = _transposed(QuantizedMatrix(values, scale))
        count = len(weights)
        of_input: Tensor | None = None
        of_weights: list[Tensor | None] = []
        of_biases: list[Tensor | None] = []
        for number, weight in enumerate(weights):
            flat = gradients[number].flatten(0, -2)
            eight = quantize(flat, BACKWARD_DTYPE)
            part = _product(eight, _transposed(quantize(weight, FORWARD_DTYPE)), ctx.dtype)
            of_input = part if of_input is None else of_input.add_(part)
            of_weights.append(
                _product(_transposed(eight), x, weight.dtype)
                if ctx.needs_input_grad[2 + number]
                else None
            )
            trained = ctx.has_bias[number] and ctx.needs_input_grad[2 + count + number]
            of_biases.append(flat.sum(0) if trained else None)
        assert of_input is not None
        return None, of_input.view(ctx.shape), *of_weights, *of_biases


def _product(left: QuantizedMatrix, right: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """Return (N, K) times the transpose of (M, K): the kernels read both row by row."""
    scales = {"scale_a": left.scale, "scale_b": right.scale}
    found: Tensor = scaled_matmul(left.values, right.values.t(), **scales, out_dtype=dtype)
    return found


def _transposed(matrix: QuantizedMatrix) -> QuantizedMatrix:
    return QuantizedMatrix(matrix.values.t().contiguous(), matrix.scale)
