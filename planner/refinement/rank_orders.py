"""The order of ranks on a tree of links for which some cost is the least.

An order says on which accelerator each rank of the grid works. All that a cost can depend on is
what the slowest group of each axis sees (``topology``): bandwidth, latency, mean latency of a hop.
It never falls when one of these gets worse, so only orders that no other one beats in everything
are asked for their cost.

Up to EXACT accelerators every order is looked at. Rank 0 stays on accelerator 0: coordinates along
an axis may be renumbered, and the stages of a pipeline rotated, without changing any group. Beyond
that: all orders of the axes from the outermost to the innermost, then all orders of a few blocks of
neighbours, then exchanges of two blocks as long as one gains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hardware_profiles.cluster.link_tree import Tree, groups_of, links_of_groups

Order = tuple[int, ...]
Orders = NDArray[np.intp]  # (orders, ranks)
Floats = NDArray[np.float64]
EXACT: Final = 8  # accelerators: 7! orders
AT_ONCE: Final = 1_000_000  # ranks of all orders that are looked at together
MOST_PRICED: Final = 8  # orders of a front that are priced where the answer is not exact anyway
ROUNDS: Final = 5
SAME: Final = 1e-9  # relative


class Groups(NamedTuple):
    """The groups of an axis: ``size`` ranks that lie ``stride`` apart."""

    size: int
    stride: int
    ring: bool  # else messages to the next one


@dataclass(frozen=True, slots=True)
class BestOrder:
    """The best order that was found."""

    order: Order
    cost: float
    usual_cost: float  # of ranks in the accelerators' order
    proven: bool  # every order was looked at


def best_order(
    tree: Tree,
    groups: Sequence[Groups],
    grid: Sequence[int],
    cost: Callable[[Order], float],
) -> BestOrder:
    """Return the order with the least cost; among equals ranks stay where they are.

    ``grid``: ranks along each axis, the last one fastest.
    """
    search = _OrderSearch(tree, tuple(dict.fromkeys(groups)), cost)
    count = math.prod(grid)
    usual = np.arange(count)
    search.look_at(usual[None])
    usual_cost = search.least
    if count <= EXACT:
        others = itertools.permutations(range(1, count))
        search.look_at(np.array([(0, *order) for order in others], dtype=np.intp), everything=True)
        return BestOrder(search.best, search.least, usual_cost, True)
    search.look_at(orders_of_axes(grid, np.argsort(tree.position)))
    search.look_at(_orders_of_blocks(np.array(search.best)))
    for _ in range(ROUNDS):
        before = search.least
        search.look_at(_exchanges(np.array(search.best)))
        if search.least >= before:
            break
    return BestOrder(search.best, search.least, usual_cost, False)


class _OrderSearch:
    """Prices the orders that can be the best of those that it is shown."""

    def __init__(
        self, tree: Tree, groups: Sequence[Groups], cost: Callable[[Order], float]
    ) -> None:
        self.tree, self.groups, self.cost = tree, groups, cost
        self.best: Order = ()
        self.least = math.inf
        self._known: dict[bytes, float] = {}

    def look_at(self, orders: Orders, *, everything: bool = False) -> None:
        """Take the best of some orders (of accelerators by rank), if it is better."""
        seen = self.links(orders)
        rows = _front(seen)
        for row in rows if everything else rows[:MOST_PRICED]:
            order = tuple(orders[row].tolist())
            key = seen[row].tobytes()
            if key not in self._known:
                self._known[key] = self.cost(order)
            if self._known[key] < self.least * (1.0 - SAME):
                self.least, self.best = self._known[key], order

    def links(self, orders: Orders) -> Floats:
        """Return what the axes see, (orders, 3 axes): less is better."""
        columns: list[Floats] = []
        for size, stride, ring in self.groups:
            placed = groups_of(orders, size, stride)
            bandwidth, latency, hop, _ = links_of_groups(self.tree, placed, ring=ring)
            columns += [1.0 / bandwidth, latency, hop]
        return np.stack(columns, axis=1) if columns else np.zeros((len(orders), 1))


def _front(seen: Floats) -> list[int]:
    """Return the rows that no other one beats in everything; of equal ones the first."""
    _, first = np.unique(seen, axis=0, return_index=True)
    scale = np.maximum(seen.max(axis=0), 1e-300)
    sums = (seen[first] / scale).sum(axis=1)
    kept: list[int] = []
    for row in first[np.lexsort([first, sums])].tolist():
        if not kept or not (seen[kept] <= seen[row]).all(axis=1).any():
            kept.append(row)
    return kept


def orders_of_axes(grid: Sequence[int], walk: Sequence[int] | Orders) -> Orders:
    """Return the orders in which ranks fill a walk axis by axis, each of them innermost in turn.

    >>> orders_of_axes([2, 2], [0, 1, 2, 3]).tolist()
    [[0, 1, 2, 3], [0, 2, 1, 3]]
    """
    count = math.prod(grid)
    found: dict[bytes, Orders] = {}
    longer = [axis for axis, size in enumerate(grid) if size > 1]
    for axes in itertools.permutations(longer):
        places = np.arange(count).reshape([grid[axis] for axis in axes])
        back = sorted(range(len(axes)), key=axes.__getitem__)
        order = np.asarray(walk)[places.transpose(back).ravel()]
        order = _first_stays(order, grid)
        found[order.tobytes()] = order
    return np.array(list(found.values()))


def _first_stays(order: Orders, grid: Sequence[int]) -> Orders:
    """Rotate every axis until rank 0 works on accelerator 0; the groups stay the same."""
    placed = order.reshape(grid)
    where = np.argwhere(placed == 0)[0].tolist()
    for axis, place in enumerate(where):
        placed = np.roll(placed, -place, axis=axis)
    return placed.ravel()


def _orders_of_blocks(order: Orders) -> Orders:
    """Return all orders of as many equal blocks of neighbours as can be looked at together."""
    count = len(order)
    blocks = max(
        n
        for n in range(1, EXACT + 1)
        if count % n == 0 and (n <= 2 or math.factorial(n - 1) * count <= AT_ONCE)
    )
    parts = order.reshape(blocks, -1)
    moved = [(0, *rest) for rest in itertools.permutations(range(1, blocks))]
    return parts[np.array(moved, dtype=np.intp)].reshape(len(moved), count)


def _exchanges(order: Orders) -> Orders:
    """Return the orders in which two equal blocks have changed places, the smallest that can be."""
    count = len(order)
    width = next(
        (
            w
            for w in range(1, count + 1)
            if count % w == 0 and (count // w) ** 2 / 2 * count <= AT_ONCE
        ),
        count,
    )
    pairs = list(itertools.combinations(range(1, count // width), 2))
    if not pairs:
        return order[None]
    parts = np.repeat(order.reshape(1, -1, width), len(pairs), axis=0)
    one, other = np.array(pairs).T
    rows = np.arange(len(pairs))
    parts[rows, one], parts[rows, other] = parts[rows, other], parts[rows, one].copy()
    return parts.reshape(len(pairs), count)
