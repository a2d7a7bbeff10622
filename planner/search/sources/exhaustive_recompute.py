"""Candidate source: plans with every number of recomputed layers.

Needed if the fewest layers that fit are not always the best choice: for Pareto fronts, the
objective memory, constraints with lower limits on memory or time, and offloaded activations (fewer
recomputed layers mean less computation but more transfers). Plans that do not fit with all layers
recomputed are candidates, too.

With T, M, N and s as in ``partial_recompute``, and T' the step time without offloaded
activations, in seconds:

    T(n) >= T'(n) >= (2/3 + n / 3N) T'(all)
    M(n) >= (1 - n / s) M(0)    and    M(n) >= n / N M(all)

Plans whose bounds exceed the allowed memory or time for every n are dropped; for all others every n
is priced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.columnar.dictionary_encoding import decode
from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import OFFLOADS, PlanTable
from cost_models.pricing.table import table_steps
from cost_models.scenario import Scenario
from hardware_profiles.progress import stages, tracked
from planner.search.candidates import joined
from planner.search.feasible import Feasible
from planner.search.ranking import Beaten, CandidateBatch, Ranking
from planner.search.sources.partial_recompute import (
    FULL,
    MOST_SAVED,
    PRICING,
    ROUNDING,
    stage_sizes,
)
from planner.search.sources.source import Leaders

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
Flags = NDArray[np.bool_]
MAX_TABLE: Final = 200_000  # plans priced in one table
SIZES: Final = (5.0, 1.0)  # seconds, relative: memory, steps
NONE, EMPTY = np.zeros(0, dtype=np.intp), np.zeros(0)
# for each word of OFFLOADS, the same without the activations
KEPT: Final = np.array(
    [
        OFFLOADS.index(word.replace("+activations", "").replace("activations", "none"))
        for word in OFFLOADS
    ]
)


def every_count(highest: NDArray[np.int64]) -> tuple[Rows, NDArray[np.int64]]:
    """Return row indices and numbers: for each row all numbers from 1 to ``highest``.

    >>> [column.tolist() for column in every_count(np.array([2, 0, 1]))]
    [[0, 0, 2], [1, 2, 1]]
    """
    rows = np.repeat(np.arange(len(highest)), highest)
    starts = np.repeat(np.cumsum(highest) - highest, highest)
    return rows, np.arange(len(rows)) - starts + 1


class FullRecompute(Struct, frozen=True):
    """Plans that recompute all layers, whether they fit or not, with two peaks in bytes."""

    table: PlanTable
    none: Floats  # peak of the same plan without recomputation; nan: unknown
    peak: Floats

    @classmethod
    def of(cls, legal: PlanTable, peak: Floats, none: Floats, *, offloaded: bool) -> FullRecompute:
        """Select them from all legal plans; ``offloaded``: only plans that offload activations."""
        rows = (decode(legal.recompute) == FULL).nonzero()[0]
        table = legal.rows(rows).plain()
        if offloaded:
            few = table.offloads_activations.nonzero()[0]
            rows, table = rows[few], table.rows(few)
        return cls(table, none[rows], peak[rows])


class LayerGrids(Struct, frozen=True):
    """Plans with full recomputation, each with bounds over all smaller numbers of layers."""

    table: PlanTable
    max_layers: NDArray[np.int64]  # largest number of recomputed layers of each stage below all
    peak: Floats  # bytes, with all layers recomputed
    least_peak: Floats  # bytes, lower bound for every number of layers
    least_step: Floats  # seconds, lower bound for every number of layers

    @classmethod
    def of(
        cls, scenario: Scenario, every: FullRecompute, max_peak: float, *, timed: bool = True
    ) -> LayerGrids:
        """Return plans that may need at most ``max_peak`` bytes; ``timed``: with step bounds."""
        table, none, whole = every.table, every.none, every.peak
        smallest, largest = stage_sizes(scenario, table)
        counts = smallest - (smallest == largest)
        peak = np.zeros(len(table))
        alike = len(scenario.model.kinds) == 1
        if alike:
            share = whole * smallest / largest
            peak = np.nan_to_num(none * share / (none + share)) * (1.0 - ROUNDING)
        rows = ((counts > 0) & (peak <= max_peak)).nonzero()[0]
        table = table.rows(rows)
        kept = np.zeros(len(table))
        if timed:
            kept = table_steps(scenario, replace(table, offload=KEPT[table.offload]))
        first = 1.0 / largest[rows] if alike else np.zeros(len(rows))
        step = kept * (1.0 - MOST_SAVED * (1.0 - first)) * (1.0 - ROUNDING)
        return cls(table, counts[rows], whole[rows], peak[rows], step)

    def rows(self, index: Any) -> LayerGrids:
        """Return a selection of rows."""
        columns = (self.max_layers, self.peak, self.least_peak, self.least_step)
        return LayerGrids(self.table.rows(index), *(column[index] for column in columns))

    def slabs(self) -> Iterator[tuple[Rows, PlanTable]]:
        """Yield every plan with every number of layers, and the row of its grid."""
        ends = np.concatenate([[0], np.cumsum(self.max_layers)])
        pairs, start = [], 0
        while start < len(self.table):
            most = ends[start] + MAX_TABLE
            stop = max(start + 1, int(np.searchsorted(ends, most, side="right")) - 1)
            pairs.append((start, stop))
            start = stop
        for start, stop in tracked(pairs, size=lambda pair: ends[pair[1]] - ends[pair[0]]):
            grid, number = every_count(self.max_layers[start:stop])
            yield start + grid, replace(self.table.rows(start + grid), recompute_layers=number)


class EveryNumber(Struct):
    """Candidate source: every number of recomputed layers.

    For fronts, the objective memory, offloaded activations and constraints with lower limits on
    memory or time.
    """

    scenario: Scenario
    grids: LayerGrids
    max_peak: Floats  # bytes, largest peak allowed for the plans of each grid
    beaten: Beaten
    feasible: Feasible
    ranking: Ranking
    priced: int = 0

    @classmethod
    def of(
        cls, grids: LayerGrids, feasible: Feasible, leaders: Leaders, *, smaller: bool
    ) -> EveryNumber:
        """Drop the grids whose bounds do not beat the leaders.

        ``smaller``: only plans that need no more memory than with all layers recomputed.
        """
        ranking = leaders.ranking
        beaten = ranking.beaten(leaders.plans)
        left = grids.rows((~beaten(grids.table, grids.least_step, grids.least_peak)).nonzero()[0])
        max_peak = left.peak * (1.0 + ROUNDING) if smaller else np.full(len(left.peak), np.inf)
        return cls(ranking.scenario, left, max_peak, beaten, feasible, ranking)

    def batches(self, leaders: Leaders) -> Iterator[CandidateBatch]:
        """Yield one batch: all plans of all grids that fit and that the leaders do not beat."""
        tables, columns = [self.grids.table.rows(slice(0, 0))], [(NONE, EMPTY, EMPTY)]
        for grid, table in self.grids.slabs():
            self.priced += len(table)
            with stages(*SIZES, joint=True) as begin:
                begin(PRICING)
                fitting, peak = self.feasible.fits(table)
                rows = (fitting & (peak <= self.max_peak[grid])).nonzero()[0]
                table, grid, peak = table.rows(rows), grid[rows], peak[rows]
                begin(PRICING)
                step = table_steps(self.scenario, table)
            kept = self.feasible.may_satisfy(table, step, peak) & ~self.beaten(table, step, peak)
            rows = kept.nonzero()[0]
            rows = rows[legality_codes(self.scenario, table.rows(rows)) == 0]
            tables.append(table.rows(rows))
            columns.append((grid[rows], step[rows], peak[rows]))
        grid, step, peak = (np.concatenate(parts) for parts in zip(*columns, strict=True))
        table = joined(tables).plain()
        order = self.ranking.order(table, np.arange(len(table)), step, peak)
        yield CandidateBatch(table, order, step, peak, family=grid)
