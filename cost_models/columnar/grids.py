"""Grids in which the distinct values of some terms meet those of others.

Two levels of a table (``levels``) share some columns. Rows that agree in these are a group: a grid
of the rows that the one level has there, and the other. Groups are in the order of their shapes, so
that many of one shape lie side by side.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from cost_models.columnar.columns import Column
from cost_models.columnar.levels import Frame, Index, Level

Floats = NDArray[np.float64]
SIDE_BY_SIDE: Final = 64  # columns that are turned into rows in one go
AT_HAND = 1_000_000  # terms that are gathered in one go: what caches hold


class Terms:
    """Columns of a level, or of coarser ones; those of one level side by side."""

    def __init__(self, level: Level, columns: Sequence[Any]) -> None:
        self.level = level
        levels = [column.level if type(column) is Column else None for column in columns]
        distinct = {id(each): each for each in levels}
        alike = [[k for k, mine in enumerate(levels) if mine is each] for each in distinct.values()]
        self.numbers = np.concatenate(alike)  # of each one here, among the columns
        self.place = np.argsort(self.numbers)
        self.tables: list[tuple[Index | None, Floats]] = []  # rows of a level, and terms there
        for each, numbers in zip(distinct.values(), alike, strict=True):
            if each is None:  # the same everywhere
                nowhere: Index = np.zeros(level.size, dtype=np.intp)
                table = np.array([np.ravel(columns[k]) for k in numbers], dtype=float)
                self.tables.append((nowhere, table.T))
                continue
            table = np.empty((each.size, len(numbers)))
            for begin in range(0, len(numbers), SIDE_BY_SIDE):
                some = numbers[begin : begin + SIDE_BY_SIDE]
                table[:, begin : begin + len(some)] = np.array([columns[k].values for k in some]).T
            self.tables.append((level.way(each), table))

    def at(self, rows: Index) -> Floats:
        """Return all terms (a column each) at some rows of the level."""
        found = np.empty((len(rows), len(self.numbers)))
        begin = 0
        for way, table in self.tables:
            end = begin + table.shape[1]
            found[:, begin:end] = table.take(rows if way is None else way[rows], axis=0)
            begin = end
        return found

    def of(self, term: int, rows: Index) -> Floats:
        """Return one of them."""
        for way, table in self.tables:
            if term < table.shape[1]:
                values: Floats = table[rows if way is None else way[rows], term]
                return values
            term -= table.shape[1]
        raise IndexError(term)


class Side:
    """Terms at the rows of a level, group after group."""

    def __init__(self, terms: Terms, group: Index, count: int) -> None:
        self.terms, self.group = terms, group
        self.order = np.argsort(group, kind="stable")
        self.counts = np.bincount(group, minlength=count)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])
        self.position = np.empty(len(group), dtype=np.intp)
        self.position[self.order] = np.arange(len(group)) - self.starts[group[self.order]]

    def of_term(self, term: int, groups: Index) -> tuple[Floats, Index]:
        """Return the values of one term in some groups, and where each of them begins."""
        counts = self.counts[groups]
        starts = np.concatenate([[0], np.cumsum(counts)])
        rows = np.arange(starts[-1]) + np.repeat(self.starts[groups] - starts[:-1], counts)
        return self.terms.of(term, self.order[rows]), starts


class Grids:
    """Grids of the rows of two levels that can meet."""

    def __init__(self, shared: Level | None, one: Terms, other: Terms, frame: Frame) -> None:
        self.frame, self.count = frame, 1 if shared is None else shared.size
        ways = [_ways(shared, each.level) for each in (one, other)]
        shapes = [np.bincount(way, minlength=self.count) for way in ways]
        number = np.empty(self.count, dtype=np.intp)
        number[np.lexsort(shapes[::-1])] = np.arange(self.count)
        self.one = Side(one, number[ways[0]], self.count)
        self.other = Side(other, number[ways[1]], self.count)
        self.starts = np.concatenate([[0], np.cumsum(self.one.counts * self.other.counts)])
        self.size = int(self.starts[-1])

    def of(self, found: Floats, group: int) -> Floats:
        """Return the grid of a group in what there is of all of them."""
        grid = found[self.starts[group] : self.starts[group + 1]]
        return grid.reshape(self.one.counts[group], self.other.counts[group])

    def batches(self, groups: Index) -> Iterator[Index]:
        """Yield groups of which all terms are no more than AT_HAND numbers, but for single ones."""
        terms = len(self.one.terms.numbers) + len(self.other.terms.numbers)
        rows = np.maximum(self.one.counts[groups], self.other.counts[groups])
        size = np.concatenate([[0], terms * np.cumsum(rows)])
        begin = 0
        while begin < len(groups):
            end = int(np.searchsorted(size, size[begin] + AT_HAND, side="right")) - 1
            yield groups[begin : max(end, begin + 1)]
            begin = max(end, begin + 1)

    def places(self) -> Index:
        """Return the place in a grid of every row of the table."""
        whole = self.frame.whole
        z, a = (whole.way(side.terms.level) for side in (self.one, self.other))
        rows = np.arange(whole.size)
        z, a = (rows if z is None else z), (rows if a is None else a)
        group = self.one.group[z]
        places: Index = self.starts[group] + self.one.position[z] * self.other.counts[group]
        return places + self.other.position[a]


def _ways(shared: Level | None, level: Level) -> Index:
    """Return the group of every row of a level."""
    if shared is None:
        return np.zeros(level.size, dtype=np.intp)
    way = level.way(shared)
    return np.arange(level.size) if way is None else way


@dataclass(frozen=True, slots=True)
class Stack:
    """The terms of one side in some groups. Groups are counted from the first one of these."""

    begins: Index  # of each block, its first group; and how many groups there are
    blocks: list[Floats]  # (rows, groups, terms), of groups that have as many rows

    @classmethod
    def of(cls, side: Side, groups: Index) -> Self:
        """Gather them."""
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
        """Take one group: rows, and all terms there."""
        return cls(np.array([0, 1]), [terms[:, None]])

    def at(self, share: float) -> Floats:
        """Return every term at one row of each group: the one behind this share of them."""
        return np.concatenate([block[int(share * (len(block) - 1))] for block in self.blocks])

    def leads(self, terms: Index) -> Floats:
        """Return by how much one term (of each group) is ahead of each other one at least."""
        found = []
        for begin, block in zip(self.begins, self.blocks, strict=False):
            groups = np.arange(block.shape[1])
            mine = block[:, groups, terms[begin + groups]]
            found.append((mine[:, :, None] - block).min(axis=0))
        return np.concatenate(found)

    def leads_of(self, terms: Index, others: Index, groups: Index) -> Floats:
        """Return by how much terms (of each group) are ahead of some others, group by group."""
        found, ends = [], np.searchsorted(groups, self.begins)
        for number, block in enumerate(self.blocks):
            mine = slice(ends[number], ends[number + 1])
            at, theirs = groups[mine] - self.begins[number], others[mine]
            found.append((block[:, at, terms[groups[mine]]] - block[:, at, theirs]).min(axis=0))
        return np.concatenate(found)

    def of_group(self, terms: Index, group: int) -> Floats:
        """Return some terms (a row each) in one group."""
        number = bisect_right(self.begins, group) - 1
        rows: Floats = self.blocks[number][:, group - self.begins[number], terms].T
        return rows
