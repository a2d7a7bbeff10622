"""Candidate source: every other number of virtual stages of interleaved schedules.

The enumerated plans have two stages a rank, or a number that divides the layers evenly. An
interleaved schedule is legal with every number v that leaves each stage a layer; the stages are cut
as ``fit`` cuts them. With T the seconds of a step and M the bytes of its peak:

    T(none) <= T(selective) <= T(full)     recomputation makes no pass shorter
    M(v) >= 2/3 M(2)                       layers of one kind, cut evenly

The first rank of p keeps (3 p - 1) / 2 micro-batches with two stages, and p or more with any
number; with an even cut its layers are the same. The second bound does not hold for a split
backward pass that recomputes all layers: it keeps the recomputed activations of whole stages for
their weight gradients, and more stages are smaller. Where a leader is known, plans without
recomputation are priced first, and their variants only if they are faster than the leader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from msgspec import Struct, structs
from msgspec.structs import astuple
from numpy.typing import NDArray

from cost_models.arrays import ascending
from cost_models.columnar.dictionary_encoding import decode, encode
from cost_models.legality.rules import legality_codes
from cost_models.partition.schedules import LOOPED_CODES, SPLIT_CODES
from cost_models.plan.factored import distinct_plans
from cost_models.plan.plan import OFFLOADS, SEARCHED_RECOMPUTE, PlanTable
from cost_models.pricing.table import table_steps
from cost_models.scenario import Scenario
from hardware_profiles.progress import stages, tracked
from planner.search.candidates import joined
from planner.search.feasible import Feasible, verdicts_of
from planner.search.ranking import CandidateBatch
from planner.search.sources.exhaustive_recompute import EveryNumber, FullRecompute, LayerGrids
from planner.search.sources.partial_recompute import (
    FULL,
    NONE,
    ROUNDING,
    Families,
    FewestLayers,
    Whole,
    least_step,
    numbers_that_may_fit,
    peaks_without,
    stage_sizes,
)
from planner.search.sources.short_pieces import family_bounds
from planner.search.sources.source import CandidateSource, Leaders
from planner.search.space import enumerated_counts, virtual_stage_counts

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
# rows of a search between a plan and the same one without recomputation, at most
MOST_BETWEEN: Final = len(OFFLOADS) * SEARCHED_RECOMPUTE.index("full")
LEAST_SHARE: Final = 2.0 / 3.0  # of the peak with two stages a rank
MAX_TABLE: Final = 1_000_000  # plans priced in one table
MOST_ALONE: Final = 20_000  # plans that are priced without recomputation in the same table
PRICING: Final = "pricing virtual stages"  # what is done
# seconds, relative: steps without recomputation; steps, memory and partial recomputation
SIZES: Final = (1.0, 2.0)
VARIANTS: Final = (1.0, 2.0, 2.0)


class Interleaved(Struct, frozen=True):
    """Legal plans with two virtual stages, which stand for all larger numbers."""

    table: PlanTable
    least: Floats  # bytes, lower bound of the peak with any number of stages; nan: unknown
    least_without: Floats  # the same without recomputation; nan: unknown

    @classmethod
    def of(cls, scenario: Scenario, legal: PlanTable, peak: Floats, none: Floats) -> Interleaved:
        """Select them from legal plans.

        ``peak``, ``none``: bytes, ``none`` if none recomputes; nan: unknown.
        """
        looped = np.isin(decode(legal.pipeline_schedule), LOOPED_CODES)
        rows = (looped & (decode(legal.virtual_stages) == 2)).nonzero()[0]
        table, share = legal.rows(rows), LEAST_SHARE * (1.0 - ROUNDING)
        if len(scenario.model.kinds) > 1 or scenario.software.pipeline.stages != "even":
            return cls(table, np.zeros(len(rows)), np.full(len(rows), np.nan))
        smaller = np.isin(decode(table.pipeline_schedule), SPLIT_CODES)
        smaller &= decode(table.recompute) == FULL
        return cls(table, np.where(smaller, 0.0, share * peak[rows]), share * none[rows])

    @classmethod
    def joined(cls, parts: Sequence[Interleaved]) -> Interleaved:
        """Return the plans of several parts, one after the other."""
        tables, least, without = zip(*map(astuple, parts), strict=True)
        return cls(joined(tables), np.concatenate(least), np.concatenate(without))

    def priced(self, scenario: Scenario, rows: Rows) -> Interleaved:
        """Return the same plans with the bounds of some rows known."""
        rows = rows[np.isnan(self.least[rows])]
        table, least, without = self.table.rows(rows), self.least.copy(), self.least_without.copy()
        peak, _ = verdicts_of(scenario, table)
        found = Interleaved.of(scenario, table, peak, peaks_without(table, peak, MOST_BETWEEN))
        least[rows], without[rows] = found.least, found.least_without
        return Interleaved(self.table, least, without)

    def rows(self, index: Any) -> Interleaved:
        """Return a selection of rows."""
        return Interleaved(self.table.rows(index), self.least[index], self.least_without[index])


def other_counts(scenario: Scenario, pipelines: NDArray[np.int64]) -> tuple[Rows, Rows]:
    """Return row indices and numbers of virtual stages: for each row all that are not enumerated.

    ``pipelines``: pipeline-parallel degree of each row.
    """
    present, code = np.unique(pipelines, return_inverse=True)
    left = []
    for pipeline in present.tolist():
        known = enumerated_counts(scenario.model, pipeline)
        legal = virtual_stage_counts(scenario.model.num_layers, pipeline)
        left.append(np.array([v for v in legal if v not in known], dtype=np.intp))
    size = np.array([len(each) for each in left], dtype=np.intp)
    begin = np.cumsum(size) - size
    times = size[code]
    row = np.repeat(np.arange(len(code)), times)
    place = np.arange(len(row)) - np.repeat(np.cumsum(times) - times, times)
    every = np.concatenate([np.zeros(0, dtype=np.intp), *left])
    return row, every[begin[code][row] + place]


class VirtualStages(Struct):
    """Variants of interleaved plans with other numbers of stages, and of recomputed layers."""

    scenario: Scenario
    interleaved: Interleaved
    feasible: Feasible
    fewest: bool  # the fewest recomputed layers that fit are the best
    every: bool  # every number of recomputed layers is a candidate
    smaller: bool  # see ``EveryNumber.of``
    priced: int = 0
    part_recomputed: int = 0

    def batches(self, leaders: Leaders) -> Iterator[CandidateBatch]:
        """Yield the variants that fit and whose bounds beat the leaders."""
        max_peak = self.feasible.max_peak_at(self.feasible.verdict)
        some, full = self.interleaved, decode(self.interleaved.table.recompute) == FULL
        partial = full & (self.fewest or self.every)
        some = some.rows((~(some.least > max_peak) | partial).nonzero()[0])
        if len(some.table) == 0:
            return
        with stages(*SIZES, joint=True) as begin:
            begin(PRICING)
            row, number = self._pairs(some.table, leaders)
            some = some.priced(self.scenario, ascending(row))
            begin(PRICING)
            slabs = [slice(first, first + MAX_TABLE) for first in range(0, len(row), MAX_TABLE)]
            for here in tracked(slabs):
                mine = some.rows(row[here])
                table = with_virtual_stages(mine.table, number[here])
                with stages(*VARIANTS) as part:
                    yield from self.variants(structs.replace(mine, table=table), leaders, part)

    def _pairs(self, table: PlanTable, leaders: Leaders) -> tuple[Rows, Rows]:
        """Return rows and numbers of stages that are fast enough if no layer recomputes."""
        if not times_first(leaders, table):
            return other_counts(self.scenario, decode(table.pipeline_parallel))
        codes = decode(table.recompute)
        family, first = distinct_plans(table, without=["recompute"])
        least = np.full(len(first), int(codes.min()))
        base = replace(table.rows(first), recompute=least).plain()
        row, number = other_counts(self.scenario, base.pipeline_parallel)
        self.priced += len(row)
        longest = leaders.longest(base)
        fast = family_bounds(self.scenario, base)[0] < longest
        row, number = row[fast[row]], number[fast[row]]
        kept = np.zeros(len(row), dtype=bool)
        slabs = [slice(first, first + MAX_TABLE) for first in range(0, len(row), MAX_TABLE)]
        for here in tracked(slabs):
            variants = with_virtual_stages(base.rows(row[here]), number[here])
            step = table_steps(self.scenario, variants)
            kept[here] = step < longest[row[here]]
            kept[here] &= self.feasible.may_satisfy(variants, step)
        row, number = row[kept], number[kept]
        begins = np.searchsorted(row, np.arange(len(first) + 1))
        times = np.diff(begins)[family]
        index = np.repeat(np.arange(len(family)), times)
        place = np.arange(len(index)) - np.repeat(np.cumsum(times) - times, times)
        return index, number[begins[family][index] + place]

    def variants(
        self, some: Interleaved, leaders: Leaders, begin: Callable[[str], None]
    ) -> Iterator[CandidateBatch]:
        """Yield the plans of one table, then those that recompute fewer layers."""
        begin(PRICING)
        scenario, feasible, ranking = self.scenario, self.feasible, leaders.ranking
        some = some.rows(self._may_fit(some, leaders).nonzero()[0])
        some = some.rows((legality_codes(scenario, some.table.plain()) == 0).nonzero()[0])
        table, beaten = some.table.plain(), ranking.beaten(leaders.plans)
        self.priced += len(table)
        step, peak = np.zeros(len(table)), np.full(len(table), np.nan)
        timed = times_first(leaders, table)
        rows = (some.least <= feasible.max_peak_at(feasible.verdict)).nonzero()[0]
        if timed:
            step = table_steps(scenario, table)
            rows = rows[~beaten(table.rows(rows), step[rows], some.least[rows])]
            rows = rows[feasible.may_satisfy(table.rows(rows), step[rows])]
        begin(PRICING)
        few = self._may_recompute_fewer(some, table, step, leaders, timed=timed)
        none, many = np.full(len(table), np.nan), len(few) > MOST_ALONE
        if many:  # most recompute too many layers for the memory that they need without
            none[few] = feasible.fits(_without(table.rows(few)))[1]
            some = structs.replace(some, least_without=np.fmax(none, some.least_without))
            more = self._may_recompute_fewer(some, table, step, leaders, timed=timed)
            few = few[np.isin(few, more, kind="table")]
        every = ascending(rows, few)
        alone = few[: 0 if many else None]
        both = table.rows(np.concatenate([every, alone]))
        recompute = np.concatenate([table.recompute[every], np.full(len(alone), NONE)])
        fitting, peaks = feasible.fits(replace(both, recompute=recompute))
        (peak[every], none[alone]), fitting = np.split(peaks, [len(every)]), fitting[: len(every)]
        rows = rows[np.isin(rows, every[fitting], kind="table")]
        if not timed:
            step[rows] = table_steps(scenario, table.rows(rows))
        rows = rows[feasible.may_satisfy(table.rows(rows), step[rows], peak[rows])]
        rows = rows[~beaten(table.rows(rows), step[rows], peak[rows])]
        yield CandidateBatch(table, ranking.order(table, rows, step, peak), step, peak)
        begin(PRICING)
        none = none[few]
        slower = ~(none <= feasible.max_peak)  # than without recomputation, if that fits
        few, none = few[slower], none[slower]
        seconds = step[few] if timed else table_steps(scenario, table.rows(few))
        bounds = seconds, peak[few], none
        for source in self._fewer_recomputed(some, table.rows(few), bounds, leaders):
            yield from source.batches(leaders)
            self.part_recomputed += source.priced

    def _may_fit(self, some: Interleaved, leaders: Leaders) -> NDArray[np.bool_]:
        """Return plans that may fit, with fewer recomputed layers or as they are."""
        fits: NDArray[np.bool_] = some.least <= self.feasible.max_peak_at(self.feasible.verdict)
        full = decode(some.table.recompute) == FULL
        if self.every:
            fits |= full
        elif self.fewest:
            rows = (full & ~fits).nonzero()[0]
            fewest, last = self._numbers(some.rows(rows), leaders)
            fits[rows] = fewest <= last
        return fits

    def _numbers(self, some: Interleaved, leaders: Leaders) -> tuple[Whole, Whole]:
        """Return ``numbers_that_may_fit`` of recomputed layers."""
        sizes = stage_sizes(self.scenario, some.table.plain())
        bounds, most = (some.least, some.least_without), self._largest_peak(leaders)
        return numbers_that_may_fit(self.scenario, sizes, *bounds, most)

    def _may_recompute_fewer(
        self,
        some: Interleaved,
        table: PlanTable,
        step: Floats,
        leaders: Leaders,
        *,
        timed: bool,
    ) -> Rows:
        """Return plans that recompute all layers, and may be the best if they recompute fewer.

        ``step``: seconds, or 0 if unknown. ``timed``: steps with the fewest layers are priced, too,
        which costs less than memory.
        """
        if not self.fewest:
            return np.zeros(0, dtype=np.intp)
        fewest, last = self._numbers(some, leaders)
        few = (table.recompute == FULL) & ~table.offloads_activations & (fewest <= last)
        largest = stage_sizes(self.scenario, table)[1]
        few &= least_step(self.scenario, step, fewest, largest) < leaders.longest(table)
        rows: Rows = few.nonzero()[0]
        if timed:
            least = replace(table.rows(rows), recompute_layers=fewest[rows])
            rows = rows[table_steps(self.scenario, least) < leaders.longest(least)]
        return rows

    def _largest_peak(self, leaders: Leaders) -> float:
        """Return the largest peak of a plan that is wanted: without a leader, of a tight one."""
        return self.feasible.max_peak if leaders.plans else self.feasible.max_peak_at(1)

    def _fewer_recomputed(
        self,
        some: Interleaved,
        few: PlanTable,
        bounds: tuple[Floats, Floats, Floats],
        leaders: Leaders,
    ) -> Iterator[CandidateSource]:
        """Yield the sources of plans that recompute some layers.

        ``bounds``: seconds of ``few``, and bytes with all layers recomputed and with none.
        """
        scenario, feasible = self.scenario, self.feasible
        max_peak = self._largest_peak(leaders)
        if self.fewest:
            seconds, *peaks = bounds
            families = Families.of(scenario, few, seconds, (peaks[0], peaks[1]), max_peak)
            yield FewestLayers(scenario, families, feasible)
        if self.every:
            table = some.table.plain()
            left = table.offloads_activations | (not self.fewest)
            rows = ((table.recompute == FULL) & left).nonzero()[0]
            mine = table.rows(rows)
            peak, _ = verdicts_of(scenario, mine)
            whole = FullRecompute(mine, some.least_without[rows], peak)
            grids = LayerGrids.of(scenario, whole, max_peak, timed=bool(leaders.plans))
            yield EveryNumber.of(grids, feasible, leaders, smaller=self.smaller)


def times_first(leaders: Leaders, table: PlanTable) -> bool:
    """Whether slow plans are dropped before their memory is priced."""
    ranking = leaders.ranking
    return ranking.by_step and bool(np.all(leaders.longest(table.plain()) < np.inf))


def _without(table: PlanTable) -> PlanTable:
    """Return the same plans without recomputation."""
    return replace(table, recompute=np.full_like(table.recompute, NONE))


def with_virtual_stages(table: PlanTable, number: Rows) -> PlanTable:
    """Return plans with other numbers of virtual stages."""
    encoded: Any = encode(number)
    return replace(table, virtual_stages=encoded)
