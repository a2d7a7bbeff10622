"""Projections of a table: the distinct rows of some columns, and their mapping to more columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.columnar.dictionary_encoding import DictionaryColumn

Index = NDArray[np.integer[Any]]
Array = NDArray[Any]
NEARLY_ALL: Final = 0.95  # a projection with more than this share of its parent's rows is not built
MAX_SCANNED_CODES: Final = 64  # up to this many codes are searched for one by one
DENSE_KEYS: Final = 1 << 16  # key ranges up to this size are counted in a full table
ZEROS: Final = np.broadcast_to(np.intp(0), 1 << 40)  # the codes of constant columns


class Projection:
    """The distinct rows of some columns (``mask``: one bit for each column of the frame)."""

    __slots__ = (
        "_rows",
        "frame",
        "from_parent",
        "groups",
        "indexes",
        "joins",
        "mask",
        "parent",
        "repetitions",
        "size",
    )
    times = 1  # how often the rows of ``base`` are repeated

    def __init__(
        self,
        frame: Frame,
        mask: int,
        size: int,
        rows: Index | None,
        parent: Projection | None,
        from_parent: Index | None,
    ) -> None:
        self.frame, self.mask, self.size, self._rows = frame, mask, size, rows
        self.parent, self.from_parent = parent, from_parent
        self.joins: dict[int, tuple[Projection, Index | None, Index | None]] = {}
        self.indexes: dict[int, Index] = {}
        self.groups: dict[bytes, Projection] = {}
        self.repetitions: dict[int, RepeatedProjection] = {}

    @property
    def base(self) -> Projection:
        """The projection without repetitions."""
        return self

    @property
    def rows(self) -> Index:
        """One table row for each distinct row; computed on demand for single columns."""
        if self._rows is None:
            assert self.from_parent is not None
            self._rows = np.zeros(self.size, dtype=np.intp)
            self._rows[self.from_parent] = self.frame.full.rows
        return self._rows

    def join(self, other: Projection) -> tuple[Projection, Index | None, Index | None]:
        """Return the projection to the columns of both, and its rows' numbers in each of them."""
        found = self.joins.get(id(other))
        if found is None:
            projection = self.frame.project(self.mask | other.mask)
            projection = projection.repeated(max(self.times, other.times))
            found = projection, projection.index_into(self), projection.index_into(other)
            self.joins[id(other)] = found
        return found

    def index_into(self, coarser: Projection) -> Index | None:
        """Return the row number in a coarser projection for every row; None if it is the same."""
        if coarser is self:
            return None
        if id(coarser) not in self.indexes:
            # (numpy converts other integer types to intp at every take)
            self.indexes[id(coarser)] = coarser.of_table_rows(self.rows).astype(np.intp, copy=False)
        return self.indexes[id(coarser)]

    def repeated(self, times: int) -> Projection:
        """Return the projection whose rows are those of this one several times in turn."""
        if times == 1:
            return self
        if times not in self.repetitions:
            self.repetitions[times] = RepeatedProjection(self, times)
        return self.repetitions[times]

    def group_rows(self, codes: Index, count: int) -> Projection:
        """Return the projection whose rows are groups of this one's rows."""
        key = codes.tobytes()
        if key not in self.groups:
            index = self.frame.full.index_into(self)
            codes = codes if index is None else codes[index]
            group = self.groups[key] = self.frame.add(codes, count, self.mask)
            self.frame.group_bits |= group.mask
        return self.groups[key]

    def of_table_rows(self, rows: Index) -> Index:
        """Return the row numbers in this projection of some rows of the table."""
        if self.parent is None or self.from_parent is None:
            return rows
        if self.parent.parent is None:
            return self.from_parent if rows is self.parent.rows else self.from_parent[rows]
        return self.from_parent[self.parent.of_table_rows(rows)]


class RepeatedProjection(Projection):
    """The rows of a projection several times: for ranks of a pipeline, one after the other."""

    __slots__ = ("_base", "times")

    def __init__(self, base: Projection, times: int) -> None:
        super().__init__(base.frame, base.mask, base.size * times, None, None, None)
        self._base, self.times = base, times

    @property
    def base(self) -> Projection:
        """The projection without repetitions."""
        return self._base

    def index_into(self, coarser: Projection) -> Index | None:
        """Return the row number in a coarser projection for every row; None if it is the same."""
        if coarser is self:
            return None
        if id(coarser) not in self.indexes:
            index = self.base.index_into(coarser.base)
            one = np.arange(self.base.size) if index is None else index
            step = 0 if coarser.times == 1 else coarser.base.size
            index = np.add.outer(step * np.arange(self.times), one).ravel()
            self.indexes[id(coarser)] = index
        return self.indexes[id(coarser)]


class Frame:
    """The rows of a table, and the projections that its columns have needed so far."""

    def __init__(self, num_rows: int) -> None:
        self.codes: list[Array] = []
        self.sources: list[int] = []  # for each column, the mask of the columns that determine it
        self.counts: list[int] = []
        self.group_bits = 0  # columns that number groups of a projection's rows
        self.num_rows = num_rows
        self.full = Projection(self, -1, num_rows, np.arange(num_rows), None, None)
        self.projections: dict[int, Projection] = {}
        self.cache: dict[Any, Any] = {}  # results of operations on columns (``columns``)

    def add(self, codes: Array, count: int, source: int = 0) -> Projection:
        """Add a column of codes 0, 1, ... and return its projection, whose rows are the codes.

        ``source``: the mask of the columns that determine it, if any.
        """
        bit = 1 << len(self.codes)
        self.sources.append(source or bit)
        self.codes.append(codes)
        self.counts.append(count)
        projection = Projection(self, bit, count, None, self.full, self.codes[-1])
        self.projections[bit] = projection
        return projection

    def release(self) -> None:
        """Clear all projections and cached columns (reference cycles); the frame's last use."""
        for projection in (self.full, *self.projections.values()):
            for each in (projection, *projection.repetitions.values()):
                each.joins.clear()
                each.indexes.clear()
            projection.groups.clear()
            projection.repetitions.clear()
        self.projections.clear()
        self.cache.clear()
        del self.full

    def project(self, mask: int) -> Projection:
        """Return the distinct rows of some columns, or of a superset with hardly more rows."""
        if mask == -1:
            return self.full
        found = self.projections.get(mask)
        if found is None:
            if self._determines_all(mask):
                return self.full
            wider = [
                projection
                for projection in self.projections.values()
                if self._covers(projection, mask)
            ]
            parent = min(wider, key=lambda projection: projection.size, default=self.full)
            found = self._distinct(mask, parent)
            self.projections[mask] = found
        return found

    def shared(self, one: Projection, other: Projection) -> Projection | None:
        """Return the projection to the columns that two others both determine; None without any."""
        mask = 0
        for position, source in enumerate(self.sources):
            bit = 1 << position
            if all(
                projection.mask & bit or projection.mask & source == source
                for projection in (one, other)
            ):
                mask |= bit
        return self.project(mask) if mask else None

    def _determines_all(self, mask: int) -> bool:
        """Whether some columns determine all others: their projection then has the table's rows."""
        bits = ((1 << position, source) for position, source in enumerate(self.sources))
        return all(mask & bit or (source != bit and not source & ~mask) for bit, source in bits)

    def _covers(self, projection: Projection, mask: int) -> bool:
        """Whether the columns of a projection determine those of a mask."""
        missing = mask & ~projection.mask
        while missing:
            bit = missing & -missing
            if self.sources[bit.bit_length() - 1] & ~projection.mask:
                return False
            missing ^= bit
        return True

    def _distinct(self, mask: int, parent: Projection) -> Projection:
        parts = self._key_parts(mask, parent)
        index, present = _numbered(*_combined(parts, parent.size))
        size = len(present)
        if size > NEARLY_ALL * parent.size:
            return parent
        rows = np.zeros(size, dtype=np.intp)
        rows[index.astype(np.intp, copy=False)] = parent.rows  # (as in ``index``)
        return Projection(self, mask, size, rows, parent, index)

    def _key_parts(self, mask: int, parent: Projection) -> Iterator[tuple[Array, int]]:
        """Yield columns of codes (each with its number of values) that tell a mask's rows apart.

        Columns whose distinct rows are known enter as one.
        """
        if parent is self.full and (grouped := mask & self.group_bits) not in (0, mask):
            self.project(mask ^ grouped)
        known = [each for each in self.projections.values() if not each.mask & ~mask]
        for projection in sorted(known, key=lambda each: -each.mask.bit_count()):
            if not projection.mask & ~mask:
                mask ^= projection.mask
                yield projection.of_table_rows(parent.rows), projection.size


def _combined(parts: Iterable[tuple[Array, int]], size: int) -> tuple[Array, int]:
    """Return one integer key for the codes of each row, ordered like them, and its upper bound.

    ``parts``: columns of codes, each with its number of distinct values.
    """
    key: Array = np.zeros(size, dtype=np.int32)
    radix, most = 1, 4 * size + DENSE_KEYS
    for codes, count in parts:
        if radix * count > most:
            key, present = _numbered(key, radix)
            radix = len(present)
            if radix * count > np.iinfo(np.int32).max:
                key = key.astype(np.int64)
        key *= count
        key += codes
        radix *= count
    return key, radix


def _numbered(key: Array, radix: int) -> tuple[Index, Index]:
    """Return every key's position among the distinct keys, and these; keys are below ``radix``."""
    if radix > 64 * len(key) + DENSE_KEYS:
        present, index = np.unique(key, return_inverse=True)
        return index, present
    seen, key = np.zeros(radix, dtype=bool), key.astype(np.intp)
    seen[key] = True
    present = np.flatnonzero(seen)
    number = np.empty(radix, dtype=np.int32)
    number[present] = np.arange(len(present), dtype=np.int32)
    return number.take(key), present


def distinct(values: Any) -> tuple[Array, Array]:
    """Return the distinct values in ascending order, and each row's position among them."""
    if isinstance(values, DictionaryColumn):
        return _distinct_coded(values)
    if values.strides == (0,):
        return values[:1], ZEROS[: len(values)]
    least, most = values.min(), values.max()
    if least == most:
        return values[:1], ZEROS[: len(values)]
    if values.dtype == bool:
        return np.array([False, True]), values.astype(np.int32)
    span = int(most) - int(least) + 1
    if span > DENSE_KEYS + 8 * len(values):
        return np.unique(values, return_inverse=True)
    offset = values - least
    present = np.zeros(span, dtype=bool)
    present[offset] = True
    number = np.cumsum(present, dtype=np.int32) - 1
    return np.flatnonzero(present) + least, number.take(offset)


def _distinct_coded(column: DictionaryColumn) -> tuple[Array, Array]:
    """Return ``distinct`` of a dictionary column, of which some values may no longer occur."""
    present = np.flatnonzero(_occurring(column.codes, len(column.values)))
    values, number = np.unique(column.values[present], return_inverse=True)
    if len(values) == 1:
        return values, ZEROS[: len(column)]
    if len(values) == len(column.values) and (number == present).all():
        return values, column.codes
    place = np.zeros(len(column.values), dtype=column.codes.dtype)
    place[present] = number
    return values, place[column.codes]


def _occurring(codes: Array, count: int) -> Array:
    """Return which of the codes 0, 1, ... occur."""
    if count > MAX_SCANNED_CODES:
        seen: Array = np.bincount(codes, minlength=count) > 0
        return seen
    least, most = int(codes.min()), int(codes.max())
    found = np.zeros(count, dtype=bool)
    found[[least, most]] = True
    for code in range(least + 1, most):
        found[code] = (codes == code).any()
    return found


def distinct_rows(*columns: Any) -> tuple[Index, Index]:
    """Return the number of every row's distinct row, and one table row for each of these.

    >>> distinct_rows(np.array([2, 1, 2, 2]), np.array([5, 5, 5, 7]))[0].tolist()
    [1, 0, 1, 2]
    """
    if len(columns[0]) == 0:
        return np.zeros(0, np.intp), np.zeros(0, np.intp)
    codes = [(codes, len(values)) for values, codes in map(distinct, columns)]
    group, present = _numbered(*_combined((c for c in codes if c[1] > 1), len(columns[0])))
    group = group.astype(np.intp, copy=False)
    first = np.zeros(len(present), dtype=np.intp)
    first[group[::-1]] = np.arange(len(group))[::-1]
    return group, first
