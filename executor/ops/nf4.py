"""Frozen matrices in 4 bits: NF4 (Dettmers et al., arXiv:2305.14314, sec. 3 and appendix E).

A matrix (out, in) is flattened row by row and cut into blocks of 64 elements; the last block is
padded with zeros. A block has one fp32 scale, its largest absolute value, and every element is the
nearest of 16 levels times that scale; two elements share a byte. A tensor-parallel rank packs its
own slice: blocks begin where the slice does, so packed bytes equal those of the whole matrix only
where rows of the slice are a multiple of 64.

A matrix is unpacked for its multiplication, in the forward pass and again in the backward pass;
only the packed bytes stay between them. Unpacked values pack to the same bytes again in fp32 or
more: the largest one of a block is its scale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from cost_models.model.lora import BLOCK, DEQUANTISED_AT_ONCE
from executor.ops.recompute import compute_once

# Dettmers et al., appendix E: quantiles of the normal distribution, with an exact zero
LEVELS: Final = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class PackedMatrix(NamedTuple):
    """A matrix in 4 bits."""

    codes: Tensor  # (32 blocks,) uint8, the first of two elements in the high bits
    scales: Tensor  # (blocks,) fp32
    shape: tuple[int, int]  # (out, in)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Unpack the matrix; 16 levels times a scale are rounded to ``dtype`` once."""
        work = torch.promote_types(dtype, torch.float32)
        table = _pairs(work, self.codes.device)
        flat = torch.empty(2 * self.codes.numel(), dtype=dtype, device=self.codes.device)
        for start, stop in _chunks(self.codes.numel() * 2):
            codes = self.codes[start // 2 : stop // 2].int()
            target = flat[start:stop]
            if dtype == work:
                values = torch.index_select(table, 0, codes, out=target.view(-1, 2))
            else:
                values = torch.index_select(table, 0, codes)
            values.view(-1, BLOCK).mul_(self.scales[start // BLOCK : stop // BLOCK, None])
            if dtype != work:
                target.copy_(values.view(-1))
        return flat[: math.prod(self.shape)].view(self.shape)


def num_blocks(shape: tuple[int, ...]) -> int:
    """Return the number of blocks of a matrix."""
    return -(-math.prod(shape) // BLOCK)


def pack(matrix: Tensor) -> PackedMatrix:
    """Pack a matrix (out, in) in 4 bits."""
    flat = matrix.detach().reshape(-1)
    count = num_blocks(tuple(matrix.shape))
    codes = torch.empty(count * BLOCK // 2, dtype=torch.uint8, device=flat.device)
    scales = torch.empty(count, dtype=torch.float32, device=flat.device)
    levels = torch.tensor(LEVELS, device=flat.device)
    between = (levels[1:] + levels[:-1]) / 2
    for start, stop in _chunks(count * BLOCK):
        values = flat[start:stop].float()
        values = F.pad(values, (0, stop - start - values.numel())).view(-1, BLOCK)
        largest = values.abs().amax(1)
        scales[start // BLOCK : stop // BLOCK] = largest
        values = values / torch.where(largest > 0, largest, 1.0)[:, None]
        nearest = torch.bucketize(values, between, out_int32=True).to(torch.uint8).view(-1, 2)
        codes[start // 2 : stop // 2] = nearest[:, 0] * 16 + nearest[:, 1]
    outputs, inputs = matrix.shape
    return PackedMatrix(codes, scales, (outputs, inputs))


def unpacked(weight: Tensor | PackedMatrix, dtype: torch.dtype) -> Tensor:
    """Return a weight unchanged, or unpacked in a precision."""
    return weight.matrix(dtype) if isinstance(weight, PackedMatrix) else weight


def linear(x: Tensor, weight: Tensor | PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """Multiply with a matrix (out, in), packed or not; a packed one and its bias are frozen."""
    if not isinstance(weight, PackedMatrix):
        return F.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias)
    return y


class _Linear(Function):  # type: ignore[misc]
    """Matmul with a frozen packed matrix: saves nothing for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: PackedMatrix, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return compute_once(lambda: F.linear(x, weight.matrix(x.dtype), bias), by_matmul=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient @ ctx.weight.matrix(gradient.dtype), None, None


def _chunks(numel: int) -> Iterator[tuple[int, int]]:
    """Yield ranges [start, stop) unpacked at a time: indices take more memory than the codes."""
    for start in range(0, numel, DEQUANTISED_AT_ONCE):
        yield start, min(numel, start + DEQUANTISED_AT_ONCE)


@functools.cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the two levels that each byte encodes, (256, 2)."""
    levels = torch.tensor(LEVELS, dtype=torch.float32).to(dtype)
    return torch.cartesian_prod(levels, levels).to(device)
