"""Order of ranks on a tree of links with the least cost.

An order assigns an accelerator to each rank of the grid. The cost depends only on the links of the
slowest group of each axis (``links.tree``): bandwidth, latency, mean latency of a hop, and what an
exchange has on each level. It never falls when one of these gets worse, so the cost is evaluated
for Pareto-optimal orders only.

Up to EXACT accelerators all orders are compared. Rank 0 stays on accelerator 0: renumbering the
coordinates of an axis and rotating the stages of a pipeline change no group. On more accelerators:
all permutations of the axes, then all orders of a few blocks of neighbours, then swaps of two
blocks as long as the cost falls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from hardware_profiles.cluster.links.tree import (
    Tree,
    exchanges_of_groups,
    groups_of,
    links_of_groups,
)

Order = tuple[int, ...]
Orders = NDArray[np.intp]  # (orders, ranks)
Floats = NDArray[np.float64]
EXACT: Final = 8  # accelerators: 7! orders
MAX_RANKS: Final = 1_000_000  # ranks of all orders that are compared in one array
MOST_PRICED: Final = 8  # orders of a front that are priced if the search is not exact
ROUNDS: Final = 5
SAME: Final = 1e-9  # relative


class Groups(NamedTuple):
    """Groups of an axis: ``size`` ranks with a distance of ``stride``."""

    size: int
    stride: int
    ring: bool  # ring collectives; else messages to the next rank
    exchanges: bool = False  # exchanges of all with all, too


class BestOrder(Struct, frozen=True):
    """The order with the least cost that was found."""

    order: Order
    cost: float
    usual_cost: float  # of the default order
    proven: bool  # whether all orders were compared


def best_order(
    tree: Tree, groups: Sequence[Groups], grid: Sequence[int], cost: Callable[[Order], float]
) -> BestOrder:
    """Return the order with the least cost; the default order among ties.

    ``grid``: ranks along each axis; the last axis varies fastest.
    """
    search = _OrderSearch(tree, tuple(dict.fromkeys(groups)), cost)
    count = math.prod(grid)
    usual = np.arange(count)
    search.update(usual[None])
    usual_cost = search.least
    if count <= EXACT:
        search.update(_every_order(count), everything=True)
        return BestOrder(search.best, search.least, usual_cost, True)
    search.update(orders_of_axes(grid, np.argsort(tree.position)))
    search.update(_orders_of_blocks(np.array(search.best)))
    for _ in range(ROUNDS):
        before = search.least
        search.update(_exchanges(np.array(search.best)))
        if search.least >= before:
            break
    return BestOrder(search.best, search.least, usual_cost, False)


def orders_that_may_win(tree: Tree, groups: Sequence[Groups], count: int) -> list[Order]:
    """Return orders of up to EXACT ranks: for every other one, one of these has no slower link."""
    every = _every_order(count)
    seen = _OrderSearch(tree, tuple(dict.fromkeys(groups)), lambda order: 0.0).links(every)
    return [tuple(every[row].tolist()) for row in _front(seen)]


def _every_order(count: int) -> Orders:
    """Return all orders with rank 0 on accelerator 0, the default order first."""
    others = itertools.permutations(range(1, count))
    return np.array([(0, *order) for order in others], dtype=np.intp)


class _OrderSearch:
    """Evaluation of orders: the best so far, with the cost of Pareto-optimal orders only."""

    def __init__(
        self, tree: Tree, groups: Sequence[Groups], cost: Callable[[Order], float]
    ) -> None:
        self.tree, self.groups, self.cost = tree, groups, cost
        self.best: Order = ()
        self.least = math.inf
        self._known: dict[bytes, float] = {}

    def update(self, orders: Orders, *, everything: bool = False) -> None:
        """Update the best order with some orders, (orders, ranks) of accelerators."""
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
        """Return the figures of the links of every axis, (orders, figures): less is better."""
        columns: list[Floats] = []
        for size, stride, ring, exchanges in self.groups:
            placed = groups_of(orders, size, stride)
            bandwidth, latency, hop, _ = links_of_groups(self.tree, placed, ring=ring)
            columns += [1.0 / bandwidth, latency, hop]
            if exchanges:
                found = exchanges_of_groups(self.tree, placed)
                columns += [*(1.0 / found.bandwidth.T), *(1.0 / found.members.T)]
        return np.stack(columns, axis=1) if columns else np.zeros((len(orders), 1))


def _front(seen: Floats) -> list[int]:
    """Return the Pareto-optimal rows; the first of equal rows."""
    _, first = np.unique(seen, axis=0, return_index=True)
    scale = np.maximum(seen.max(axis=0), 1e-300)
    sums = (seen[first] / scale).sum(axis=1)
    kept: list[int] = []
    for row in first[np.lexsort([first, sums])].tolist():
        if not kept or not (seen[kept] <= seen[row]).all(axis=1).any():
            kept.append(row)
    return kept


def orders_of_axes(grid: Sequence[int], accelerators: Sequence[int] | Orders) -> Orders:
    """Return one order for each permutation of the axes; ``accelerators`` are filled in sequence.

    >>> orders_of_axes([2, 2], [0, 1, 2, 3]).tolist()
    [[0, 1, 2, 3], [0, 2, 1, 3]]
    """
    count = math.prod(grid)
    found: dict[bytes, Orders] = {}
    longer = [axis for axis, size in enumerate(grid) if size > 1]
    for axes in itertools.permutations(longer):
        places = np.arange(count).reshape([grid[axis] for axis in axes])
        back = sorted(range(len(axes)), key=axes.__getitem__)
        order = np.asarray(accelerators)[places.transpose(back).ravel()]
        order = _first_stays(order, grid)
        found[order.tobytes()] = order
    return np.array(list(found.values()))


def _first_stays(order: Orders, grid: Sequence[int]) -> Orders:
    """Rotate every axis until rank 0 is on accelerator 0; the groups stay the same."""
    placed = order.reshape(grid)
    where = np.argwhere(placed == 0)[0].tolist()
    for axis, place in enumerate(where):
        placed = np.roll(placed, -place, axis=axis)
    return placed.ravel()


def _orders_of_blocks(order: Orders) -> Orders:
    """Return all permutations of equal blocks of neighbours, up to MAX_RANKS ranks in all."""
    count = len(order)
    blocks = max(
        n
        for n in range(1, EXACT + 1)
        if count % n == 0 and (n <= 2 or math.factorial(n - 1) * count <= MAX_RANKS)
    )
    parts = order.reshape(blocks, -1)
    moved = [(0, *rest) for rest in itertools.permutations(range(1, blocks))]
    return parts[np.array(moved, dtype=np.intp)].reshape(len(moved), count)


def _exchanges(order: Orders) -> Orders:
    """Return all orders with two equal blocks swapped, with the smallest feasible blocks."""
    count = len(order)
    width = next(
        (
            w
            for w in range(1, count + 1)
            if count % w == 0 and (count // w) ** 2 / 2 * count <= MAX_RANKS
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
