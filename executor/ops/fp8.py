"""Matmuls in 8 bits (Micikevicius et al., arXiv:2209.05433), on torch's scaled matmul.

Inputs and weights are rounded to e4m3, gradients to e5m2, each tensor with one scale that takes its
largest element to the largest number of the format. Scales follow the data of the moment: there is
no history to keep in checkpoints, and no word to the host. Sums and results are of 16 bits and
more; norms, attention, embedding and head, and the weights themselves stay in 16 bits.

Of the input its 8 bits are kept for the backward pass. Of a weight nothing: it is rounded again,
since ZeRO may have given it back in between.

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
from executor.ops.selective_recompute import once
from hardware_profiles.errors import InputError

FORWARD: Final = torch.float8_e4m3fn  # more digits
BACKWARD: Final = torch.float8_e5m2  # more range
CAPABILITY: Final = (8, 9)
SMALLEST: Final = 2.0**-126  # scale of a tensor of zeros


def check_device(device: torch.device) -> None:
    """Raise an InputError for a GPU without scaled matmuls of 8 bits."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        own = ".".join(map(str, torch.cuda.get_device_capability(device)))
        needed = ".".join(map(str, CAPABILITY))
        raise InputError(
            f"precision = fp8: {torch.cuda.get_device_name(device)} has compute capability {own} "
            f"(must be {needed} or newer: Ada, Hopper, Blackwell)"
        )


class Rounded(NamedTuple):
    """A matrix in 8 bits, and what one of its units stands for."""

    values: Tensor  # in rows
    scale: Tensor  # fp32, no dimension


def rounded(matrix: Tensor, kind: torch.dtype) -> Rounded:
    """Round a matrix to 8 bits."""
    largest = torch.linalg.vector_norm(matrix, math.inf).float()
    scale = (largest / torch.finfo(kind).max).clamp(min=SMALLEST)
    return Rounded((matrix / scale).to(kind), scale)


def linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Multiply one input (..., I) with several matrices (O, I) in 8 bits; it is rounded once."""
    outputs: tuple[Tensor, ...] = _Linears.apply(len(weights), x, *weights, *biases)
    return outputs


class _Linears(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, count: int, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        eight = rounded(x.flatten(0, -2), FORWARD)
        ctx.has_bias, ctx.dtype, ctx.shape = [b is not None for b in biases], x.dtype, x.shape
        ctx.save_for_backward(*eight, *weights)

        def outputs() -> tuple[Tensor, ...]:
            found = []
            for weight, bias in zip(weights, biases, strict=True):
                y = _product(eight, rounded(weight, FORWARD), x.dtype)
                y = y if bias is None else y.add_(bias)
                found.append(y.view(*x.shape[:-1], -1))
            return tuple(found)

        return once(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        values, scale, *weights = ctx.saved_tensors
        x = _turned(Rounded(values, scale))
        count = len(weights)
        of_input: Tensor | None = None
        of_weights: list[Tensor | None] = []
        of_biases: list[Tensor | None] = []
        for number, weight in enumerate(weights):
            flat = gradients[number].flatten(0, -2)
            eight = rounded(flat, BACKWARD)
            part = _product(eight, _turned(rounded(weight, FORWARD)), ctx.dtype)
            of_input = part if of_input is None else of_input.add_(part)
            of_weights.append(
                _product(_turned(eight), x, weight.dtype)
                if ctx.needs_input_grad[2 + number]
                else None
            )
            trained = ctx.has_bias[number] and ctx.needs_input_grad[2 + count + number]
            of_biases.append(flat.sum(0) if trained else None)
        assert of_input is not None
        return None, of_input.view(ctx.shape), *of_weights, *of_biases


def _product(left: Rounded, right: Rounded, dtype: torch.dtype) -> Tensor:
    """Return (N, K) times the transpose of (M, K): the kernels read both along their rows."""
    scales = {"scale_a": left.scale, "scale_b": right.scale}
    found: Tensor = scaled_matmul(left.values, right.values.t(), **scales, out_dtype=dtype)
    return found


def _turned(matrix: Rounded) -> Rounded:
    return Rounded(matrix.values.t().contiguous(), matrix.scale)
