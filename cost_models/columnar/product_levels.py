"""Levels of plans that are products of choices: which rows they stand for follows by arithmetic.

Plans of several grids, each with every combination of its choices: the rows of some of the choices
are counted, not looked for, and no row of the whole table is written down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_models.columnar.levels import Frame, Index, Level


class ProductFrame(Frame):
    """The combinations of every grid; ``sizes``: how many values each choice (a row) has there."""

    def __init__(self, sizes: NDArray[np.int64]) -> None:
        super().__init__(0)
        self.sizes = sizes

    def level(self, mask: int) -> ProductLevel:
        """Return every combination of some choices (bits) of each grid."""
        found = self.levels.get(mask)
        if not isinstance(found, ProductLevel):
            found = self.levels[mask] = ProductLevel(self, mask)
        return found

    def up_to(self, level: Level) -> ProductLevel:
        """Return the level of a level's choices and all before them: its rows are in order."""
        return self.level((1 << level.mask.bit_length()) - 1)

    def after(self, level: Level) -> ProductLevel:
        """Return the level of the choices behind those of another one."""
        return self.level((1 << len(self.sizes)) - (1 << level.mask.bit_length()))


class ProductLevel(Level):
    """Every combination of some choices of each grid, the last one fastest."""

    __slots__ = ("chosen", "counts", "product", "starts")

    def __init__(self, product: ProductFrame, mask: int) -> None:
        sizes = product.sizes
        self.product = product
        self.chosen = [number for number in range(len(sizes)) if mask >> number & 1]
        self.counts = np.prod(sizes[self.chosen], axis=0)  # of each grid
        self.starts = np.cumsum(self.counts) - self.counts
        super().__init__(product, mask, int(self.counts.sum()), None, None, None)

    def plans(self) -> Index:
        """Return how many plans each row stands for; the level is one of first choices."""
        return np.repeat(self.product.after(self).counts, self.counts)

    def places(self, rows: Index) -> tuple[Index, Mapping[int, Index]]:
        """Return the grid of some rows, and which value each of the choices has there."""
        grid = np.repeat(np.arange(len(self.counts)), self.counts)[rows]
        place, digits = rows - self.starts[grid], {}
        for number in reversed(self.chosen):
            place, digits[number] = np.divmod(place, self.product.sizes[number][grid])
        return grid, digits

    def way(self, coarser: Any) -> Index | None:
        """Return the row of a level of fewer choices for every row of this one."""
        if coarser is self:
            return None
        found: Index | None = self.ways.get(coarser.mask)
        if found is None:
            grid, digits = self.places(np.arange(self.size))
            found = np.zeros(self.size, dtype=np.intp)
            for number in coarser.chosen:
                found = found * self.product.sizes[number][grid] + digits[number]
            found = self.ways[coarser.mask] = found + coarser.starts[grid]
        return found
