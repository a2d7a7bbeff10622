"""The distinct rows of some columns of a table, and how rows of more columns fall on them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.intp]
Array = NDArray[Any]
NEARLY_ALL: Final = 0.6  # of another level's rows: not worth a level of its own
DENSE: Final = 1 << 16  # combinations that are counted in a table of them all, whatever is there


class Level:
    """The distinct rows of some columns."""

    __slots__ = (
        "frame",
        "from_parent",
        "groups",
        "joins",
        "mask",
        "parent",
        "rows",
        "size",
        "ways",
    )

    def __init__(
        self, frame: Frame, mask: int, rows: Index, parent: Level | None, from_parent: Index | None
    ) -> None:
        self.frame, self.mask, self.rows, self.size = frame, mask, rows, len(rows)
        self.parent, self.from_parent = parent, from_parent
        self.joins: dict[int, tuple[Level, Index | None, Index | None]] = {}
        self.ways: dict[int, Index] = {}
        self.groups: dict[bytes, Level] = {}

    def join(self, other: Level) -> tuple[Level, Index | None, Index | None]:
        """Return the level of both together, and the rows of each that its rows stand for."""
        found = self.joins.get(id(other))
        if found is None:
            level = self.frame.level(self.mask | other.mask)
            found = level, level.way(self), level.way(other)
            self.joins[id(other)] = found
        return found

    def way(self, coarser: Level) -> Index | None:
        """Return the row of a coarser level for every row of this one; None: it is the same."""
        if coarser is self:
            return None
        if id(coarser) not in self.ways:
            self.ways[id(coarser)] = coarser.of_rows(self.rows)
        return self.ways[id(coarser)]

    def grouped(self, codes: Index, count: int) -> Level:
        """Return the level of groups of this one's rows."""
        key = codes.tobytes()
        if key not in self.groups:
            way = self.frame.whole.way(self)
            self.groups[key] = self.frame.add(codes if way is None else codes[way], count)
        return self.groups[key]

    def of_rows(self, rows: Index) -> Index:
        """Return the rows of this level for some rows of the table."""
        if self.parent is None or self.from_parent is None:
            return rows
        if self.parent.parent is None:
            return self.from_parent[rows]
        return self.from_parent[self.parent.of_rows(rows)]


class Frame:
    """The rows of a table, and the levels that its columns were found to need."""

    def __init__(self, num_rows: int) -> None:
        self.codes: list[Array] = []
        self.counts: list[int] = []
        self.num_rows = num_rows
        self.whole = Level(self, -1, np.arange(num_rows), None, None)
        self.levels: dict[int, Level] = {}

    def add(self, codes: Array, count: int) -> Level:
        """Add a column of codes 0, 1, ...; return its level, whose rows are these."""
        bit = 1 << len(self.codes)
        self.codes.append(codes)
        self.counts.append(count)
        rows = np.zeros(count, dtype=np.intp)
        rows[codes] = self.whole.rows
        level = Level(self, bit, rows, self.whole, codes.astype(np.intp))
        self.levels[bit] = level
        return level

    def level(self, mask: int) -> Level:
        """Return the distinct rows of some columns, or of more where that makes hardly more."""
        if mask == -1:
            return self.whole
        found = self.levels.get(mask)
        if found is None:
            wider = [level for level in self.levels.values() if level.mask & mask == mask]
            parent = min(wider, key=lambda level: level.size, default=self.whole)
            found = self._distinct(mask, parent)
            self.levels[mask] = found
        return found

    def _distinct(self, mask: int, parent: Level) -> Level:
        key, radix = np.zeros(parent.size, dtype=np.int64), 1
        for position, (codes, count) in enumerate(zip(self.codes, self.counts, strict=True)):
            if mask >> position & 1:
                key *= count
                key += codes[parent.rows]
                radix *= count
                if radix > 8 * parent.size + DENSE:
                    known, key = np.unique(key, return_inverse=True)
                    radix = len(known)
        there = np.zeros(radix, dtype=bool)
        there[key] = True
        number = np.cumsum(there) - 1
        size = int(number[-1]) + 1
        if size > NEARLY_ALL * parent.size:
            return parent
        index = number[key]
        rows = np.zeros(size, dtype=np.intp)
        rows[index] = parent.rows
        return Level(self, mask, rows, parent, index)
