"""The largest of many sums of two terms, where each term has few values.

    largest_j  max over k of  z_k(j) + a_k(j)

z depends on some columns of a table, a on others. Rows that agree in what both depend on are a
group: there every distinct z meets every distinct a, and sums are those of a small grid
(``grids``). A pair k is left out of a group where another one is never smaller there:

    min (z_i - z_k) + min (a_i - a_k) >= 0

A z of ``MISSING`` is a pair that a row does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.columnar.alignment import level_of
from cost_models.columnar.grids import Grids, Stack, Terms
from cost_models.columnar.levels import Frame, Index

Floats = NDArray[np.float64]
MOST_GROUPS = 20_000
AT_ONCE = 65_536  # sums that are computed in one go
MISSING = -1e300  # of a term that a row does not have
# rows of z and of a, as shares of a group: a pair that is largest there may outdo many others
CORNERS: Final = ((0.0, 1.0), (1.0, 0.0), (0.5, 0.5))


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
    level, other_level = level_of(frame, first), level_of(frame, second)
    one, other = Terms(level, first), Terms(other_level, second)
    mates = other.place[np.array(partners, dtype=np.intp)[one.numbers]]
    shared = frame.shared(level, other_level)
    if shared is not None and shared.size > MOST_GROUPS:
        return _row_by_row(frame, one, other, mates)
    grids = Grids(shared, one, other, frame)
    found = np.empty(grids.size)
    left = np.arange(grids.count)
    if enough < np.inf:
        left = left[~_settled(grids, mates, enough, found)]
    for some in grids.batches(left):
        z, a = Stack.of(grids.one, some), Stack.of(grids.other, some)
        k, group = _contenders(z, a, mates)
        begins = np.flatnonzero(np.diff(group, prepend=-1, append=-1))
        for place, number in enumerate(some):
            mine = k[begins[place] : begins[place + 1]]
            _fill(grids.of(found, number), z.of_group(mine, place), a.of_group(mates[mine], place))
    return found.take(grids.places())


def _row_by_row(frame: Frame, one: Terms, other: Terms, mates: Index) -> Floats:
    """Return the largest sums where groups would be too small to be worth it."""
    z, a = one.at(np.arange(one.level.size)), other.at(np.arange(other.level.size))
    z_way, a_way = frame.whole.way(one.level), frame.whole.way(other.level)
    found = np.full(frame.num_rows, -np.inf)
    for k in _contenders(Stack.of_one(z), Stack.of_one(a), mates)[0]:
        x, y = np.ascontiguousarray(z[:, k]), np.ascontiguousarray(a[:, mates[k]])
        sums = (x if z_way is None else x[z_way]) + (y if a_way is None else y[a_way])
        np.maximum(found, sums, out=found)
    return found


def _fill(found: Floats, z: Floats, a: Floats) -> None:
    """Write the largest of z_k + a_k into a grid."""
    if len(z) * found.size <= AT_ONCE:
        np.max(z[:, :, None] + a[:, None, :], axis=0, out=found)
        return
    np.add(z[0][:, None], a[0], out=found)
    sums = np.empty_like(found)
    for one, other in zip(z[1:], a[1:], strict=True):
        np.add(one[:, None], other, out=sums)
        np.maximum(found, sums, out=found)


def _settled(grids: Grids, mates: Index, enough: float, found: Floats) -> NDArray[np.bool_]:
    """Return which groups have one sum above ``enough`` everywhere, written into their grids."""
    begins = [side.order[side.starts[:-1]] for side in (grids.one, grids.other)]
    z, a = grids.one.terms.at(begins[0]), grids.other.terms.at(begins[1])
    best = np.argmax(z + a[:, mates], axis=1)
    settled = np.zeros(grids.count, dtype=bool)
    for k in np.unique(best):
        mine = np.flatnonzero(best == k)
        z_k, z_starts = grids.one.of_term(k, mine)
        a_k, a_starts = grids.other.of_term(mates[k], mine)
        least = np.minimum.reduceat(z_k, z_starts[:-1]) + np.minimum.reduceat(a_k, a_starts[:-1])
        for number in np.flatnonzero(least > enough):
            z_rows = z_k[z_starts[number] : z_starts[number + 1]]
            a_rows = a_k[a_starts[number] : a_starts[number + 1]]
            np.add(z_rows[:, None], a_rows, out=grids.of(found, mine[number]))
        settled[mine] = least > enough
    return settled


def _contenders(z: Stack, a: Stack, mates: Index) -> tuple[Index, Index]:
    """Return the pairs that no likely one outdoes everywhere in a grid, and the grids they are of.

    Likely ones are the largest at corners of the grid. ``mates``: a's of the z's. In the order of
    the grids.
    """
    (row, column), *others = CORNERS
    best = np.argmax(z.at(row) + a.at(column)[:, mates], axis=1)
    kept = z.leads(best) + a.leads(mates[best])[:, mates] < 0.0
    kept[np.arange(len(best)), best] = True
    group, k = np.nonzero(kept)
    for row, column in others:
        best = _largest_of_each(z.at(row)[group, k] + a.at(column)[group, mates[k]], k, group)
        ahead = z.leads_of(best, k, group) + a.leads_of(mates[best], mates[k], group)
        kept = (ahead < 0.0) | (k == best[group])
        k, group = k[kept], group[kept]
    return k, group


def _largest_of_each(sums: Floats, k: Index, group: Index) -> Index:
    """Return the pair with the largest sum of each group; groups are in order."""
    begins = np.flatnonzero(np.diff(group, prepend=-1))
    is_largest = np.flatnonzero(sums == np.maximum.reduceat(sums, begins)[group])
    first = np.flatnonzero(np.diff(group[is_largest], prepend=-1))
    largest: Index = k[is_largest[first]]
    return largest
