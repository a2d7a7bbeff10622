"""The distinct rows of some columns of a table, and how rows of more columns fall on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.columnar.codes import Coded

Index = NDArray[np.integer[Any]]
Array = NDArray[Any]
NEARLY_ALL: Final = 0.95  # of another level's rows: not worth a level of its own
FEW: Final = 64  # values that are looked for one by one
DENSE: Final = 1 << 16  # combinations that are counted in a table of them all, whatever is there


class Level:
    """The distinct rows of some columns."""

    __slots__ = (
        "_rows",
        "frame",
        "from_parent",
        "groups",
        "joins",
        "mask",
        "parent",
        "size",
        "ways",
    )

    def __init__(
        self,
        frame: Frame,
        mask: int,
        size: int,
        rows: Index | None,
        parent: Level | None,
        from_parent: Index | None,
    ) -> None:
        self.frame, self.mask, self.size, self._rows = frame, mask, size, rows
        self.parent, self.from_parent = parent, from_parent
        self.joins: dict[int, tuple[Level, Index | None, Index | None]] = {}
        self.ways: dict[int, Index] = {}
        self.groups: dict[bytes, Level] = {}

    @property
    def rows(self) -> Index:
        """One row of the table for each of these; of a single column seldom asked for."""
        if self._rows is None:
            assert self.from_parent is not None
            self._rows = np.zeros(self.size, dtype=np.intp)
            self._rows[self.from_parent] = self.frame.whole.rows
        return self._rows

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
            # (numpy takes rows by the machine's own integers, or turns others into them each time)
            self.ways[id(coarser)] = coarser.of_rows(self.rows).astype(np.intp, copy=False)
        return self.ways[id(coarser)]

    def grouped(self, codes: Index, count: int) -> Level:
        """Return the level of groups of this one's rows."""
        key = codes.tobytes()
        if key not in self.groups:
            way = self.frame.whole.way(self)
            codes = codes if way is None else codes[way]
            group = self.groups[key] = self.frame.add(codes, count, self.mask)
            self.frame.grouped |= group.mask
        return self.groups[key]

    def of_rows(self, rows: Index) -> Index:
        """Return the rows of this level for some rows of the table."""
        if self.parent is None or self.from_parent is None:
            return rows
        if self.parent.parent is None:
            return self.from_parent if rows is self.parent.rows else self.from_parent[rows]
        return self.from_parent[self.parent.of_rows(rows)]


class Frame:
    """The rows of a table, and the levels that its columns were found to need."""

    def __init__(self, num_rows: int) -> None:
        self.codes: list[Array] = []
        self.sources: list[int] = []  # of each, the columns that it follows from
        self.counts: list[int] = []
        self.grouped = 0  # columns that are groups of a level's rows
        self.num_rows = num_rows
        self.whole = Level(self, -1, num_rows, np.arange(num_rows), None, None)
        self.levels: dict[int, Level] = {}
        self.made: dict[Any, Any] = {}  # by operations on columns (``columns``)

    def add(self, codes: Array, count: int, source: int = 0) -> Level:
        """Add a column of codes 0, 1, ...; return its level, whose rows are these.

        ``source``: the columns it follows from, where it does.
        """
        bit = 1 << len(self.codes)
        self.sources.append(source or bit)
        self.codes.append(codes)
        self.counts.append(count)
        level = Level(self, bit, count, None, self.whole, self.codes[-1])
        self.levels[bit] = level
        return level

    def forget(self) -> None:
        """Let go of all levels and columns, which refer to each other; not to be used after."""
        for level in (self.whole, *self.levels.values()):
            level.joins.clear()
            level.ways.clear()
            level.groups.clear()
        self.levels.clear()
        self.made.clear()
        del self.whole

    def level(self, mask: int) -> Level:
        """Return the distinct rows of some columns, or of more where that makes hardly more."""
        if mask == -1:
            return self.whole
        found = self.levels.get(mask)
        if found is None:
            if self._tells_all(mask):
                return self.whole
            wider = [level for level in self.levels.values() if self._covers(level, mask)]
            parent = min(wider, key=lambda level: level.size, default=self.whole)
            found = self._distinct(mask, parent)
            self.levels[mask] = found
        return found

    def shared(self, one: Level, other: Level) -> Level | None:
        """Return the level of what two others both tell; None: there is no such column."""
        mask = 0
        for position, source in enumerate(self.sources):
            bit = 1 << position
            if all(level.mask & bit or level.mask & source == source for level in (one, other)):
                mask |= bit
        return self.level(mask) if mask else None

    def _tells_all(self, mask: int) -> bool:
        """Whether all columns follow from some: there are no fewer rows of these."""
        bits = ((1 << position, source) for position, source in enumerate(self.sources))
        return all(mask & bit or (source != bit and not source & ~mask) for bit, source in bits)

    def _covers(self, level: Level, mask: int) -> bool:
        """Whether rows that agree in a level's columns agree in some others."""
        missing = mask & ~level.mask
        while missing:
            bit = missing & -missing
            if self.sources[bit.bit_length() - 1] & ~level.mask:
                return False
            missing ^= bit
        return True

    def _distinct(self, mask: int, parent: Level) -> Level:
        parts = self._parts(mask, parent)
        index, there = _numbered(*_combined(parts, parent.size))
        size = len(there)
        if size > NEARLY_ALL * parent.size:
            return parent
        rows = np.zeros(size, dtype=np.intp)
        rows[index.astype(np.intp, copy=False)] = parent.rows  # (as in ``way``)
        return Level(self, mask, size, rows, parent, index)

    def _parts(self, mask: int, parent: Level) -> Iterator[tuple[Array, int]]:
        """Yield codes, and how many there are of each, that tell the columns of a mask apart.

        In the whole table all columns but groups are one: they follow from far fewer rows.
        """
        grouped = mask & self.grouped
        if parent is self.whole and grouped and mask != grouped:
            base = self.level(mask ^ grouped)
            if base is not parent:
                way = parent.way(base)
                assert way is not None
                yield way, base.size
                mask = grouped
        for position, (codes, count) in enumerate(zip(self.codes, self.counts, strict=True)):
            if mask >> position & 1:
                yield codes if parent is self.whole else codes[parent.rows], count


def _combined(parts: Iterable[tuple[Array, int]], size: int) -> tuple[Array, int]:
    """Return one key for the codes of each row, in their order; keys are below the second number.

    ``parts``: columns of codes, and how many there are of each.
    """
    key: Array = np.zeros(size, dtype=np.int32)
    radix, most = 1, 4 * size + DENSE
    for codes, count in parts:
        if radix * count > most:
            key, there = _numbered(key, radix)
            radix = len(there)
            if radix * count > np.iinfo(np.int32).max:
                key = key.astype(np.int64)
        key *= count
        key += codes
        radix *= count
    return key, radix


def _numbered(key: Array, radix: int) -> tuple[Index, Index]:
    """Return the position of every key among the distinct ones, and these; keys are below radix."""
    if radix > 64 * len(key) + DENSE:
        there, index = np.unique(key, return_inverse=True)
        return index, there
    seen, key = np.zeros(radix, dtype=bool), key.astype(np.intp)
    seen[key] = True
    there = np.flatnonzero(seen)
    number = np.empty(radix, dtype=np.int32)
    number[there] = np.arange(len(there), dtype=np.int32)
    return number.take(key), there


def distinct(values: Any) -> tuple[Array, Array]:
    """Return the distinct values in order, and every row's position among them."""
    if isinstance(values, Coded):
        return _distinct_coded(values)
    if values.strides == (0,):
        return values[:1], np.broadcast_to(np.intp(0), len(values))
    least, most = values.min(), values.max()
    if least == most:
        return values[:1], np.broadcast_to(np.intp(0), len(values))
    if values.dtype == bool:
        return np.array([False, True]), values.astype(np.int32)
    span = int(most) - int(least) + 1
    if span > DENSE + 8 * len(values):
        return np.unique(values, return_inverse=True)
    offset = values - least
    there = np.zeros(span, dtype=bool)
    there[offset] = True
    number = np.cumsum(there, dtype=np.int32) - 1
    return np.flatnonzero(there) + least, number.take(offset)


def _distinct_coded(column: Coded) -> tuple[Array, Array]:
    """Return ``distinct`` of a column by values, some of which no row may have any more."""
    there = np.flatnonzero(_occurring(column.codes, len(column.values)))
    values, number = np.unique(column.values[there], return_inverse=True)
    if len(values) == 1:
        return values, np.broadcast_to(np.intp(0), len(column))
    if len(values) == len(column.values) and (number == there).all():
        return values, column.codes
    place = np.zeros(len(column.values), dtype=column.codes.dtype)
    place[there] = number
    return values, place[column.codes]


def _occurring(codes: Array, count: int) -> Array:
    """Return which of the codes 0, 1, ... there are."""
    if count > FEW:
        seen: Array = np.bincount(codes, minlength=count) > 0
        return seen
    least, most = int(codes.min()), int(codes.max())
    found = np.zeros(count, dtype=bool)
    found[[least, most]] = True
    for code in range(least + 1, most):
        found[code] = (codes == code).any()
    return found


def distinct_rows(*columns: Any) -> tuple[Index, Index]:
    """Return, for every row, which of the distinct rows it is, and one row of each.

    >>> distinct_rows(np.array([2, 1, 2, 2]), np.array([5, 5, 5, 7]))[0].tolist()
    [1, 0, 1, 2]
    """
    codes = [(codes, len(values)) for values, codes in map(distinct, columns)]
    group, there = _numbered(*_combined((c for c in codes if c[1] > 1), len(columns[0])))
    group = group.astype(np.intp, copy=False)
    first = np.zeros(len(there), dtype=np.intp)
    first[group[::-1]] = np.arange(len(group))[::-1]
    return group, first
