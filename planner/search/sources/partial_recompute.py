"""Recomputation of the first n layers of every stage, as an axis of the search.

The enumerated plans recompute all layers or none. Recomputing the first n layers of each stage
needs less memory than n = 0 and less time than all. With T the seconds of a step, M the bytes of
its peak, N the layers of the largest stage and s of the smallest, for layers of one kind:

    T(n) <= T(n + 1)                   a recomputed layer makes no pass shorter
    T(n) >= (2/3 + n / 3N) T(all)      recomputation is at most a third of a layer's time
    M(n) >= (1 - n / s) M(0)           no part of a peak falls by more than the share n / s
    M(n) >= n / N M(all)               n layers keep at least their share of M(all)

The last bound also holds for layers of several kinds. Most plans are dropped without pricing: with
the fewest layers that may fit, their bound is longer than the best step. For the others every n is
priced, and the smallest n that fits is ranked. A plan that does not fit with all layers recomputed
may still fit with fewer: the recomputed activations of the last layer come on top of the kept ones,
and without its recomputation the peak may be lower. Plans with offloaded activations are left out:
they keep less but transfer more (``exhaustive_recompute``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.columnar.dictionary_encoding import DictionaryColumn, decode
from cost_models.legality.capabilities import capabilities_of
from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import COLUMNS, PlanTable
from cost_models.plan.recompute import RECOMPUTE
from cost_models.pricing.table import table_steps
from cost_models.scenario import Scenario
from hardware_profiles.progress import stages
from planner.search.feasible import Feasible
from planner.search.ranking import CandidateBatch
from planner.search.sources.source import Leaders

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
FULL: Final = RECOMPUTE.index("full")
NONE: Final = RECOMPUTE.index("none")
MOST_SAVED: Final = 1.0 / 3.0  # largest share of a step that recomputation can take
ROUNDING: Final = 1e-9
MAX_TABLE: Final = 200_000  # plans, with all their numbers of layers, priced in one table
PRICING: Final = "pricing partial recomputation"  # what is done
# seconds, relative: steps with the fewest layers, steps with every number, memory
SIZES: Final = (1.0, 1.0, 4.0)
PINNED: Final = ("recompute", "recompute_layers", "recompute_every")


def varies_layers(scenario: Scenario, fixed: Mapping[str, Any]) -> bool:
    """Whether the search varies the number of recomputed layers.

    It does not if any part is pinned, or if the trainer recomputes all or none.
    """
    given = scenario.layer_ranges is not None or scenario.stage_recompute_layers is not None
    limits = capabilities_of(scenario.software)
    given = given or (limits is not None and limits.limits().get("recompute_layers") == [0])
    return not given and not any(name in fixed for name in PINNED)


def peaks_without(table: PlanTable, peak: Floats, max_offset: int) -> Floats:
    """Return the peaks of the same plans without recomputation, in bytes; nan if not in the table.

    ``max_offset``: how many rows earlier that plan is in a complete grid; the offset is smaller if
    some plans between are illegal.
    """
    found = np.full(len(table), np.nan)
    recompute = decode(table.recompute)
    columns = [getattr(table, name) for name in COLUMNS if name != "recompute"]
    values = [
        column.codes if isinstance(column, DictionaryColumn) else column for column in columns
    ]
    values = [column for column in values if column.strides != (0,)]
    left = (recompute == FULL).nonzero()[0]
    for ahead in range(min(max_offset, len(table) - 1), 0, -1):
        rows = left[left >= ahead]
        rows = rows[recompute[rows - ahead] == NONE]
        for column in values:
            rows = rows[column[rows] == column[rows - ahead]]
        found[rows] = peak[rows - ahead]
        left = left[np.isnan(found[left])]
        if len(left) == 0:
            break
    return found


def stage_sizes(scenario: Scenario, table: PlanTable) -> tuple[Whole, Whole]:
    """Return the number of layers of the smallest and the largest stage of every plan."""
    return _sizes(scenario, table.num_stages)


def _sizes(scenario: Scenario, stages: Whole) -> tuple[Whole, Whole]:
    return scenario.model.num_layers // stages, -(-scenario.model.num_layers // stages)


def numbers_that_may_fit(
    scenario: Scenario, sizes: tuple[Whole, Whole], whole: Floats, none: Floats, max_peak: float
) -> tuple[Whole, Whole]:
    """Return bounds on the recomputed layers of a stage with a peak of ``max_peak`` bytes or less.

    The upper bound is below the number of all layers. ``sizes``: ``stage_sizes``; ``whole``,
    ``none``: peaks in bytes with all layers recomputed and with none (nan: unknown), or lower
    bounds on these. No number can fit where the lower bound exceeds the upper one.
    """
    smallest, largest = sizes
    share = np.zeros(len(whole))
    if len(scenario.model.kinds) == 1:
        share = np.nan_to_num(1.0 - max_peak / np.maximum(none, 1.0))
    fewest = np.maximum(1.0, np.ceil(smallest * share - ROUNDING))
    last = np.floor(largest * (max_peak / np.maximum(whole, 1.0)) * (1.0 + ROUNDING))
    counts = np.minimum(smallest - (smallest == largest), last)
    return fewest.astype(np.int64), counts.astype(np.int64)


def least_step(scenario: Scenario, step: Floats, fewest: Whole, largest: Whole) -> Floats:
    """Return a lower bound of a step that recomputes ``fewest`` layers or more of each stage.

    ``step``: seconds with all layers recomputed; ``largest``: layers of the largest stage.
    """
    alike = len(scenario.model.kinds) == 1
    recomputed = fewest / largest if alike else np.zeros(len(step))
    bound: Floats = step * (1.0 - MOST_SAVED * (1.0 - recomputed)) * (1.0 - ROUNDING)
    return bound


def rows_too_large(
    scenario: Scenario, legal: PlanTable, peak: Floats, none: Floats, limits: tuple[float, float]
) -> NDArray[np.intp]:
    """Return plans that may be too large and may need less with fewer recomputed layers.

    ``limits``: bytes with which every plan is tight, and with which none is.
    """
    every, most = limits
    rows = ((decode(legal.recompute) == FULL) & (peak > every) & ~(none <= every)).nonzero()[0]
    stages = legal.pipeline_parallel[rows] * legal.virtual_stages[rows]
    sizes = _sizes(scenario, stages)
    fewest, last = numbers_that_may_fit(scenario, sizes, peak[rows], none[rows], most)
    found: NDArray[np.intp] = rows[fewest <= last]
    return found


class Families(Struct, frozen=True):
    """Plans with full recomputation, each with bounds on its variants with fewer layers."""

    table: PlanTable
    min_layers: Whole  # fewest recomputed layers of each stage that may fit
    max_layers: Whole  # most recomputed layers of each stage, fewer than all
    floor: Floats  # seconds, lower bound on the step

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        table: PlanTable,
        step: Floats,
        peaks: tuple[Floats, Floats],
        max_peak: float,
    ) -> Families:
        """Return bounds for ``max_peak`` bytes; ``peaks``: with all layers and with none."""
        sizes = stage_sizes(scenario, table)
        fewest, last = numbers_that_may_fit(scenario, sizes, *peaks, max_peak)
        floor = least_step(scenario, step, fewest, sizes[1])
        return cls(table, fewest, last, floor)

    @property
    def counts(self) -> Whole:
        """Number of variants of each plan."""
        counts: Whole = np.maximum(0, self.max_layers - self.min_layers + 1)
        return counts

    def rows(self, index: Any) -> Families:
        """Return a selection of rows."""
        return Families(
            self.table.rows(index),
            self.min_layers[index],
            self.max_layers[index],
            self.floor[index],
        )

    def with_every_number(self) -> tuple[NDArray[np.intp], PlanTable]:
        """Return the family of every variant, and the table of all variants."""
        counts = self.counts
        family = np.repeat(np.arange(len(self.table)), counts)
        number = np.arange(len(family)) - np.repeat(np.cumsum(counts) - counts, counts)
        return family, replace(
            self.table.rows(family), recompute_layers=self.min_layers[family] + number
        )


class FewestLayers(Struct):
    """Candidate source: the fewest recomputed layers with which a plan fits.

    For the objectives time, cost and energy without offloaded activations: no plan gets faster by
    recomputing more layers than necessary.
    """

    scenario: Scenario
    families: Families
    feasible: Feasible
    priced: int = 0

    def batches(self, leaders: Leaders) -> Iterator[CandidateBatch]:
        """Yield the plans of a few families at a time, the lowest bounds first."""
        left, feasible = self.families, self.feasible
        left = left.rows((left.max_layers >= left.min_layers).nonzero()[0])
        left = left.rows(feasible.may_satisfy(left.table, left.floor))
        left = left.rows(np.argsort(left.floor, kind="stable"))
        while len(left.table):
            left = left.rows((left.floor < leaders.longest(left.table)).nonzero()[0])
            cut = max(1, int(np.searchsorted(np.cumsum(left.counts), MAX_TABLE, side="right")))
            some, left = left.rows(slice(0, cut)), left.rows(slice(cut, None))
            if len(some.table) == 0:
                break
            with stages(*SIZES, joint=True) as begin:
                batch = self._batch(some, leaders.longest(some.table), begin)
            yield batch

    def _batch(
        self, some: Families, longest: Floats, begin: Callable[[str], None]
    ) -> CandidateBatch:
        """Price all variants of some families; keep the fewest layers that fit."""
        begin(PRICING)
        scenario, feasible = self.scenario, self.feasible
        has_leaders = bool((longest < np.inf).any())
        if has_leaders:
            least = table_steps(scenario, replace(some.table, recompute_layers=some.min_layers))
            self.priced += len(least)
            kept = (least < longest) & feasible.may_satisfy(some.table, least)
            some, longest = some.rows(kept), longest[kept]
        begin(PRICING)
        family, table = some.with_every_number()
        self.priced += len(table)
        if has_leaders:
            step = table_steps(scenario, table)
            index = ((step < longest[family]) & feasible.may_satisfy(table, step)).nonzero()[0]
            family, table, step = family[index], table.rows(index), step[index]
            begin(PRICING)
            fitting, peak = feasible.fits(table)
            index = fitting.nonzero()[0]
            step, peak = step[index], peak[index]
        else:  # no leader to beat: memory first, which usually excludes most plans
            fitting, peak = feasible.fits(table)
            index = fitting.nonzero()[0]
            begin(PRICING)
            step, peak = table_steps(scenario, table.rows(index)), peak[index]
            kept = feasible.may_satisfy(table.rows(index), step)
            index, step, peak = index[kept], step[kept], peak[kept]
        family, table = family[index], table.rows(index)
        index = (legality_codes(scenario, table) == 0).nonzero()[0]
        _, first = np.unique(family[index], return_index=True)  # the fewest layers
        index = index[first]
        table, step, peak = table.rows(index), step[index], peak[index]
        return CandidateBatch(table, np.lexsort((peak, step)), step, peak)
