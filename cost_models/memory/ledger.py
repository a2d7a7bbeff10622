"""The ledger of a step: rows of tensors, the events at which they live, and the largest sum.

A row (``Item``) is a product of factors, or adds up other rows, or takes the least or the most. It
lives from the event ``created`` to the event ``freed``. An event may have several points, each with
rows of its own, of which the largest counts. The events, in the order of a step:

    loss_forward    activations of all micro-batches in flight; logits and their fp32 copies
    loss_backward   the same; logits, their gradient and fp32 copies
    head            the same activations; the head's gradient while it is reduced
    backward        the same activations; working memory of one layer's backward pass
    later_backward  one micro-batch less in flight, and gradients of finished ones
    last_layer      gradients of all later layers; one layer's activations and its backward pass
    embedding       gradients of all layers; the embedding's while it is reduced
    optimizer       reduced gradients; no activations

Units: bytes. Sizes and factors are numbers or columns of a plan table; text is made only for print.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from cost_models.arrays import Count, Flag, Real, everywhere, holds, pick

MOMENTS: Final = (
    "loss_forward",
    "loss_backward",
    "head",
    "backward",
    "later_backward",
    "last_layer",
    "embedding",
    "optimizer",
)
LOSS_FORWARD, LOSS_BACKWARD, HEAD, BACKWARD = range(4)
LATER_BACKWARD, LAST_LAYER, EMBEDDING, OPTIMIZER = range(4, len(MOMENTS))
PARTS: Final = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
HELD: Final = ("activations", "logits")  # parts of which a trainer may hold another share
SUM, LEAST, MOST, EITHER = range(4)  # how a row follows from other rows


class Factor(NamedTuple):
    """A factor of a row: a letter of the papers, its value, its unit; "/d" divides."""

    symbol: str
    value: Real | Count
    unit: str = ""


Given: TypeAlias = tuple[str, Real | Count] | tuple[str, Real | Count, str]


class Item(Struct, frozen=True):
    """Bytes of tensors of one part of the memory, and how they follow from their factors."""

    part: str
    name: str
    size: Real
    factors: tuple[Factor, ...] = ()  # whose product is the size
    formula: str = ""  # of a row without factors
    rows: tuple[Item, ...] = ()  # of which the size is the sum, the least, the most, or one
    rule: int = SUM
    flag: Flag = True  # of ``EITHER``: whether the first one counts
    created: int = LOSS_FORWARD
    freed: int = OPTIMIZER

    @property
    def persists(self) -> bool:
        """Whether it is of weights or optimizer states that live through the whole step."""
        through = self.created == LOSS_FORWARD and self.freed == OPTIMIZER
        return through and self.part in ("weights", "optimizer")

    def during(self, created: int, freed: int | None = None) -> Item:
        """Return the row with another life; ``freed``: the same event."""
        return replace(self, created=created, freed=created if freed is None else freed)

    def times(self, share: float) -> Item:
        """Return the row with a share of its bytes, and of those of the rows it follows from."""
        factors = (*self.factors, Factor("share", share)) if self.factors else ()
        rows = tuple([row.times(share) for row in self.rows])
        return replace(self, size=self.size * share, factors=factors, rows=rows)

    def leaves(self, part: str = "") -> Iterator[Item]:
        """Yield the products that count under the one plan of a table, by the part they are in."""
        part = part or self.part
        if not self.rows:
            yield replace(self, part=part, size=first(self.size))
        elif self.rule == SUM:
            for row in self.rows:
                yield from row.leaves(part)
        elif self.rule == EITHER:
            yield from self.rows[0 if first(self.flag) else 1].leaves(part)
        else:
            choose = min if self.rule == LEAST else max
            yield from choose(self.rows, key=lambda row: first(row.size)).leaves(part)


def product(part: str, name: str, *factors: Given) -> Item:
    """Return the row whose size is the product of its factors.

    >>> product("weights", "shards", ("w", 4.0, "bytes"), ("P", 8e9), ("/d", 64)).size
    500000000.0
    """
    found = tuple([Factor(*each) for each in factors])
    size: Real = found[0].value  # type: ignore[assignment]
    for symbol, value, _ in found[1:]:
        size = size / value if symbol[0] == "/" else size * value
    return Item(part, name, size, found)


def added(*rows: Item) -> Item:
    """Return the sum of rows of one part."""
    if len(rows) == 1:
        return rows[0]
    return Item(rows[0].part, rows[0].name, total(rows), rows=rows)


def least(one: Item, other: Item) -> Item:
    """Return the smaller row, plan by plan."""
    return _chosen(LEAST, np.minimum(one.size, other.size), one, other)


def most(one: Item, other: Item) -> Item:
    """Return the larger row, plan by plan."""
    return _chosen(MOST, np.maximum(one.size, other.size), one, other)


def either(flag: Flag, one: Item, other: Item | None = None) -> Item:
    """Return the first row under the plans with the flag, and the second, or none, elsewhere."""
    other = Item(one.part, one.name, 0.0) if other is None else other
    return _chosen(EITHER, np.where(flag, one.size, other.size), one, other, flag)


def _chosen(rule: int, size: Real, one: Item, other: Item, flag: Flag = True) -> Item:
    return Item(one.part, one.name, size, rows=(one, other), rule=rule, flag=flag)


class Point(Struct, frozen=True):
    """Rows that live at one point of an event only, and the plans whose steps have that point."""

    rows: tuple[Item, ...]
    exists: Flag = True


class Ledger(Struct, frozen=True):
    """All rows of a rank's step: those that live through events, and those of single points."""

    rows: tuple[Item, ...]
    points: Sequence[Sequence[Point]]  # of each event

    def live(self, moment: int) -> list[Item]:
        """Return the rows that live through an event."""
        return [row for row in self.rows if row.created <= moment <= row.freed]

    def kept(self) -> list[Item]:
        """Return the weights and optimizer states that live through the whole step."""
        return [row for row in self.rows if row.persists]

    def parts(self, moment: int) -> dict[str, Real]:
        """Return the bytes of each part at the largest point of an event."""
        sums = part_sums(self.live(moment))
        points = [point for point in self.points[moment] if holds(point.exists)]
        zeros = np.zeros_like(sum(sums.values()))
        found = [part_sums(point.rows) for point in points]
        if len(found) == 1:
            return {part: sums[part] + (zeros + found[0][part]) for part in PARTS}
        sizes = [sum(each.values()) + zeros for each in found]
        sizes = [
            size if everywhere(point.exists) else np.where(point.exists, size, -np.inf)
            for point, size in zip(points, sizes, strict=True)
        ]
        index = np.argmax(np.stack(sizes), axis=0)
        return {part: sums[part] + pick([each[part] for each in found], index) for part in PARTS}

    def with_share(self, share: float) -> Ledger:
        """Return the ledger with a share of the bytes of activations and logits."""

        def of(rows: Iterable[Item]) -> tuple[Item, ...]:
            return tuple([row.times(share) if row.part in HELD else row for row in rows])

        points = [[replace(point, rows=of(point.rows)) for point in each] for each in self.points]
        return Ledger(of(self.rows), points)

    def leaves(self, moment: int) -> list[Item]:
        """Return the products that were added up at an event, under the one plan of a table."""
        rows, points = self.live(moment), [p for p in self.points[moment] if first(p.exists)]
        if points:
            rows += max(points, key=lambda point: first(total(point.rows))).rows
        return [leaf for row in rows for leaf in row.leaves() if leaf.size]


def part_sums(rows: Iterable[Item]) -> dict[str, Real]:
    """Return the bytes of each part."""
    sums: dict[str, Real] = dict.fromkeys(PARTS, 0.0)
    for row in rows:
        sums[row.part] = sums[row.part] + row.size
    return sums


def total(rows: Iterable[Item]) -> Real:
    """Return the bytes of all rows."""
    sizes = (row.size for row in rows)
    return sum(sizes, start=next(sizes, 0.0))


def first(value: Real | Count | Flag) -> float:
    """Return the number of a table with one row."""
    return float(np.ravel(np.asarray(value))[0])
