"""Types of the formulas: a number, or a column of a plan table. Everything broadcasts."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Count: TypeAlias = int | NDArray[np.integer[Any]]
Real: TypeAlias = float | NDArray[np.floating[Any]]
Flag: TypeAlias = bool | NDArray[np.bool_]

FP32 = 4.0  # bytes per element
FEW = 8  # rows, such as the ranks of one plan, that often take the same column


def pick(columns: list[Real], index: Real) -> Real:
    """Return ``columns[index]`` row by row."""
    if all(column is columns[0] for column in columns):
        return np.broadcast_to(columns[0], np.shape(index))
    if type(index) is np.ndarray and 0 < index.size <= FEW and np.all(index == index.flat[0]):
        return np.broadcast_to(columns[int(index.flat[0])], index.shape)  # nothing to stack
    shape = np.shape(index)
    stacked = np.stack([c if np.shape(c) == shape else np.broadcast_to(c, shape) for c in columns])
    picked: Real = np.take_along_axis(stacked, np.stack([index]), axis=0)[0]
    return picked


def padding(seq_len: Count | Real, chunk: float) -> Real:
    """Tokens of whole chunks over the tokens of a sequence: ceil(s / C) C / s.

    >>> float(padding(16, 64)), float(padding(128, 64))
    (4.0, 1.0)
    """
    tokens = np.maximum(1.0, np.multiply(1.0, seq_len))
    return np.ceil(tokens / chunk) * chunk / tokens
