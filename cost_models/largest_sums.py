"""The largest of many sums of two terms, where each term has few values.

    largest_j  max over k of  z_k(j) + a_k(j)

z depends on some columns of a table, a on others. Rows that agree in what both depend on are a
group: there every distinct z meets every distinct a, and sums are those of a small grid. A pair k
is left out of a group where another one is never smaller there:

    min (z_i - z_k) + min (a_i - a_k) >= 0

A z of ``MISSING`` is a pair that a row does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_models.factored_table import level_of, stacked
from cost_models.levels import Frame, Index, Level

Floats = NDArray[np.float64]
MOST_GROUPS = 20_000
AT_ONCE = 65_536  # sums that are computed in one go
AT_HAND = 1_000_000  # terms that are gathered in one go: what caches hold
MISSING = -1e300  # of a term that a row does not have


def largest_sums(
    frame: Frame,
    first: Sequence[Any],
    second: Sequence[Any],
    partners: Sequence[int],
    enough: float = np.inf,
) -> Floats:
    """Return, for every row of the table, the largest of the sums.

    ``partners``: for each of the first terms, which of the second ones it is added to. Where all
    rows of a group have one sum above ``enough``, such a sum may stand for the largest.
    """
    mates = np.array(partners, dtype=np.intp)
    level, other_level = level_of(frame, first), level_of(frame, second)
    shared = frame.shared(level, other_level)
    if shared is not None and shared.size > MOST_GROUPS:
        one = level, stacked(level, first, np.arange(level.size))
        other = other_level, stacked(other_level, second, np.arange(other_level.size))
        return _row_by_row(frame, one, other, mates)
    groups = _Groups(shared, level, other_level, frame)
    found = np.empty(groups.size)
    for some in groups.batches(len(first) + len(second)):
        z_all = stacked(level, first, groups.one.rows(some))
        a_all = stacked(other_level, second, groups.other.rows(some))
        z_from, a_from = groups.one.starts[some.start], groups.other.starts[some.start]
        for group in some:
            z = z_all[:, slice(*(groups.one.of(group) - z_from))]
            a = a_all[:, slice(*(groups.other.of(group) - a_from))]
            if z.size and a.size:
                grid = found[slice(*groups.of(group))].reshape(z.shape[1], a.shape[1])
                _fill(grid, z, a, mates, enough)
    return found.take(groups.places())


def _row_by_row(
    frame: Frame, first: tuple[Level, Floats], second: tuple[Level, Floats], mates: Index
) -> Floats:
    """Return the largest sums where groups would be too small to be worth it."""
    (level, one), (other_level, other) = first, second
    z, a = frame.whole.way(level), frame.whole.way(other_level)
    found = np.full(frame.num_rows, -np.inf)
    for k in _contenders(one, other, mates):
        x = one[k] if z is None else one[k][z]
        y = other[mates[k]] if a is None else other[mates[k]][a]
        np.maximum(found, x + y, out=found)
    return found


def _fill(found: Floats, z: Floats, a: Floats, mates: Index, enough: float) -> None:
    """Write the largest of z_k + a_k into a grid, or one that is above ``enough`` all over it."""
    if enough < np.inf:
        k = int(np.argmax(z[:, 0] + a[mates, 0]))
        if z[k].min() + a[mates[k]].min() > enough:
            np.add(z[k][:, None], a[mates[k]], out=found)
            return
    kept = _contenders(z, a, mates)
    z, a = z[kept], a[mates[kept]]
    if len(kept) * found.size <= AT_ONCE:
        np.max(z[:, :, None] + a[:, None, :], axis=0, out=found)
        return
    np.add(z[0][:, None], a[0], out=found)
    sums = np.empty_like(found)
    for k in range(1, len(kept)):
        np.add(z[k][:, None], a[k], out=sums)
        np.maximum(found, sums, out=found)


def _contenders(z: Floats, a: Floats, mates: Index) -> Index:
    """Return the pairs that no likely one outdoes everywhere in a grid; ``mates``: a's of the z's.

    Likely ones are the largest at corners of the grid.
    """
    kept = np.arange(len(z))
    for row, column in ((0, -1), (-1, 0), (z.shape[1] // 2, a.shape[1] // 2)):
        mine = mates[kept]
        k = kept[int(np.argmax(z[kept, row] + a[mine, column]))]
        first, second = (z[k] - (z if len(kept) == len(z) else z[kept])).min(axis=1), a[mates[k]]
        if len(kept) == len(z):  # many share an a
            ahead = first + (second - a).min(axis=1)[mine]
        else:
            ahead = first + (second - a[mine]).min(axis=1)
        kept = kept[(ahead < 0.0) | (kept == k)]
    return kept


class _Side:
    """The rows of one term's level, group after group."""

    def __init__(self, level: Level, group: Index, count: int) -> None:
        self.order = np.argsort(group, kind="stable")
        self.counts = np.bincount(group, minlength=count)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])
        self.group = group
        self.position = np.empty(level.size, dtype=np.intp)
        self.position[self.order] = np.arange(level.size) - self.starts[group[self.order]]

    def of(self, group: int) -> Index:
        """Return where a group's rows begin and end."""
        return self.starts[group : group + 2]

    def rows(self, groups: range) -> Index:
        """Return the rows of some groups."""
        return self.order[self.starts[groups.start] : self.starts[groups.stop]]


class _Groups:
    """Grids of the rows of two levels that can meet."""

    def __init__(self, shared: Level | None, one: Level, other: Level, frame: Frame) -> None:
        self.levels, self.frame = (one, other), frame
        self.count = 1 if shared is None else shared.size
        self.one, self.other = (
            _Side(level, _ways(shared, level), self.count) for level in (one, other)
        )
        self.starts = np.concatenate([[0], np.cumsum(self.one.counts * self.other.counts)])
        self.size = int(self.starts[-1])

    def of(self, group: int) -> tuple[int, int]:
        """Return where a group's grid begins and ends."""
        return int(self.starts[group]), int(self.starts[group + 1])

    def batches(self, terms: int) -> Iterator[range]:
        """Yield groups of which all terms are no more than AT_HAND numbers, but for single ones.

        ``terms``: of both sides together.
        """
        begin, size = 0, terms * np.maximum(self.one.starts, self.other.starts)
        while begin < self.count:
            end = int(np.searchsorted(size, size[begin] + AT_HAND, side="right")) - 1
            yield range(begin, max(end, begin + 1))
            begin = max(end, begin + 1)

    def places(self) -> Index:
        """Return the place in a grid of every row of the table."""
        whole, (one, other) = self.frame.whole, self.levels
        z, a = whole.way(one), whole.way(other)
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
