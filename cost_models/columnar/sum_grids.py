"""Grids in which every distinct value of one set of terms meets every distinct value of another.

Two projections of a table share some columns. Rows that agree in these form a group: the grid of
the rows that either projection has there. Groups are ordered by shape, so that groups of equal
shape are adjacent and are processed together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.columnar.columns import FactoredColumn
from cost_models.columnar.projections import Frame, Index, Projection

Floats = NDArray[np.float64]
TRANSPOSED_AT_ONCE: Final = 64  # columns transposed together
MAX_BATCH_TERMS = 1_000_000  # terms gathered together, to fit in the processor's cache


class TermTable:
    """Columns of a projection or coarser ones; those of the same projection share one array."""

    def __init__(self, projection: Projection, columns: Sequence[Any]) -> None:
        self.projection = projection
        projections = [
            column.projection if type(column) is FactoredColumn else None for column in columns
        ]
        distinct = {id(each): each for each in projections}
        alike = [
            [k for k, mine in enumerate(projections) if mine is each] for each in distinct.values()
        ]
        self.numbers = np.concatenate(alike)  # index of the column of each stored term
        self.place = np.argsort(self.numbers)
        self.tables: list[tuple[Index | None, Floats]] = []  # row numbers, and terms by row
        for each, numbers in zip(distinct.values(), alike, strict=True):
            if each is None:  # constant
                nowhere: Index = np.zeros(projection.size, dtype=np.intp)
                table = np.array([np.ravel(columns[k]) for k in numbers], dtype=float)
                self.tables.append((nowhere, table.T))
                continue
            table = np.empty((each.size, len(numbers)))
            for begin in range(0, len(numbers), TRANSPOSED_AT_ONCE):
                some = numbers[begin : begin + TRANSPOSED_AT_ONCE]
                table[:, begin : begin + len(some)] = np.array([columns[k].values for k in some]).T
            self.tables.append((projection.index_into(each), table))

    def at(self, rows: Index) -> Floats:
        """Return all terms (a column each) at some rows of the projection."""
        found = np.empty((len(rows), len(self.numbers)))
        begin = 0
        for index, table in self.tables:
            end = begin + table.shape[1]
            found[:, begin:end] = table.take(rows if index is None else index[rows], axis=0)
            begin = end
        return found

    def of(self, term: int, rows: Index) -> Floats:
        """Return one term at some rows."""
        for index, table in self.tables:
            if term < table.shape[1]:
                values: Floats = table[rows if index is None else index[rows], term]
                return values
            term -= table.shape[1]
        raise IndexError(term)


class GroupedTerms:
    """Terms at the rows of a projection, ordered by group."""

    def __init__(self, terms: TermTable, group: Index, count: int) -> None:
        self.terms, self.group = terms, group
        self.order = np.argsort(group, kind="stable")
        self.counts = np.bincount(group, minlength=count)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])
        self.position = np.empty(len(group), dtype=np.intp)
        self.position[self.order] = np.arange(len(group)) - self.starts[group[self.order]]

    def of_term(self, term: int, groups: Index) -> tuple[Floats, Index]:
        """Return the values of one term in some groups, and where each group begins."""
        counts = self.counts[groups]
        starts = np.concatenate([[0], np.cumsum(counts)])
        rows = np.arange(starts[-1]) + np.repeat(self.starts[groups] - starts[:-1], counts)
        return self.terms.of(term, self.order[rows]), starts


class SumGrids:
    """The grids of two projections, one for each group of rows that agree in the shared columns."""

    def __init__(
        self, shared: Projection | None, one: TermTable, other: TermTable, frame: Frame
    ) -> None:
        self.frame, self.count = frame, 1 if shared is None else shared.size
        indexes = [_group_of_rows(shared, each.projection) for each in (one, other)]
        shapes = [np.bincount(index, minlength=self.count) for index in indexes]
        number = np.empty(self.count, dtype=np.intp)
        number[np.lexsort(shapes[::-1])] = np.arange(self.count)
        self.one = GroupedTerms(one, number[indexes[0]], self.count)
        self.other = GroupedTerms(other, number[indexes[1]], self.count)
        self.starts = np.concatenate([[0], np.cumsum(self.one.counts * self.other.counts)])
        self.size = int(self.starts[-1])

    def of(self, found: Floats, group: int) -> Floats:
        """Return the view of one group's grid in the concatenation of all grids."""
        grid = found[self.starts[group] : self.starts[group + 1]]
        return grid.reshape(self.one.counts[group], self.other.counts[group])

    def batches(self, groups: Index) -> Iterator[Index]:
        """Yield batches of groups with at most MAX_BATCH_TERMS terms, or of one larger group."""
        terms = len(self.one.terms.numbers) + len(self.other.terms.numbers)
        rows = np.maximum(self.one.counts[groups], self.other.counts[groups])
        size = np.concatenate([[0], terms * np.cumsum(rows)])
        begin = 0
        while begin < len(groups):
            end = int(np.searchsorted(size, size[begin] + MAX_BATCH_TERMS, side="right")) - 1
            yield groups[begin : max(end, begin + 1)]
            begin = max(end, begin + 1)

    def places(self) -> Index:
        """Return the position in the concatenated grids of every row of the table."""
        whole = self.frame.full
        z, a = (whole.index_into(side.terms.projection) for side in (self.one, self.other))
        rows = np.arange(whole.size)
        z, a = (rows if z is None else z), (rows if a is None else a)
        group = self.one.group[z]
        places: Index = self.starts[group] + self.one.position[z] * self.other.counts[group]
        return places + self.other.position[a]


def _group_of_rows(shared: Projection | None, projection: Projection) -> Index:
    """Return the group of every row of a projection."""
    if shared is None:
        return np.zeros(projection.size, dtype=np.intp)
    index = projection.index_into(shared)
    return np.arange(projection.size) if index is None else index


class StackedTerms(Struct, frozen=True):
    """The terms of one side in some groups, which are numbered from 0."""

    begins: Index  # the first group of each block, then the number of groups
    blocks: list[Floats]  # (rows, groups, terms) for groups of equal size

    @classmethod
    def of(cls, side: GroupedTerms, groups: Index) -> Self:
        """Gather the terms of one side."""
        counts = side.counts[groups]
        begins = np.flatnonzero(np.diff(counts, prepend=-1, append=-1))
        rows = [
            side.order[side.starts[groups[begin:end]] + np.arange(counts[begin])[:, None]]
            for begin, end in pairwise(begins)
        ]
        table = side.terms.at(np.concatenate([each.ravel() for each in rows]))
        ends = np.cumsum([each.size for each in rows])
        blocks = [
            table[end - each.size : end].reshape(*each.shape, -1)
            for each, end in zip(rows, ends, strict=True)
        ]
        return cls(begins, blocks)

    @classmethod
    def of_one(cls, terms: Floats) -> Self:
        """Wrap one group: rows, and all terms there."""
        return cls(np.array([0, 1]), [terms[:, None]])

    def at(self, share: float) -> Floats:
        """Return every term at one row of each group: the row after this share of its rows."""
        return np.concatenate([block[int(share * (len(block) - 1))] for block in self.blocks])

    def min_leads(self, terms: Index) -> Floats:
        """Return the least difference between one term (of each group) and every other term."""
        found = []
        for begin, block in zip(self.begins, self.blocks, strict=False):
            groups = np.arange(block.shape[1])
            mine = block[:, groups, terms[begin + groups]]
            found.append((mine[:, :, None] - block).min(axis=0))
        return np.concatenate(found)

    def min_leads_of_pairs(self, terms: Index, others: Index, groups: Index) -> Floats:
        """Return the least difference between ``terms`` and ``others``, for a list of groups."""
        found, ends = [], np.searchsorted(groups, self.begins)
        for number, block in enumerate(self.blocks):
            mine = slice(ends[number], ends[number + 1])
            at, theirs = groups[mine] - self.begins[number], others[mine]
            found.append((block[:, at, terms[groups[mine]]] - block[:, at, theirs]).min(axis=0))
        return np.concatenate(found)

    def of_pairs(self, terms: Index, groups: Index) -> Floats:
        """Return a term (a row each) of each of some groups of equal size."""
        number = bisect_right(self.begins, groups[0]) - 1
        rows: Floats = self.blocks[number][:, groups - self.begins[number], terms].T
        return rows
