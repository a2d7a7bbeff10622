"""The largest of many sums of two terms, where each term has few distinct values.

    largest_j = max over k of z_k(j) + a_k(j)

The z depend on some columns of a table, the a on others. Rows that agree in the shared columns form
a group, in which every distinct z meets every distinct a; its sums are those of a small grid
(``sum_grids``). A pair k is dropped from a group if another pair i is nowhere smaller:

    min (z_i - z_k) + min (a_i - a_k) >= 0

A z of ``MISSING`` marks a pair that a row does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import ascending
from cost_models.columnar.columns import common_projection
from cost_models.columnar.projections import Frame, Index
from cost_models.columnar.sum_grids import StackedTerms, SumGrids, TermTable

Floats = NDArray[np.float64]
SUMS_OF_GROUP = 300  # sums of a row and a pair that cost about as much as a further group
MAX_SUMS_AT_ONCE = 65_536  # larger grids are filled pair by pair
MISSING = -1e300  # z of a pair that a row does not have
# rows of z and of a as fractions of a group; the pair that is largest there dominates many others
CORNERS: Final = ((0.0, 1.0), (1.0, 0.0), (0.5, 0.5))


def largest_sums(
    frame: Frame,
    first: Sequence[Any],
    second: Sequence[Any],
    partners: Sequence[int],
    enough: float = np.inf,
) -> Floats:
    """Return the largest sum for every row of the table.

    ``partners``: for each of the first terms, the index of the second term added to it. In a group
    where one sum exceeds ``enough`` in all rows, that sum may be returned instead of the largest.
    """
    projection, other_projection = common_projection(frame, first), common_projection(frame, second)
    one, other = TermTable(projection, first), TermTable(other_projection, second)
    partner_columns = other.place[np.array(partners, dtype=np.intp)[one.numbers]]
    shared = frame.shared(projection, other_projection)
    if shared is not None and SUMS_OF_GROUP * shared.size > frame.num_rows * len(first):
        return _row_by_row(frame, one, other, partner_columns)
    grids = SumGrids(shared, one, other, frame)
    found = np.empty(grids.size)
    left = np.flatnonzero(np.diff(grids.starts))  # a shared projection may have rows of no plan
    if enough < np.inf:
        left = left[~_exceeding(grids, left, partner_columns, enough, found)]
    for some in grids.batches(left):
        z, a = StackedTerms.of(grids.one, some), StackedTerms.of(grids.other, some)
        k, group = _candidates(z, a, partner_columns)
        _fill(grids, found, some, (z, k), (a, partner_columns[k]), group)
    return found.take(grids.places())


def _row_by_row(frame: Frame, one: TermTable, other: TermTable, partner_columns: Index) -> Floats:
    """Return the largest sums computed row by row: cheaper than many tiny groups."""
    z, a = one.at(np.arange(one.projection.size)), other.at(np.arange(other.projection.size))
    z_way, a_way = frame.full.index_into(one.projection), frame.full.index_into(other.projection)
    found = np.full(frame.num_rows, -np.inf)
    for k in _candidates(StackedTerms.of_one(z), StackedTerms.of_one(a), partner_columns)[0]:
        x, y = np.ascontiguousarray(z[:, k]), np.ascontiguousarray(a[:, partner_columns[k]])
        sums = (x if z_way is None else x[z_way]) + (y if a_way is None else y[a_way])
        np.maximum(found, sums, out=found)
    return found


def _fill(
    grids: SumGrids,
    found: Floats,
    groups: Index,
    one: tuple[StackedTerms, Index],
    other: tuple[StackedTerms, Index],
    place: Index,
) -> None:
    """Write max over k of z_k + a_k into the grids of some groups, those of a shape together.

    ``one``, ``other``: all z and a, and those of each pair; ``place``: the pair's place in
    ``groups``, in order.
    """
    (z, k), (a, partner) = one, other
    for begin, end in pairwise(ascending(z.begins, a.begins).tolist()):
        grid = grids.of(found, groups[begin])
        first, last = np.searchsorted(place, [begin, end])
        parts = -(-(last - first) * grid.size // MAX_SUMS_AT_ONCE)
        for some in np.array_split(np.arange(begin, end), min(end - begin, parts)):
            starts = np.searchsorted(place, some)
            pairs = slice(starts[0], np.searchsorted(place, some[-1] + 1))
            x, y = z.of_pairs(k[pairs], place[pairs]), a.of_pairs(partner[pairs], place[pairs])
            if len(some) > 1 or len(x) * grid.size <= MAX_SUMS_AT_ONCE:
                sums = np.maximum.reduceat(x[:, :, None] + y[:, None, :], starts - starts[0])
                cells = grids.starts[groups[some], None] + np.arange(grid.size)
                found[cells] = sums.reshape(cells.shape)
            else:
                _fill_one(grids.of(found, groups[some[0]]), x, y)


def _fill_one(found: Floats, z: Floats, a: Floats) -> None:
    """Write max over k of z_k + a_k into a large grid."""
    np.add(z[0][:, None], a[0], out=found)
    sums = np.empty_like(found)
    for one, other in zip(z[1:], a[1:], strict=True):
        np.add(one[:, None], other, out=sums)
        np.maximum(found, sums, out=found)


def _exceeding(
    grids: SumGrids, groups: Index, partner_columns: Index, enough: float, found: Floats
) -> NDArray[np.bool_]:
    """Return which groups have one sum above ``enough`` in all rows; it is in their grids."""
    begins = [side.order[side.starts[groups]] for side in (grids.one, grids.other)]
    z, a = grids.one.terms.at(begins[0]), grids.other.terms.at(begins[1])
    best = np.argmax(z + a[:, partner_columns], axis=1)
    settled = np.zeros(len(groups), dtype=bool)
    for k in ascending(best):
        mine = np.flatnonzero(best == k)
        z_k, z_starts = grids.one.of_term(k, groups[mine])
        a_k, a_starts = grids.other.of_term(partner_columns[k], groups[mine])
        least = np.minimum.reduceat(z_k, z_starts[:-1]) + np.minimum.reduceat(a_k, a_starts[:-1])
        for number in np.flatnonzero(least > enough):
            z_rows = z_k[z_starts[number] : z_starts[number + 1]]
            a_rows = a_k[a_starts[number] : a_starts[number + 1]]
            np.add(z_rows[:, None], a_rows, out=grids.of(found, groups[mine[number]]))
        settled[mine] = least > enough
    return settled


def _candidates(z: StackedTerms, a: StackedTerms, partner_columns: Index) -> tuple[Index, Index]:
    """Return the pairs that may be largest somewhere in a grid, and their grids, in grid order.

    A pair is dropped if one of the pairs that are largest at ``CORNERS`` of the grid is never
    smaller. ``partner_columns``: the column of a for each z.
    """
    (row, column), *others = CORNERS
    best = np.argmax(z.at(row) + a.at(column)[:, partner_columns], axis=1)
    kept = z.min_leads(best) + a.min_leads(partner_columns[best])[:, partner_columns] < 0.0
    kept[np.arange(len(best)), best] = True
    group, k = np.nonzero(kept)
    for row, column in others:
        best = _largest_of_each(
            z.at(row)[group, k] + a.at(column)[group, partner_columns[k]], k, group
        )
        ahead = z.min_leads_of_pairs(best, k, group) + a.min_leads_of_pairs(
            partner_columns[best], partner_columns[k], group
        )
        kept = (ahead < 0.0) | (k == best[group])
        k, group = k[kept], group[kept]
    return k, group


def _largest_of_each(sums: Floats, k: Index, group: Index) -> Index:
    """Return the pair with the largest sum in each group; groups are in order."""
    begins = np.flatnonzero(np.diff(group, prepend=-1))
    is_largest = np.flatnonzero(sums == np.maximum.reduceat(sums, begins)[group])
    first = np.flatnonzero(np.diff(group[is_largest], prepend=-1))
    largest: Index = k[is_largest[first]]
    return largest
