"""The two types of every formula: a number, or a column of a plan table. Everything broadcasts."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Count: TypeAlias = int | NDArray[np.integer[Any]]
Real: TypeAlias = float | NDArray[np.floating[Any]]
Flag: TypeAlias = bool | NDArray[np.bool_]
