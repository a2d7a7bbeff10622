"""Projections of tables that are products of choices: row numbers follow by arithmetic.

The table is a sequence of grids, each with every combination of its choices. Rows of a projection
are counted, not searched for, and no row of the full table is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.columnar.projections import Frame, Index, Projection

MAX_KEPT: Final = 100_000  # rows whose choices are kept for further projections


class ProductFrame(Frame):
    """The combinations of every grid; ``sizes[choice, grid]``: number of values of a choice."""

    def __init__(self, sizes: NDArray[np.int64]) -> None:
        super().__init__(0)
        self.sizes = sizes

    def project(self, mask: int) -> ProductProjection:
        """Return every combination of some choices (bits) of each grid."""
        found = self.projections.get(mask)
        if not isinstance(found, ProductProjection):
            found = self.projections[mask] = ProductProjection(self, mask)
        return found

    def prefix(self, projection: Projection) -> ProductProjection:
        """Return the projection to a projection's choices and all before them (rows in order)."""
        return self.project((1 << projection.mask.bit_length()) - 1)

    def suffix(self, projection: Projection) -> ProductProjection:
        """Return the projection to the choices after those of another projection."""
        return self.project((1 << len(self.sizes)) - (1 << projection.mask.bit_length()))


class ProductProjection(Projection):
    """Every combination of some choices of each grid, the last choice varying fastest."""

    __slots__ = ("chosen", "counts", "every", "product", "starts")

    def __init__(self, product: ProductFrame, mask: int) -> None:
        sizes = product.sizes
        self.product = product
        self.chosen = [number for number in range(len(sizes)) if mask >> number & 1]
        self.counts = np.prod(sizes[self.chosen], axis=0)  # rows of each grid
        self.starts = np.cumsum(self.counts) - self.counts
        self.every: tuple[Index, Mapping[int, Index]] | None = None  # ``grid_and_choices`` of all
        super().__init__(product, mask, int(self.counts.sum()), None, None, None)

    def num_plans(self) -> Index:
        """Return the number of plans with each row's choices; the projection is a ``prefix``."""
        return np.repeat(self.product.suffix(self).counts, self.counts)

    def grid_and_choices(self, rows: Index) -> tuple[Index, Mapping[int, Index]]:
        """Return the grid of some rows, and the position of each choice's value in it."""
        grid = np.repeat(np.arange(len(self.counts)), self.counts)[rows]
        place, digits = rows - self.starts[grid], {}
        for number in reversed(self.chosen):
            place, digits[number] = np.divmod(place, self.product.sizes[number][grid])
        return grid, digits

    def index_into(self, coarser: Any) -> Index | None:
        """Return the row number in a projection to fewer choices for every row."""
        if coarser is self:
            return None
        found: Index | None = self.indexes.get(coarser.mask)
        if found is None:
            places = self.every or self.grid_and_choices(np.arange(self.size))
            if self.size <= MAX_KEPT:
                self.every = places
            found = self.indexes[coarser.mask] = self._number_in(coarser, *places)
        return found

    def numbers_in(self, coarser: Sequence[Any], rows: Index) -> Iterator[Index]:
        """Yield the row numbers of some rows in each of some projections to fewer choices."""
        places = self.grid_and_choices(rows)
        for other in coarser:
            yield self._number_in(other, *places)

    def _number_in(self, coarser: Any, grid: Index, digits: Mapping[int, Index]) -> Index:
        found: Index = np.zeros(len(grid), dtype=np.intp)
        for number in coarser.chosen:
            found = found * self.product.sizes[number][grid] + digits[number]
        found += coarser.starts[grid]
        return found

    def rows_below(self, prefix: ProductProjection, rows: Index) -> Index:
        """Return the rows that share some rows of a prefix of this projection's choices."""
        grid, _ = prefix.grid_and_choices(rows)
        times = (self.counts // np.maximum(1, prefix.counts))[grid]
        begins = self.starts[grid] + (rows - prefix.starts[grid]) * times
        found: Index = np.repeat(begins - (np.cumsum(times) - times), times)
        return found + np.arange(len(found))
