"""Tables of which each column is computed once for equal rows, and such columns side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import reduce
from operator import or_
from typing import Any, Final

import numpy as np

from cost_models.columns import Column
from cost_models.levels import Array, Frame, Level, distinct
from cost_models.plan import PlanTable

# columns that much does not depend on: distinct rows of all others are found first, and from them
# those of fewer columns
_SHARDING: Final = (
    "zero_stage",
    "dp_replicate",
    "secondary_ranks",
    "quantised_weights",
    "quantised_gradients",
)
_PASSES: Final = ("recompute", "sequence_parallel", "context_parallel_method")
_LAYERS: Final = ("recompute_layers", "recompute_every", "virtual_stages")
APART: Final = (
    ("pipeline_schedule", "context_parallel_method"),
    _SHARDING,
    _PASSES,
    (*_PASSES, *_LAYERS, "pipeline_schedule"),
    (*_SHARDING, "pipeline_schedule", "num_microbatches", "data_parallel", "pipeline_parallel"),
    (*_SHARDING, *_PASSES, *_LAYERS, "pipeline_schedule"),
)


def whole(value: Any, size: int) -> Array:
    """Return a value for every row of a table of ``size`` rows."""
    return value.whole() if type(value) is Column else np.broadcast_to(value, size)


def factored(table: PlanTable) -> tuple[PlanTable, Frame]:
    """Return the same plans, each column by its distinct values; and what they are columns of."""
    frame, columns = Frame(len(table)), {}
    for f in fields(PlanTable):
        values, codes = distinct(getattr(table, f.name))
        columns[f.name] = values
        if len(values) > 1:
            columns[f.name] = Column(frame.add(codes, len(values)), values)  # type: ignore[assignment]
    return PlanTable(**columns), frame


def find_levels(table: PlanTable, frame: Frame, apart: Sequence[Sequence[str]] = APART) -> None:
    """Find the levels of all columns but some, from which those of fewer ones are found."""
    every = (1 << len(frame.codes)) - 1
    for names in apart:
        frame.level(every & ~mask_of(table, names))


def mask_of(table: PlanTable, names: Sequence[str]) -> int:
    """Return which columns of a frame some columns of a factored table are."""
    columns = [getattr(table, name) for name in names]
    return reduce(or_, [c.level.mask for c in columns if type(c) is Column], 0)


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
