"""Recomputation of the first n layers of every stage, as an axis of the search.

A table of plans holds those that recompute all of their layers, or none. Between them, the first n
of each stage need less memory than none and less time than all. With T the seconds of a step and M
the bytes of its peak, N the layers of the largest stage and s those of the smallest, all of a kind:

    T(n) <= T(n + 1)                   a recomputed layer makes no pass shorter
    T(n) >= (2/3 + n / 3N) T(all)      its forward pass is at most a third of what it then takes
    M(n) >= (1 - n / s) M(0)           no part of a peak falls by more than the share of its layers

    M(n) >= n / N M(all)               n layers keep their share of what all of them keep

The last one holds for layers of several kinds, too. Most plans that recompute are passed over
without a price: with the fewest layers that may fit they already take longer than the best. Every n
of those that are left is priced, and of each plan the fewest layers that fit are what counts. That
a plan does not fit with all of its layers recomputed does not say that it fits with none of these
n: the last layer's recomputation comes on top of what all others keep, and where it is not
recomputed less may be there at once. Not looked at: plans whose activations leave the accelerator,
where less is kept but more is moved (``exhaustive_recompute``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.columnar.dictionary_encoding import DictionaryColumn, decode
from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import RECOMPUTE, PlanTable
from cost_models.pricing.table import table_steps
from cost_models.scenario import Scenario
from planner.search.feasible import Feasible
from planner.search.ranking import Batch
from planner.search.sources import Leaders

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
FULL: Final = RECOMPUTE.index("full")
NONE: Final = RECOMPUTE.index("none")
MOST_SAVED: Final = 1.0 / 3.0  # of a step, by recomputing nothing
ROUNDING: Final = 1e-9
AT_ONCE: Final = 200_000  # plans, with all their numbers of layers, that are priced together
PINNED: Final = ("recompute", "recompute_layers", "recompute_every")


def varies_layers(scenario: Scenario, fixed: Mapping[str, Any]) -> bool:
    """Whether numbers of recomputed layers are looked for: nothing of it is pinned."""
    given = scenario.layer_ranges is not None or scenario.stage_recompute_layers is not None
    return not given and not any(name in fixed for name in PINNED)


def peaks_without(table: PlanTable, peak: Floats, apart: int) -> Floats:
    """Return the peaks of the same plans with nothing recomputed; nan where there is none.

    ``apart``: how many rows ahead such a plan stands where all of a grid are there; it is nearer
    where some of them are illegal.
    """
    found = np.full(len(table), np.nan)
    recompute = decode(table.recompute)
    names = [f.name for f in fields(PlanTable) if f.name != "recompute"]
    columns = [getattr(table, name) for name in names]
    values = [
        column.codes if isinstance(column, DictionaryColumn) else column for column in columns
    ]
    values = [column for column in values if column.strides != (0,)]
    left = (recompute == FULL).nonzero()[0]
    for ahead in range(min(apart, len(table) - 1), 0, -1):
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
    """Return the layers of the smallest and of the largest stage of every plan."""
    return _sizes(scenario, table.pipeline_parallel * table.virtual_stages)


def _sizes(scenario: Scenario, stages: Whole) -> tuple[Whole, Whole]:
    return scenario.model.num_layers // stages, -(-scenario.model.num_layers // stages)


def numbers_that_may_fit(
    scenario: Scenario, sizes: tuple[Whole, Whole], whole: Floats, none: Floats, most: float
) -> tuple[Whole, Whole]:
    """Return the fewest and the most layers of each stage that may come to ``most`` bytes.

    Not all of them. ``sizes``: ``stage_sizes``; ``whole``, ``none``: peaks with all layers
    recomputed and with none (nan: unknown), or less than these. None may fit where the fewest are
    more than the most.
    """
    smallest, largest = sizes
    share = np.zeros(len(whole))
    if len(scenario.model.kinds) == 1:
        share = np.nan_to_num(1.0 - most / none)
    fewest = np.maximum(1.0, np.ceil(smallest * share - ROUNDING))
    last = np.floor(largest * (most / whole) * (1.0 + ROUNDING))
    counts = np.minimum(smallest - (smallest == largest), last)
    return fewest.astype(np.int64), counts.astype(np.int64)


def rows_too_large(
    scenario: Scenario, legal: PlanTable, peak: Floats, none: Floats, most: float
) -> NDArray[np.intp]:
    """Return plans above ``most`` bytes with all layers recomputed that fewer may bring below."""
    rows = ((decode(legal.recompute) == FULL) & (peak > most) & ~(none <= most)).nonzero()[0]
    stages = legal.pipeline_parallel[rows] * legal.virtual_stages[rows]
    sizes = _sizes(scenario, stages)
    fewest, last = numbers_that_may_fit(scenario, sizes, peak[rows], none[rows], most)
    found: NDArray[np.intp] = rows[fewest <= last]
    return found


@dataclass(frozen=True, slots=True)
class Families:
    """Plans that recompute all layers, and the least that fewer can come to."""

    table: PlanTable
    fewest: Whole  # layers of each stage that may fit
    most: Whole  # that are not all
    floor: Floats  # seconds

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        table: PlanTable,
        step: Floats,
        peaks: tuple[Floats, Floats],
        most: float,
    ) -> Families:
        """Bound those that may come to ``most`` bytes; ``peaks``: with all and with no layers."""
        sizes = stage_sizes(scenario, table)
        fewest, last = numbers_that_may_fit(scenario, sizes, *peaks, most)
        alike = len(scenario.model.kinds) == 1
        recomputed = fewest / sizes[1] if alike else np.zeros(len(table))
        floor = step * (1.0 - MOST_SAVED * (1.0 - recomputed)) * (1.0 - ROUNDING)
        return cls(table, fewest, last, floor)

    @property
    def counts(self) -> Whole:
        """How many numbers of layers each may recompute."""
        counts: Whole = np.maximum(0, self.most - self.fewest + 1)
        return counts

    def rows(self, index: Any) -> Families:
        """Return some of them."""
        return Families(
            self.table.rows(index), self.fewest[index], self.most[index], self.floor[index]
        )

    def with_every_number(self) -> tuple[NDArray[np.intp], PlanTable]:
        """Return every plan with every number of layers, and which family it is of."""
        counts = self.counts
        family = np.repeat(np.arange(len(self.table)), counts)
        number = np.arange(len(family)) - np.repeat(np.cumsum(counts) - counts, counts)
        return family, replace(
            self.table.rows(family), recompute_layers=self.fewest[family] + number
        )


@dataclass(slots=True)
class FewestLayers:
    """Candidate source: the fewest recomputed layers with which a plan fits.

    For the objectives time, cost and energy without activations on the host, where no plan gains
    from recomputing more layers than it must.
    """

    scenario: Scenario
    families: Families
    feasible: Feasible
    enumerated: bool = False
    priced: int = 0

    def batches(self, leaders: Leaders) -> Iterator[Batch]:
        """Yield the plans of some families at a time, the lowest bounds first."""
        left, feasible = self.families, self.feasible
        left = left.rows((left.most >= left.fewest).nonzero()[0])
        left = left.rows(feasible.may_satisfy(left.table, left.floor))
        left = left.rows(np.argsort(left.floor, kind="stable"))
        while len(left.table):
            longest = leaders.longest_step
            cut = max(1, int(np.searchsorted(np.cumsum(left.counts), AT_ONCE, side="right")))
            some, left = left.rows(slice(0, cut)), left.rows(slice(cut, None))
            some = some.rows((some.floor < longest).nonzero()[0])
            if len(some.table) == 0:
                break
            yield self._batch(some, longest)

    def _batch(self, some: Families, longest: float) -> Batch:
        """Price the numbers of layers of some families; keep the fewest that fit."""
        scenario, feasible = self.scenario, self.feasible
        if longest < np.inf:
            least = table_steps(scenario, replace(some.table, recompute_layers=some.fewest))
            self.priced += len(least)
            some = some.rows((least < longest) & feasible.may_satisfy(some.table, least))
        family, table = some.with_every_number()
        self.priced += len(table)
        if longest < np.inf:
            step = table_steps(scenario, table)
            index = ((step < longest) & feasible.may_satisfy(table, step)).nonzero()[0]
            family, table, step = family[index], table.rows(index), step[index]
            fitting, peak = feasible.fits(table)
            index = fitting.nonzero()[0]
            step, peak = step[index], peak[index]
        else:  # no leader to beat: memory first, since most of these searches end with what fits
            fitting, peak = feasible.fits(table)
            index = fitting.nonzero()[0]
            step, peak = table_steps(scenario, table.rows(index)), peak[index]
            kept = feasible.may_satisfy(table.rows(index), step)
            index, step, peak = index[kept], step[kept], peak[kept]
        family, table = family[index], table.rows(index)
        index = (legality_codes(scenario, table) == 0).nonzero()[0]
        _, first = np.unique(family[index], return_index=True)  # the fewest layers
        index = index[first]
        table, step, peak = table.rows(index), step[index], peak[index]
        return Batch(table, np.lexsort((peak, step)), step, peak)
