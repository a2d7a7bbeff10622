"""Columns of different levels brought to one level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cost_models.columnar.columns import Column
from cost_models.columnar.levels import Array, Frame, Level


def whole(value: Any, size: int) -> Array:
    """Return a value for every row of a table of ``size`` rows."""
    return value.whole() if type(value) is Column else np.broadcast_to(value, size)


def level_of(frame: Frame, inputs: Sequence[Any]) -> Level:
    """Return the level of all columns together."""
    level = None
    for column in inputs:
        if type(column) is Column and column.level is not level:
            level = column.level if level is None else level.join(column.level)[0]
    return frame.level(0) if level is None else level


def at_one_level(frame: Frame, inputs: Sequence[Any]) -> tuple[Level, list[Array]]:
    """Return the level of all columns together, and a value of every input for each row of it."""
    level = level_of(frame, inputs)
    return level, [at_level(level, each) for each in inputs]


def at_level(level: Level, value: Any) -> Array:
    """Return a value for each row of a level."""
    return np.broadcast_to(value._at(level) if type(value) is Column else value, level.size)


def stacked(level: Level, terms: Sequence[Any], order: Array) -> Array:
    """Return the values of terms (a row each) at the rows of a level, in an order of these."""
    table = np.empty((len(terms), len(order)))
    ways: dict[int, Array] = {}
    for row, term in zip(table, terms, strict=True):
        if type(term) is not Column:
            row[:] = term
            continue
        way = ways.get(id(term.level))
        if way is None:
            coarser = level.way(term.level)
            way = ways[id(term.level)] = order if coarser is None else coarser[order]
        term.values.take(way, out=row, mode="clip")  # (which needs no buffer)
    return table
