"""Dictionary-encoded columns: the distinct values, and one code of a byte or two for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray


class DictionaryColumn(Struct, frozen=True):
    """Distinct values, and the position of each row's value among them.

    >>> column = DictionaryColumn(np.array([1, 2, 4]), np.array([2, 0, 2], dtype=np.uint8))
    >>> column[1:].tolist(), len(column)
    ([1, 4], 3)
    """

    values: NDArray[Any]
    codes: NDArray[Any]  # whole numbers

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: Any) -> Any:
        return self.values[self.codes[index]]

    def rows(self, index: Any) -> DictionaryColumn:
        """Return some rows."""
        return DictionaryColumn(self.values, self.codes[index])


def map_values(function: Callable[[NDArray[Any]], NDArray[Any]], column: Any) -> Any:
    """Apply an elementwise function to a column: once for each dictionary entry if encoded."""
    if isinstance(column, DictionaryColumn):
        return DictionaryColumn(function(column.values), column.codes)
    return function(column)


def decode(column: Any) -> NDArray[Any]:
    """Return a column with one value for each row."""
    found: NDArray[Any] = column[:] if isinstance(column, DictionaryColumn) else column
    return found


def concatenate(columns: Sequence[Any]) -> Any:
    """Concatenate columns.

    A constant column (``np.broadcast_to``) stays constant; columns with the same dictionary stay
    encoded.
    """
    some = [column for column in columns if len(column)] or columns[:1]
    first = some[0]
    if len(some) == 1:
        return first
    if all(
        isinstance(column, DictionaryColumn) and column.values is first.values for column in some
    ):
        return DictionaryColumn(first.values, np.concatenate([column.codes for column in some]))
    some = [decode(column) for column in some]
    if all(column.strides == (0,) and column[0] == some[0][0] for column in some):
        return np.broadcast_to(some[0][0], sum(map(len, some)))
    return np.concatenate(some)


def encode(values: NDArray[Any]) -> DictionaryColumn:
    """Return the dictionary encoding of a column.

    >>> encode(np.array([8, 2, 8])).codes.tolist()
    [1, 0, 1]
    """
    present, codes = np.unique(values, return_inverse=True)
    return DictionaryColumn(present, codes.astype(np.min_scalar_type(len(present))))
