"""Tables that compute each column once for equal rows, and joins of such columns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Final

import numpy as np

from cost_models.columnar.columns import FactoredColumn
from cost_models.columnar.projections import Frame, Index, distinct, distinct_rows
from cost_models.plan.plan import COLUMNS, PlanTable

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


def factored(table: PlanTable) -> tuple[PlanTable, Frame]:
    """Return the same plans with factored columns, and the frame of these columns."""
    frame, columns = Frame(len(table)), {}
    for name in COLUMNS:
        values, codes = distinct(getattr(table, name))
        columns[name] = values
        if len(values) > 1:
            columns[name] = FactoredColumn(frame.add(codes, len(values)), values)  # type: ignore[assignment]
    return PlanTable(**columns), frame


def find_projections(table: PlanTable, frame: Frame) -> None:
    """Find the levels of all columns but some, from which those of fewer ones are found."""
    every = (1 << len(frame.codes)) - 1
    frame.project(every & ~mask_of(table, APART[-1]))
    for names in APART:
        frame.project(every & ~mask_of(table, names))


def rows_of(table: PlanTable, rows: Index) -> PlanTable:
    """Return some rows of a table, factored or not, with columns of numbers."""
    columns = (getattr(table, name) for name in COLUMNS)
    return PlanTable(
        *(
            each.values[each.projection.of_table_rows(rows)]
            if type(each) is FactoredColumn
            else np.broadcast_to(each, len(rows))
            if len(each) == 1
            else each[rows]
            for each in columns
        )
    )


def mask_of(table: PlanTable, names: Sequence[str]) -> int:
    """Return which columns of a frame some columns of a factored table are."""
    columns = [getattr(table, name) for name in names]
    return reduce(or_, [c.projection.mask for c in columns if type(c) is FactoredColumn], 0)


def distinct_plans(table: PlanTable, without: Sequence[str] = ()) -> tuple[Index, Index]:
    """Return the number of every row's distinct plan, and the first row of each of these.

    ``without``: columns in which plans may differ.
    """
    return distinct_rows(*(getattr(table, name) for name in COLUMNS if name not in without))
