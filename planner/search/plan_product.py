"""Plans as Cartesian products of choices, expanded into dictionary-encoded columns on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from cost_models.columnar.columns import FactoredColumn
from cost_models.columnar.dictionary_encoding import DictionaryColumn, encode
from cost_models.columnar.product_projections import ProductFrame, ProductProjection
from cost_models.columnar.projections import Index
from cost_models.plan.plan import FLAGS, PlanTable

Codes = NDArray[np.integer[Any]]


class ProductBlock(NamedTuple):
    """All plans of one grid of ranks: fixed columns, and the product of independent choices."""

    same: dict[str, Any]
    choices: Mapping[
        tuple[str, ...], Sequence[Any]
    ]  # columns -> values, or tuples with one value of each column

    @property
    def size(self) -> int:
        """Number of plans."""
        return prod(map(len, self.choices.values()))


class PlanProduct(Struct, frozen=True):
    """The plans of many grids; the last choice varies fastest."""

    values: Mapping[str, NDArray[Any]]  # distinct values of every column
    same: Mapping[str, Codes]  # codes of each grid
    choices: tuple[Mapping[str, Codes], ...]  # codes of all grids, concatenated
    sizes: NDArray[np.int64]  # number of values, (choices, grids)
    pinned: Mapping[str, Any]  # columns with a single value

    @classmethod
    def of(cls, blocks: Sequence[ProductBlock], pinned: Mapping[str, Any]) -> PlanProduct:
        """Concatenate the plans of several grids."""
        same = {
            name: encode(_as_array(name, [b.same[name] for b in blocks])) for name in blocks[0].same
        }
        choices = []
        for names in blocks[0].choices:
            rows = np.array(list(chain.from_iterable(block.choices[names] for block in blocks)))
            columns = zip(names, rows.reshape(len(rows), len(names)).T, strict=True)
            choices.append({name: encode(_as_array(name, column)) for name, column in columns})
        sizes = [[len(values) for values in block.choices.values()] for block in blocks]
        return cls(
            {name: c.values for group in (same, *choices) for name, c in group.items()},
            {name: column.codes for name, column in same.items()},
            tuple({name: column.codes for name, column in each.items()} for each in choices),
            np.array(sizes).T,
            pinned,
        )

    def slabs(self, min_size: int) -> Iterator[PlanProduct]:
        """Split by grids into products of at least ``min_size`` plans, except for the last."""
        begin = candidates = 0
        sizes = self.num_plans.tolist()
        for end, size in enumerate(sizes, start=1):
            candidates += size
            if candidates >= min_size or end == len(sizes):
                yield self.grids(np.arange(begin, end))
                begin, candidates = end, 0

    @property
    def num_plans(self) -> NDArray[np.int64]:
        """Number of plans of each grid."""
        found: NDArray[np.int64] = np.prod(self.sizes, axis=0)
        return found

    def grids(self, index: Index) -> PlanProduct:
        """Return the plans of some grids."""
        choices = []
        for choice, sizes in zip(self.choices, self.sizes, strict=True):
            times = sizes[index]
            begins = (np.cumsum(sizes) - sizes)[index] - (np.cumsum(times) - times)
            rows = np.repeat(begins, times) + np.arange(times.sum())
            choices.append({name: codes[rows] for name, codes in choice.items()})
        return PlanProduct(
            self.values,
            {name: codes[index] for name, codes in self.same.items()},
            tuple(choices),
            self.sizes[:, index],
            self.pinned,
        )

    def choices_first(self, names: Sequence[str]) -> PlanProduct:
        """Return the same plans, with the choices of some columns before all others."""
        first = [n for n, choice in enumerate(self.choices) if set(choice) & set(names)]
        order = [*first, *(n for n in range(len(self.choices)) if n not in first)]
        choices = tuple(self.choices[n] for n in order)
        return structs.replace(self, choices=choices, sizes=self.sizes[order])

    def first_values(self, kept: Sequence[int]) -> PlanProduct:
        """Return every combination of some choices, with the first values of the others.

        A plan is a row of the projection to these choices.
        """
        choices, sizes = list(self.choices), self.sizes.copy()
        for number in set(range(len(choices))) - set(kept):
            begins = np.cumsum(sizes[number]) - sizes[number]
            choices[number] = {name: codes[begins] for name, codes in choices[number].items()}
            sizes[number] = 1
        return structs.replace(self, choices=tuple(choices), sizes=sizes)

    def first_of(self, grid: int) -> PlanTable:
        """Return the first plan of a grid, alone."""
        one = self.grids(np.array([grid]))
        choices = tuple({name: codes[:1] for name, codes in each.items()} for each in one.choices)
        alone = structs.replace(one, choices=choices, sizes=np.ones_like(one.sizes))
        return alone.plans(alone.factored()[1].project(0), np.arange(1))

    def factored(self) -> tuple[PlanTable, ProductFrame]:
        """Return the plans with factored columns, and the frame of their projections."""
        frame = ProductFrame(self.sizes)
        groups = [(frame.project(0), self.same)]
        groups += [(frame.project(1 << n), choice) for n, choice in enumerate(self.choices)]
        columns = {name: _as_array(name, [value]) for name, value in self.pinned.items()}
        for projection, group in groups:
            for name, codes in group.items():
                values = self.values[name][codes]
                alone = (values == values[0]).all()
                columns[name] = values[:1] if alone else FactoredColumn(projection, values)  # type: ignore[assignment]
        return PlanTable(**columns), frame

    def plans(self, projection: ProductProjection, rows: Index) -> PlanTable:
        """Expand some rows of a projection into all plans that share them."""
        frame, (grid, digits) = projection.product, projection.grid_and_choices(rows)
        inner = frame.suffix(projection)
        times = inner.counts[grid]
        starts = np.cumsum(times) - times
        places = np.arange(times.sum()) + np.repeat(inner.starts[grid] - starts, times)
        columns = {name: np.repeat(codes[grid], times) for name, codes in self.same.items()}
        for number, choice in enumerate(self.choices):
            own = frame.project(1 << number)
            for name, codes in choice.items():
                if len(self.values[name]) == 1:
                    columns[name] = np.broadcast_to(codes[0], len(places))
                elif number in digits:
                    columns[name] = np.repeat(codes[own.starts[grid] + digits[number]], times)
                else:
                    index = inner.index_into(own)
                    columns[name] = (codes if index is None else codes[index])[places]
        found: dict[str, Any] = {
            name: _column(self.values[name], codes) for name, codes in columns.items()
        }
        for name, value in self.pinned.items():
            found[name] = np.broadcast_to(_as_array(name, [value])[0], len(places))
        return PlanTable(**found)


def _as_array(name: str, values: Any) -> NDArray[Any]:
    return np.asarray(values, dtype=np.bool_ if name in FLAGS else np.int64)


def _column(values: NDArray[Any], codes: NDArray[Any]) -> Any:
    return (
        DictionaryColumn(values, codes)
        if len(values) > 1
        else np.broadcast_to(values[0], len(codes))
    )
