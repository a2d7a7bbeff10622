"""Columns of very many rows by few values: a byte or two for each row says which of them it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Coded:
    """A column: its values, and the position of each row's value among them.

    >>> column = Coded(np.array([1, 2, 4]), np.array([2, 0, 2], dtype=np.uint8))
    >>> column[1:].tolist(), len(column)
    ([1, 4], 3)
    """

    values: NDArray[Any]
    codes: NDArray[Any]  # whole numbers

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: Any) -> Any:
        return self.values[self.codes[index]]

    def rows(self, index: Any) -> Coded:
        """Return some rows."""
        return Coded(self.values, self.codes[index])


def of_values(function: Callable[[NDArray[Any]], NDArray[Any]], column: Any) -> Any:
    """Return a function of a column; of one by values, of each of these once."""
    if isinstance(column, Coded):
        return Coded(function(column.values), column.codes)
    return function(column)


def plain(column: Any) -> NDArray[Any]:
    """Return a column with a value for each row."""
    found: NDArray[Any] = column[:] if isinstance(column, Coded) else column
    return found


def joined(columns: Sequence[Any]) -> Any:
    """Put columns one below the other.

    What is one value for all rows (``np.broadcast_to``) stays one, and what is by values too.
    """
    some = [column for column in columns if len(column)] or columns[:1]
    first = some[0]
    if len(some) == 1:
        return first
    if all(isinstance(column, Coded) and column.values is first.values for column in some):
        return Coded(first.values, np.concatenate([column.codes for column in some]))
    some = [plain(column) for column in some]
    if all(column.strides == (0,) and column[0] == some[0][0] for column in some):
        return np.broadcast_to(some[0][0], sum(map(len, some)))
    return np.concatenate(some)


def coded(values: NDArray[Any]) -> Coded:
    """Return a column by the values that it has.

    >>> coded(np.array([8, 2, 8])).codes.tolist()
    [1, 0, 1]
    """
    there, codes = np.unique(values, return_inverse=True)
    return Coded(there, codes.astype(np.min_scalar_type(len(there))))
