"""Sensitivity of the best plan to the figures of the machine and to the batch.

Each figure is scaled from LOWEST to HIGHEST. Whether a plan fits does not depend on rates, and its
step does not depend on the memory size, so every legal plan is priced once. Under a scaled rate
only plans that can win are priced again: the lower bound of a step (``step_times``) does not grow
with a rate, so a plan that is slower at a faster scale than the chosen plan at this scale cannot
win here. The first change on a grid of scales is refined by bisection to CLOSE. All scales of a
grid, and all scales that a bisection may need, are priced at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from cost_models.plan.plan import Plan
from cost_models.pricing.cluster_variants import steps_on_clusters
from cost_models.scenario import Scenario
from hardware_profiles.progress import stages, tracked
from hardware_profiles.record import Record, to_json
from planner.explanation.choices import Choices
from planner.explanation.machine_figures import ScaledFigure, figures
from planner.search.priced_candidates import PricedCandidates, with_batch
from planner.search.search import search
from planner.text.plan_changes import same_layout

LOWEST, HIGHEST = 0.5, 4.0
PRICING: Final = "pricing plans on faster and slower machines"
SIZES: Final = (1.0, 4.0, 1.0)  # seconds, relative: memory, rates, bisections
GRID: Final = 6  # scales from 1 to either end
CLOSE: Final = 0.01  # relative width of the interval that contains a change
MORE: Final = 1.1  # scale for the dependence of the step on a figure
FASTER: Final = 1e-9  # relative; smaller differences are rounding errors
ROUNDING: Final = 1e-12  # relative, of bounds
BATCHES: Final = (0.5, 2.0, 4.0)
Floats = NDArray[np.float64]


class Crossover(Record, frozen=True):
    """Scale of a figure at which another plan becomes the best one."""

    scale: float  # nearest to 1 with another best plan
    value: float
    plan: Plan
    end: float  # last scale of the search
    at_end: Plan = msgspec.field(name="plan_at_end")  # best plan there
    keeping_costs: float  # relative slowdown of the chosen plan there; inf: it does not fit

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        costs = self.keeping_costs if np.isfinite(self.keeping_costs) else None
        return {**super().to_dict(), "keeping_costs": costs}


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Effect of one figure on the best plan, and on the step of the chosen plan."""

    name: str
    words: str
    unit: str
    value: float
    less: Crossover | None  # None: nothing changes down to LOWEST
    more: Crossover | None  # None: nothing changes up to HIGHEST
    step_change: float  # relative change of the chosen plan's step with MORE of the figure

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "figure": self.name,
            "words": self.words,
            "unit": self.unit,
            "value": self.value,
            "less": to_json(self.less),
            "more": to_json(self.more),
            "searched": [LOWEST, HIGHEST],
            "step_change_with_10_percent_more": self.step_change,
        }


class BatchChoice(Record, frozen=True):
    """Best plan with another global batch; None if nothing fits."""

    global_batch_size: int
    plan: Plan | None
    same: bool


def sensitivities(choices: Choices) -> tuple[Sensitivity, ...]:
    """Return the sensitivity to every figure of the cluster."""
    with stages(*SIZES, joint=True) as begin:
        begin(PRICING)
        return _sensitivities(choices, begin)


def _sensitivities(choices: Choices, begin: Callable[[str], None]) -> tuple[Sensitivity, ...]:
    memory, *rates = figures(choices.scenario)
    while len(rows := _open_rows(choices)):
        choices.settle(rows)
    less, more = (_memory_change(choices, memory, end) for end in (LOWEST, HIGHEST))
    found = [Sensitivity(memory.name, memory.words, memory.unit, memory.value, less, more, 0.0)]
    if not rates:
        return tuple(found)
    begin(PRICING)
    race = Race.of(choices, rates)
    begin(PRICING)
    changes = race.changes()
    before = choices.step[choices.chosen]
    for figure in rates:
        less, more = (changes[figure.name, end] for end in (LOWEST, HIGHEST))
        change = float(race.own[figure.name, MORE] / before - 1.0)
        found.append(
            Sensitivity(figure.name, figure.words, figure.unit, figure.value, less, more, change)
        )
    return tuple(found)


def _change(
    choices: Choices,
    figure: ScaledFigure,
    begin: tuple[float, int],
    end: tuple[float, int],
    keeping: float,
) -> Crossover:
    """Return a change; ``begin``, ``end``: a scale, and the row of the best plan there."""
    plans = choices.table
    scale, first = begin
    last_scale, last = end
    return Crossover(
        scale, scale * figure.value, plans.plan(first), last_scale, plans.plan(last), keeping
    )


# --- memory: no plan is priced again ---


def _memory_change(choices: Choices, figure: ScaledFigure, end: float) -> Crossover | None:
    step, needed, chosen = choices.step, choices.needed, choices.chosen
    if end < 1.0:
        edge = float(needed[chosen])
        if edge <= end:
            return None
        # just below this scale the chosen plan no longer fits
        rows = np.flatnonzero(choices.on_host & (needed < edge))
        if not len(rows):
            return None
        first = int(rows[np.argmin(step[rows])])
        scale = edge
    else:
        faster = choices.on_host & (step < step[chosen] * (1.0 - FASTER))
        rows = np.flatnonzero(faster & (needed > 1.0) & (needed <= end))
        if not len(rows):
            return None
        first = int(rows[np.argmin(needed[rows])])
        scale = float(needed[first])
    at_end = np.flatnonzero(choices.on_host & (needed <= end))
    last = int(at_end[np.argmin(step[at_end])]) if len(at_end) else first
    keeping = float(step[chosen] / step[last] - 1.0) if end > 1.0 else np.inf
    return _change(choices, figure, (scale, first), (end, last), keeping)


def _open_rows(choices: Choices) -> Positions:
    """Return plans that are not settled and may be the best one with another memory size."""
    edge, mine = choices.needed[choices.chosen], choices.step[choices.chosen]
    edge = np.nextafter(edge, 0.0)  # less memory than the chosen plan needs
    settled, rows = choices.settled, [np.arange(0)]
    for below in (edge, LOWEST, HIGHEST):  # a share of the budget
        able = choices.on_host & (choices.needed <= below)
        rows.append(choices.open_below(choices.fastest(able), able))
    faster = choices.on_host & (choices.step < mine * (1.0 - FASTER))
    known = faster & settled & (choices.needed > 1.0)
    first = min(HIGHEST, float(np.min(choices.needed, where=known, initial=np.inf)))
    rows.append(np.flatnonzero(faster & ~settled & (choices.needed <= first)))
    return np.unique(np.concatenate(rows))


# --- rates: plans that can win are priced again ---

Scale = tuple[str, float]  # name of a figure, and its factor
Positions = NDArray[np.intp]
GRIDS: Final[dict[float, list[float]]] = {
    end: np.geomspace(1.0, end, GRID + 1)[1:].tolist() for end in (LOWEST, HIGHEST)
}


@dataclass(slots=True)
class Race:
    """Fastest plans that fit under scaled rates.

    The plans that can win are priced under many scales at once (``steps_on_clusters``).
    """

    choices: Choices
    rates: dict[str, ScaledFigure]
    others: Positions  # rows that may fit, and parents of these; without the chosen one
    able: NDArray[np.bool_]  # of ``others``: fits, or may fit
    own: dict[Scale, float] = field(default_factory=dict)  # seconds of the chosen plan
    # row of the best plan, and the relative slowdown of the chosen one
    winners: dict[Scale, tuple[int, float]] = field(default_factory=dict)
    # of each figure: scales, and bounds of the steps of ``others`` there (0: unknown)
    bounds: dict[str, list[tuple[float, Floats]]] = field(default_factory=dict)

    @classmethod
    def of(cls, choices: Choices, rates: Sequence[ScaledFigure]) -> Race:
        """Price all plans at the fastest scales, and find the best ones on the grids."""
        fits = choices.fits.copy()
        parents = np.unique(choices.parent[fits & ~choices.settled])
        fits[choices.chosen] = False
        others = np.union1d(np.flatnonzero(fits), parents[parents != choices.chosen])
        race = cls(choices, {rate.name: rate for rate in rates}, others, fits[others])
        none = np.arange(0)
        race.bounds = {name: [(1.0, choices.least[others].copy())] for name in race.rates}
        if not choices.fits[choices.chosen]:
            race._price({(name, MORE): none for name in race.rates})
            return race
        scales = [(name, s) for name in race.rates for grid in GRIDS.values() for s in grid]
        settled = np.flatnonzero(choices.settled[others])
        ends = (HIGHEST, LOWEST) if len(settled) < len(others) else (HIGHEST,)
        grid = {scale: settled if scale[1] in ends else none for scale in scales}
        race._price({**grid, **{(name, MORE): none for name in race.rates}})
        race._find(scales)
        return race

    def changes(self) -> dict[Scale, Crossover | None]:
        """Return the first change of the best plan towards both ends, for every figure."""
        found: dict[Scale, Crossover | None] = {}
        intervals: dict[Scale, tuple[float, float]] = {}  # without and with a change
        for name in self.rates:
            for end, grid in GRIDS.items():
                changed = [s for s in grid if self._changes((name, s))]
                found[name, end] = None
                if changed:
                    number = grid.index(changed[0])
                    intervals[name, end] = grid[number - 1] if number else 1.0, changed[0]
        middles = {
            (name, scale)
            for (name, _), interval in intervals.items()
            for scale in _middles(*interval)
        }
        if middles:
            self._price({scale: np.arange(0) for scale in sorted(middles)})
            self._find(sorted(middles))
        for (name, end), (before, scale) in intervals.items():
            while abs(np.log(scale / before)) > CLOSE:
                middle = float(np.sqrt(scale * before))
                before, scale = (
                    (before, middle) if self._changes((name, middle)) else (middle, scale)
                )
            first, (last, keeping) = self.winners[name, scale][0], self.winners[name, end]
            found[name, end] = _change(
                self.choices, self.rates[name], (scale, first), (end, last), keeping
            )
        return found

    def _changes(self, scale: Scale) -> bool:
        return scale in self.winners and self.winners[scale][0] != self.choices.chosen

    def _find(self, scales: Sequence[Scale]) -> None:
        """Find the best plans at scales at which the chosen plan is priced."""
        able = self._able(scales)
        rows = self.others[np.unique(np.concatenate(list(able.values())))]
        if not self.choices.settled[rows].all():
            self.choices.settle(rows)
            self.able &= self.choices.fits[self.others]
            for bounds in self.bounds.values():
                bounds.append((1.0, self.choices.least[self.others].copy()))
            able = self._able(scales)
        steps = self._price(able)
        for scale, positions in able.items():
            chosen, mine = self.choices.chosen, self.own[scale]
            self.winners[scale] = chosen, 0.0
            if len(positions):
                best = int(np.argmin(steps[scale]))
                gain = float(mine / steps[scale][best] - 1.0)
                if gain > FASTER:
                    self.winners[scale] = int(self.others[positions[best]]), gain

    def _able(self, scales: Sequence[Scale]) -> dict[Scale, Positions]:
        """Return the positions of others that may be faster than the chosen plan at scales."""
        found = {}
        for scale in scales:
            faster = self._bound(*scale) < self.own[scale]
            found[scale] = np.flatnonzero(faster & self.able)
        return found

    def _bound(self, name: str, scale: float) -> Floats:
        """Return lower bounds of the steps of all others.

        A bound at a faster scale is one here, and so is a bound at a slower scale divided by the
        ratio of both scales: no part of a step becomes shorter by more.
        """
        known = [b / max(1.0, scale / s) for s, b in self.bounds[name]]
        found: Floats = np.max(known, axis=0)
        choices = self.choices
        left = np.flatnonzero(~choices.settled[self.others])
        if len(left):
            rows = self.others[left]
            every = np.full(len(choices.table), 0.0)
            every[self.others] = found
            bounds = choices.factor[rows] * every[choices.parent[rows]]
            found[left] = np.maximum(found[left], bounds)
        return found

    def _price(self, wanted: Mapping[Scale, Positions]) -> dict[Scale, Floats]:
        """Return the steps of others under each scale; keep their bounds, and the chosen steps.

        Only settled plans are priced.
        """
        chosen, scales = self.choices.chosen, list(wanted)
        rows = [np.concatenate([[chosen], self.others[wanted[scale]]]) for scale in scales]
        seconds, least = steps_on_clusters(
            self.choices.scenario,
            self.choices.table.rows(np.concatenate(rows)),
            [self.rates[name].scaled(scale) for name, scale in scales],
            np.repeat(np.arange(len(rows)), [len(each) for each in rows]),
        )
        found, end = {}, 0
        for (name, scale), each in zip(scales, rows, strict=True):
            start, end = end, end + len(each)
            self.own[name, scale] = float(seconds[start])
            found[name, scale] = seconds[start + 1 : end]
            if len(each) > 1:
                bound = np.zeros(len(self.others))
                bound[wanted[name, scale]] = least[start + 1 : end] * (1.0 - ROUNDING)
                self.bounds[name].append((scale, bound))
        return found


def _middles(before: float, scale: float) -> list[float]:
    """Return all scales that a bisection of an interval may price."""
    if abs(np.log(scale / before)) <= CLOSE:
        return []
    middle = float(np.sqrt(scale * before))
    return [middle, *_middles(before, middle), *_middles(middle, scale)]


# --- the batch: a new search ---


def batch_sizes(scenario: Scenario) -> list[int]:
    """Return half, double and four times the batch, where these are whole."""
    size = scenario.workload.global_batch_size
    return [
        int(size * factor) for factor in BATCHES if size * factor >= 1 and size * factor % 1 == 0
    ]


def other_batches(
    scenario: Scenario,
    chosen: Plan,
    fixed: Mapping[str, Any] | None = None,
    priced: Sequence[PricedCandidates] | None = None,
) -> tuple[BatchChoice, ...]:
    """Search again with the other ``batch_sizes``.

    ``priced``: the candidates of each size, if they are priced already.
    """
    sizes = batch_sizes(scenario)
    if priced is None:
        priced = PricedCandidates.of_batches(scenario, sizes, fixed)
    found = []
    for batch, candidates in tracked(list(zip(sizes, priced, strict=True))):
        plans = search(with_batch(scenario, batch), fixed, top=1, priced=candidates).plans
        best = plans[0] if plans else None
        found.append(BatchChoice(batch, best, best is not None and same_layout(chosen, best)))
    return tuple(found)
