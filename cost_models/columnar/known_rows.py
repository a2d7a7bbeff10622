"""Results of a formula that tables share: rows that an earlier table had are not priced again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.columnar.columns import (
    FactoredColumn,
    constant_or_column,
    joined_values,
    remember,
)
from cost_models.columnar.projections import Array, Index, distinct_rows

Floats = NDArray[np.float64]
Price = Callable[[Index], Sequence[Any]]  # rows of a table -> a column for each result
MOST: Final = 8_192  # distinct rows beyond which operations on fewer of them are faster


class KnownRows:
    """The results of a formula, by the values of the columns that it depends on."""

    def __init__(self) -> None:
        self.places: dict[tuple[Any, ...], int] = {}  # of each row's values, in the results
        self.found: Floats = np.zeros((0, 0))  # a line for each result
        self.alive: Any = None  # objects whose identities tell formulas apart

    def columns(self, columns: Sequence[Any], price: Price) -> list[Any] | None:
        """Return a column for each result; None if too many rows of the columns differ.

        ``price``: the formula, for some rows of the table.
        """
        factored = next((each for each in columns if type(each) is FactoredColumn), None)
        if factored is None:
            group, first = distinct_rows(*columns)
            return list(self._results([each[first] for each in columns], first, price)[:, group])
        cache, name = factored.projection.frame.cache, (id(self), *map(id, columns))
        if name in cache:
            result: list[Any] = cache[name][0]
            return result
        projection, values = joined_values(columns)
        if projection.size > MOST:
            return None
        values = [np.broadcast_to(each, projection.size) for each in values]
        found = self._results(values, projection.rows, price)
        result = [constant_or_column(projection, each) for each in found]
        remember(projection, name, (self, *columns), result)
        return result

    def _results(self, columns: Sequence[Array], rows: Index, price: Price) -> Floats:
        """Return the results for the values of some rows of a table."""
        wanted = list(zip(*(each.tolist() for each in columns), strict=True))
        new = {row: at for at, row in enumerate(wanted) if row not in self.places}
        if new:
            priced = price(rows[list(new.values())])
            found = np.array([np.broadcast_to(each, len(new)) for each in priced])
            found = found.reshape(len(priced), len(new))  # of no results: no lines
            self.found = np.concatenate([self.found, found], axis=1) if self.places else found
            self.places |= zip(new, range(len(self.places), self.found.shape[1]), strict=True)
        return self.found[:, [self.places[row] for row in wanted]]
