"""Geometry of tensor pieces: the overlap of one rank's part with another's.

A rank holds the product of its ranges along every dimension, packed into one tensor: rows [0, 4)
and [8, 12) of a matrix are eight local rows. Every layout is such a product (tensor parallelism
shards one dimension, FSDP2 the remaining rows, experts the first dimension), so two layouts overlap
in blocks that are found dimension by dimension.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the index is read where no torch is needed
    from executor.model.parameter_layout import Pieces, Ranges


class Span(NamedTuple):
    """An overlap along one dimension: its offset in source and target."""

    source: int
    target: int
    length: int


OverlapBlock = tuple[Span, ...]  # one span per dimension


def whole_tensor(shape: Sequence[int]) -> Pieces:
    """Return the pieces of the whole tensor."""
    return tuple(((0, length),) for length in shape)


def local_shape(pieces: Pieces) -> tuple[int, ...]:
    """Return the shape of the tensor that holds these pieces."""
    return tuple(sum(stop - start for start, stop in ranges) for ranges in pieces)


def numel(pieces: Pieces) -> int:
    """Return the number of elements of pieces."""
    return math.prod(local_shape(pieces))


def overlaps(source: Pieces, target: Pieces) -> Iterator[OverlapBlock]:
    """Yield the blocks common to source and target.

    >>> list(overlaps((((0, 4), (8, 12)),), (((2, 9),),)))
    [(Span(source=2, target=0, length=2),), (Span(source=4, target=6, length=1),)]
    """
    return itertools.product(*map(_spans, source, target))


def _spans(source: Ranges, target: Ranges) -> list[Span]:
    """Return the overlaps along one dimension."""
    found, source_offset = [], 0
    for a, b in source:
        target_offset = 0
        for c, d in target:
            low, high = max(a, c), min(b, d)
            if low < high:
                found.append(Span(source_offset + low - a, target_offset + low - c, high - low))
            target_offset += d - c
        source_offset += b - a
    return found
