"""Column- and row-cut matrices of a module, whichever way they are stored."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from executor.compat import Conv1D
from executor.tensor_parallel import WHOLE, TensorAxis, column_linear, row_linear


def columns(axis: TensorAxis, x: Tensor, *linears: Any) -> tuple[Tensor, ...]:
    """Multiply one input with column-cut matrices; (B, s, H) in, (B, S, features) out."""
    weights = [_out_in(linear) for linear in linears]
    return column_linear(axis, x, weights, [linear.bias for linear in linears])


def row(axis: TensorAxis, x: Tensor, linear: Any) -> Tensor:
    """Multiply with a row-cut matrix; (B, S, features) in, (B, s, H) out."""
    return row_linear(axis, x, _out_in(linear), linear.bias)


def whole(x: Tensor, linear: Any) -> Tensor:
    """Multiply the tokens that a rank has with a matrix that every rank holds."""
    (y,) = columns(WHOLE, x, linear)
    return y


def _out_in(linear: Any) -> Tensor:
    """Return the weight as (out, in); GPT-2's Conv1D stores (in, out)."""
    weight: Tensor = linear.weight
    return weight.t() if isinstance(linear, Conv1D) else weight
