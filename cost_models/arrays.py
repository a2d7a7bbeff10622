"""Types of the formulas: a number, or a column of a plan table. Everything broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Count: TypeAlias = int | NDArray[np.integer[Any]]
Real: TypeAlias = float | NDArray[np.floating[Any]]
Flag: TypeAlias = bool | NDArray[np.bool_]

FP32, FP8 = 4.0, 1.0  # bytes per element
FEW = 8  # rows, such as the ranks of one plan, that often take the same column


def holds(flag: Flag | Real | Count) -> bool:
    """Return whether a flag is set, or a number not zero, in some row; quick for few rows."""
    if type(flag) is np.ndarray:
        return bool(flag.item() if flag.size == 1 else flag.any())
    return bool(np.any(flag))


def everywhere(flag: Flag) -> bool:
    """Return whether a flag is set in all rows; quick for few rows."""
    return bool(flag.all()) if type(flag) is np.ndarray else bool(np.all(flag))


def among(column: Any, codes: Sequence[int]) -> Any:
    """Return which rows have one of a few codes; quicker than ``np.isin``."""
    return reduce(or_, [column == code for code in codes])


def ascending(*columns: Any) -> NDArray[Any]:
    """Return the distinct values of columns; ``np.unique`` alone imports numpy.ma for it."""
    return np.unique(np.concatenate(columns), return_counts=True)[0]


def pick(columns: list[Real], index: Real) -> Real:
    """Return ``columns[index]`` row by row."""
    shape = np.shape(index)
    first = columns[0]
    if all(column is first for column in columns):
        return first if np.shape(first) == shape else np.broadcast_to(first, shape)
    if type(index) is np.ndarray and 0 < index.size <= FEW:
        number = int(index.flat[0])
        if index.size == 1 or np.all(index == number):  # nothing to stack
            chosen = columns[number]
            return chosen if np.shape(chosen) == shape else np.broadcast_to(chosen, shape)
    columns = [c if np.shape(c) == shape else np.broadcast_to(c, shape) for c in columns]
    picked: Real
    if type(index) is np.ndarray and index.ndim == 1:
        picked = np.array(columns)[index, np.arange(index.size)]
    else:
        picked = np.take_along_axis(np.stack(columns), np.stack([index]), axis=0)[0]
    return picked


def padding(seq_len: Count | Real, chunk: float) -> Real:
    """Tokens of whole chunks over the tokens of a sequence: ceil(s / C) C / s.

    >>> float(padding(16, 64)), float(padding(128, 64))
    (4.0, 1.0)
    """
    tokens = np.maximum(1.0, np.multiply(1.0, seq_len))
    return np.ceil(tokens / chunk) * chunk / tokens
