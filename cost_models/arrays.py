"""The two types of every formula: a number, or a column of a plan table. Everything broadcasts."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Count: TypeAlias = int | NDArray[np.integer[Any]]
Real: TypeAlias = float | NDArray[np.floating[Any]]
Flag: TypeAlias = bool | NDArray[np.bool_]


def pick(columns: list[Real], index: Real) -> Real:
    """Return, row by row, the value of the column that ``index`` names."""
    stacked = np.stack([np.broadcast_to(column, np.shape(index)) for column in columns])
    picked: Real = np.take_along_axis(stacked, np.stack([index]), axis=0)[0]
    return picked
