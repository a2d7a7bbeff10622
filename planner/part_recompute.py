"""Recomputation of the first n layers of every stage, as an axis of the search.

A table of plans holds those that recompute all of their layers, or none. Between them, the first n
of each stage need less memory than none and less time than all. With T the seconds of a step and M
the bytes of its peak, N the layers of the largest stage and s those of the smallest, all of a kind:

    T(n) <= T(n + 1)                   a recomputed layer makes no pass shorter
    T(n) >= (2/3 + n / 3N) T(all)      its forward pass is at most a third of what it then takes
    M(n) >= (1 - n / s) M(0)           no part of a peak falls by more than the share of its layers

so that most plans that recompute are passed over without a price: with the fewest layers that may
fit they already take longer than the best. Every n of those that are left is priced, and of each
plan the fewest layers that fit are what counts. Not looked at: plans that do not fit with all of
their layers recomputed, and those whose activations leave the accelerator, where less is kept but
more is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.estimate import Setting
from cost_models.legality import legality_codes, question_of
from cost_models.plan import RECOMPUTE, Plan, PlanTable
from cost_models.price_table import table_steps
from planner.finalists import Broken, simulate

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
FULL: Final = RECOMPUTE.index("full")
NONE: Final = RECOMPUTE.index("none")
MOST_SAVED: Final = 1.0 / 3.0  # of a step, by recomputing nothing
ROUNDING: Final = 1e-9
AT_ONCE: Final = 2_000  # plans whose numbers of layers are priced together
PINNED: Final = ("recompute", "recompute_layers", "recompute_every")


def varies_layers(setting: Setting, fixed: Mapping[str, Any]) -> bool:
    """Whether numbers of recomputed layers are looked for: nothing of it is pinned."""
    given = setting.layer_ranges is not None or setting.stage_recompute_layers is not None
    return not given and not any(name in fixed for name in PINNED)


def peaks_without(table: PlanTable, rows: NDArray[np.intp], peak: Floats, apart: int) -> Floats:
    """Return the peaks of the same plans with nothing recomputed; nan where there is none.

    ``apart``: how many rows ahead such a plan stands where all of a grid are there.
    """
    found = np.full(len(rows), np.nan)
    ahead = rows - apart
    whole, none = table.rows(rows).plain(), table.rows(np.maximum(ahead, 0)).plain()
    same = (ahead >= 0) & (whole.recompute == FULL) & (none.recompute == NONE)
    for name in (f.name for f in fields(PlanTable) if f.name != "recompute"):
        same &= getattr(whole, name) == getattr(none, name)
    found[same] = peak[ahead[same]]
    return found


@dataclass(frozen=True, slots=True)
class Less:
    """Plans that recompute some layers of every stage, and what was looked at."""

    plans: tuple[tuple[float, float, Plan], ...]  # seconds, bytes, plan; the best first
    priced: int
    simulated: int


@dataclass(frozen=True, slots=True)
class Families:
    """Plans that fit with all layers recomputed, and the least that fewer can come to."""

    table: PlanTable
    fewest: Whole  # layers of each stage that may fit
    most: Whole  # that are not all
    floor: Floats  # seconds

    @classmethod
    def of(cls, setting: Setting, table: PlanTable, step: Floats, need: Floats) -> Families:
        """Bound them; ``need``: (peak without recomputation - budget) / that peak; nan: unknown."""
        layers = setting.model.num_layers
        stages = table.pipeline_parallel * table.virtual_stages
        smallest, largest = layers // stages, -(-layers // stages)
        alike = len(setting.model.kinds) == 1
        share = np.where(np.isnan(need) | (not alike), 0.0, need)
        fewest = np.maximum(1, np.ceil(smallest * share - ROUNDING)).astype(np.int64)
        recomputed = fewest / largest if alike else np.zeros(len(table))
        floor = step * (1.0 - MOST_SAVED * (1.0 - recomputed)) * (1.0 - ROUNDING)
        return cls(table, fewest, smallest - (smallest == largest), floor)

    def rows(self, index: Any) -> Families:
        """Return some of them."""
        return Families(
            self.table.rows(index), self.fewest[index], self.most[index], self.floor[index]
        )

    def with_every_number(self) -> tuple[NDArray[np.intp], PlanTable]:
        """Return every plan with every number of layers, and which family it is of."""
        counts = np.maximum(0, self.most - self.fewest + 1)
        family = np.repeat(np.arange(len(self.table)), counts)
        number = np.arange(len(family)) - np.repeat(np.cumsum(counts) - counts, counts)
        return family, replace(
            self.table.rows(family), recompute_layers=self.fewest[family] + number
        )


def recompute_less(
    setting: Setting,
    families: Families,
    best: list[float],
    *,
    top: int,
    fits: Callable[[PlanTable], tuple[NDArray[np.bool_], Floats]],
    may: Callable[[PlanTable, Floats], NDArray[np.bool_]],
    broken: Callable[[PlanTable, Floats], Broken],
) -> Less:
    """Return the plans that recompute fewer layers and are among the ``top``.

    ``best``: simulated steps of the best plans so far. ``fits``: which plans fit, and their peaks;
    ``may``: which are as fast as is required, by the least that they take. ``broken``: of a table
    and its peaks, what its simulated steps break (``finalists``).
    """
    found: list[tuple[float, float, Plan]] = []
    priced = simulated = 0
    left = families.rows((families.most >= families.fewest).nonzero()[0])
    left = left.rows(may(left.table, left.floor))
    left = left.rows(np.argsort(left.floor, kind="stable"))
    while len(left.table):
        known = sorted([*best, *(seconds for seconds, *_ in found)])
        longest = known[top - 1] if len(known) >= top else np.inf
        some, left = left.rows(slice(0, AT_ONCE)), left.rows(slice(AT_ONCE, None))
        some = some.rows((some.floor < longest).nonzero()[0])
        if len(some.table) == 0:
            break
        least = table_steps(setting, replace(some.table, recompute_layers=some.fewest))
        priced += len(least)
        some = some.rows((least < longest) & may(some.table, least))
        family, table = some.with_every_number()
        step = table_steps(setting, table)
        priced += len(table)
        index = ((step < longest) & may(table, step)).nonzero()[0]
        fitting, peak = fits(table.rows(index))
        index, peak = index[fitting], peak[fitting]
        legal = legality_codes(question_of(setting), table.rows(index)) == 0
        index, peak = index[legal], peak[legal]
        _, first = np.unique(family[index], return_index=True)  # the fewest layers
        index, peak = index[first], peak[first]
        table, step = table.rows(index), step[index]
        order = np.lexsort((peak, step))
        ranked = simulate(setting, table, order, step, peak, top=top, broken=broken(table, peak))
        simulated += ranked.simulated
        found += ranked.plans(table, peak)
    found.sort(key=lambda one: one[:2])
    return Less(tuple(found[:top]), priced, simulated)
