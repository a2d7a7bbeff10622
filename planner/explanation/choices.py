"""All legal plans of a scenario with their prices, from which sensitivities choose.

Plans that recompute a number of layers of every stage are many, and few can be the best of any
question. They may enter with bounds instead of prices (``partial_recompute``): with T, M of the
same plan with all N layers of a stage recomputed, and T(0), M(0) with none,

    T(n) >= T(0)    or    T(n) >= (2/3) T    where T(0) is not known
    M(n) >= n / N M    and, with layers of one kind,    M(n) >= (1 - n / s) M(0)

``Choices.settle`` prices some of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import SEARCHED_RECOMPUTE, Plan, PlanTable
from cost_models.pricing.table import table_step_bounds
from cost_models.scenario import Scenario
from planner.assessment.reach import load_of_peak
from planner.search.feasible import device_and_host
from planner.search.priced_candidates import PricedCandidates
from planner.search.sources.exhaustive_recompute import every_count
from planner.search.sources.partial_recompute import (
    FULL,
    MOST_SAVED,
    ROUNDING,
    peaks_without,
    stage_sizes,
    varies_layers,
)
from planner.search.space import enumerate_plans

MOST_NUMBERED: Final = 100_000  # plans with numbers of recomputed layers
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Choices:
    """All legal plans of a scenario, priced; ``chosen``: row of the chosen plan.

    Of plans that are not ``settled``, the columns are lower bounds.
    """

    scenario: Scenario
    table: PlanTable
    chosen: int
    step: Floats
    least: Floats  # lower bound of a step in seconds, also on faster machines
    needed: Floats  # upper end of the peak as a share of the budget; fits up to 1
    on_host: Flags = field(repr=False)  # fits into the host memory of a node
    settled: Flags = field(repr=False)
    # of plans that are not settled: a row with a step that, times the factor, is no longer
    parent: Rows = field(repr=False)
    factor: Floats = field(repr=False)

    @property
    def fits(self) -> Flags:
        """Plans that fit with their whole interval."""
        fitting: Flags = (self.needed <= 1.0) & self.on_host
        return fitting

    def settle(self, rows: Rows) -> None:
        """Price plans of which only bounds are known."""
        rows = rows[~self.settled[rows]]
        if len(rows):
            prices = _prices(self.scenario, self.table.rows(rows))
            self.step[rows], self.least[rows], self.needed[rows], self.on_host[rows] = prices
            self.settled[rows] = True

    def open_below(self, seconds: float, rows: Flags) -> Rows:
        """Return which of some rows are not settled and may have a step up to ``seconds``."""
        return np.flatnonzero(rows & ~self.settled & (self.step <= seconds))

    def fastest(self, rows: Flags) -> float:
        """Return the step of the fastest settled plan among some rows; infinite without any."""
        return float(np.min(self.step, where=rows & self.settled, initial=np.inf))


def priced_choices(
    scenario: Scenario,
    chosen: Plan,
    fixed: Mapping[str, Any] | None = None,
    *,
    offloads: Sequence[str] = ("none",),
    priced: PricedCandidates | None = None,
    bounded: bool = False,
) -> Choices:
    """Enumerate and price plans as ``search`` does; the chosen plan is the first row.

    If another plan is the best in closed form, that plan is the chosen one. ``priced``: the
    candidates of this scenario, if they are priced already. ``bounded``: plans with a number of
    recomputed layers enter with bounds (without offloaded activations).
    """
    if priced is None:
        priced = PricedCandidates.of(scenario, fixed, offloads=offloads)
    assert not bounded or tuple(offloads) == ("none",)
    legal = priced.candidates.legal.plain()
    first = PlanTable.from_plans([chosen])
    found = _with_prices(scenario, first, _prices(scenario, first))
    needed = load_of_peak(scenario, priced.peak)
    columns = priced.step, priced.least, needed, priced.host == 0
    found = _extended(found, _with_prices(scenario, legal, columns))
    if varies_layers(scenario, fixed or {}):
        more = _numbered(found, chosen, fixed or {}, offloads)
        found = _extended(found, more.rows(legality_codes(scenario, more.table) == 0))
        if not bounded:
            found.settle(np.flatnonzero(~found.settled))
    # the search simulates its finalists: in closed form another plan may be slightly faster
    if not found.fits[0]:
        return found
    while len(rows := found.open_below(found.fastest(found.fits), found.fits)):
        found.settle(rows)
    fitting = np.flatnonzero(found.fits & found.settled)
    best = int(fitting[np.argmin(found.step[fitting])])
    return found if found.step[best] >= found.step[0] else replace(found, chosen=best)


Prices = tuple[Floats, Floats, Floats, Flags]  # step, least, needed, on_host


def _prices(scenario: Scenario, table: PlanTable) -> Prices:
    step, least = table_step_bounds(scenario, table)
    peak, _, host = device_and_host(scenario, table)
    return step, least, load_of_peak(scenario, peak), host == 0


def _with_prices(scenario: Scenario, table: PlanTable, prices: Prices) -> Choices:
    known = np.ones(len(table), dtype=bool)
    return Choices(
        scenario, table, 0, *prices, known, np.zeros(len(table), dtype=np.intp), np.ones(len(table))
    )


COLUMNS: Final = ("step", "least", "needed", "on_host", "settled", "parent", "factor")


@dataclass(frozen=True, slots=True)
class _Part:
    """Plans to add to choices."""

    table: PlanTable
    columns: Mapping[str, NDArray[Any]]

    def rows(self, index: Any) -> _Part:
        return _Part(self.table.rows(index), {n: c[index] for n, c in self.columns.items()})


def _extended(choices: Choices, more: Choices | _Part) -> Choices:
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        added = more.columns[name] if isinstance(more, _Part) else getattr(more, name)
        columns[name] = np.concatenate([getattr(choices, name), added])
    names = PlanTable.__slots__
    tables = choices.table, more.table
    joint = {name: np.concatenate([getattr(each, name) for each in tables]) for name in names}
    return replace(choices, table=PlanTable(**joint), **columns)


def _numbered(
    choices: Choices, chosen: Plan, fixed: Mapping[str, Any], offloads: Sequence[str]
) -> _Part:
    """Return plans that recompute 1, 2, … layers, with bounds.

    If they are more than MOST_NUMBERED, legal or not, only those of the chosen plan.
    """
    scenario, table = choices.scenario, choices.table
    gpus = scenario.cluster.num_gpus
    every = enumerate_plans(scenario.model, scenario.workload, gpus, fixed, offloads=offloads)
    smallest, _ = stage_sizes(scenario, every.rows(every.recompute == FULL))
    if int(np.sum(smallest)) > MOST_NUMBERED:
        own = replace(chosen, recompute="full", recompute_layers=0, recompute_every=0)
        few = PlanTable.from_plans([own])
        prices = _with_prices(scenario, few, _prices(scenario, few))
        return _with_numbers(prices, np.zeros(1, dtype=np.intp), np.full(1, np.nan), settled=True)
    whole = np.flatnonzero(table.recompute == FULL)
    whole = whole[whole > 0]  # the first row is the chosen plan
    offset = len(offloads) * SEARCHED_RECOMPUTE.index("full")
    none = peaks_without(table, np.arange(len(table), dtype=float), offset)
    return _with_numbers(choices, whole, none[whole], settled=False)


def _with_numbers(choices: Choices, whole: Rows, none: Floats, *, settled: bool) -> _Part:
    """Return plans with each number of layers of the rows ``whole``.

    ``none``: the rows of the same plans without recomputation (nan: unknown); ``settled``: with
    prices at once.
    """
    scenario = choices.scenario
    smallest, largest = stage_sizes(scenario, choices.table.rows(whole))
    index, number = every_count(smallest - (smallest == largest))
    table = replace(choices.table.rows(whole[index]), recompute_layers=number)
    if settled:
        columns = dict(zip(COLUMNS, _prices(scenario, table), strict=False))
        known = np.ones(len(table), dtype=bool)
        columns |= {"settled": known, "parent": 0 * number, "factor": 1.0 * known}
        return _Part(table, columns)
    known = ~np.isnan(none[index])
    parent = np.where(known, np.nan_to_num(none[index]), whole[index]).astype(np.intp)
    factor = np.where(known, 1.0, 1.0 - MOST_SAVED) * (1.0 - ROUNDING)
    needed = number / largest[index] * choices.needed[whole[index]]
    if len(scenario.model.kinds) == 1:
        without = np.where(known, choices.needed[parent], 0.0)
        needed = np.maximum(needed, (1.0 - number / smallest[index]) * without)
    columns = {
        "step": factor * choices.step[parent],
        "least": factor * choices.least[parent],
        "needed": needed * (1.0 - ROUNDING),
        "on_host": np.ones(len(table), dtype=bool),
        "settled": np.zeros(len(table), dtype=bool),
        "parent": parent,
        "factor": factor,
    }
    return _Part(table, columns)
