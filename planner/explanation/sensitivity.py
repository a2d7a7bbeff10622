"""Sensitivity of the best plan to the figures of the machine and to the batch.

Each figure is scaled from LOWEST to HIGHEST. Whether a plan fits does not depend on rates, and its
step does not depend on the memory size, so every legal plan is priced once. Under a scaled rate
only plans that can win are priced again: the lower bound of a step (``step_times``) does not grow
with a rate, so a plan that is slower at a faster scale than the chosen plan at this scale cannot
win here. The first change on a grid of scales is refined by bisection to CLOSE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.legality.rules import legality_codes
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.step_bounds import step_times
from cost_models.pricing.table import table_steps
from cost_models.scenario import Scenario
from cost_models.uncertainty import memory_spread
from planner.assessment.verdict import budget_bytes
from planner.explanation.glossary import same_layout
from planner.explanation.machine_figures import MEMORY, ScaledFigure, figures
from planner.search.exhaustive_recompute import every_count
from planner.search.feasible import peaks_and_hosts
from planner.search.partial_recompute import FULL, stage_sizes, varies_layers
from planner.search.search import search
from planner.search.space import enumerate_plans

LOWEST, HIGHEST = 0.5, 4.0
GRID: Final = 6  # scales from 1 to either end
CLOSE: Final = 0.01  # relative width of the interval that contains a change
MORE: Final = 1.1  # scale for the dependence of the step on a figure
FASTER: Final = 1e-9  # relative; smaller differences are rounding errors
BATCHES: Final = (0.5, 2.0, 4.0)
CHUNK: Final = 65_536
MOST_NUMBERED: Final = 100_000  # plans with numbers of recomputed layers
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Crossover:
    """Scale of a figure at which another plan becomes the best one."""

    scale: float  # nearest to 1 with another best plan
    value: float
    plan: Plan
    end: float  # last scale of the search
    at_end: Plan  # best plan there
    keeping_costs: float  # relative slowdown of the chosen plan there; inf: it does not fit

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "scale": self.scale,
            "value": self.value,
            "plan": self.plan.to_dict(),
            "end": self.end,
            "plan_at_end": self.at_end.to_dict(),
            "keeping_costs": self.keeping_costs if np.isfinite(self.keeping_costs) else None,
        }


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
            "less": None if self.less is None else self.less.to_dict(),
            "more": None if self.more is None else self.more.to_dict(),
            "searched": [LOWEST, HIGHEST],
            "step_change_with_10_percent_more": self.step_change,
        }


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """Best plan with another global batch; None if nothing fits."""

    global_batch_size: int
    plan: Plan | None
    same: bool

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        plan = None if self.plan is None else self.plan.to_dict()
        return {"global_batch_size": self.global_batch_size, "plan": plan, "same": self.same}


@dataclass(frozen=True, slots=True)
class Choices:
    """All legal plans of a scenario, priced; ``chosen``: row of the chosen plan."""

    scenario: Scenario
    table: PlanTable
    chosen: int
    step: Floats
    least: Floats  # lower bound of a step in seconds, also on faster machines
    needed: Floats  # upper end of the peak as a share of the budget; fits up to 1
    on_host: NDArray[np.bool_] = field(repr=False)  # fits into the host memory of a node

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Plans that fit with their whole interval."""
        fitting: NDArray[np.bool_] = (self.needed <= 1.0) & self.on_host
        return fitting


def priced_choices(
    scenario: Scenario,
    chosen: Plan,
    fixed: Mapping[str, Any] | None = None,
    *,
    offloads: Sequence[str] = ("none",),
) -> Choices:
    """Enumerate and price plans as ``search`` does; the chosen plan is the first row.

    If another plan is the best in closed form, that plan is the chosen one.
    """
    cluster = scenario.cluster
    table = enumerate_plans(
        scenario.model,
        scenario.workload,
        cluster.num_gpus,
        fixed or {},
        offloads=offloads,
    )
    if varies_layers(scenario, fixed or {}):
        table = _joined(table, _numbered(scenario, table, chosen))
    legal = table.rows(legality_codes(scenario, table) == 0)
    joined = _joined(PlanTable.from_plans([chosen]), legal)
    step, (peak, host) = table_steps(scenario, joined), peaks_and_hosts(scenario, joined)
    upper = 1.0 + memory_spread(scenario.software.name).above
    found = Choices(
        scenario,
        joined,
        0,
        step=step,
        least=step.copy(),
        needed=peak * upper / budget_bytes(cluster),
        on_host=host == 0,
    )
    splits = np.flatnonzero(found.fits & np.isin(joined.pipeline_schedule, SPLIT_CODES))
    if len(splits):
        found.least[splits] = _in_chunks(scenario, joined.rows(splits))[1]
    # the search simulates its finalists: in closed form another plan may be slightly faster
    fitting = np.flatnonzero(found.fits)
    if not len(fitting) or not found.fits[0]:
        return found
    best = int(fitting[np.argmin(found.step[fitting])])
    return found if found.step[best] >= found.step[0] else replace(found, chosen=best)


def _numbered(scenario: Scenario, table: PlanTable, chosen: Plan) -> PlanTable:
    """Return plans that recompute 1, 2, … layers; above MOST_NUMBERED of the chosen plan only."""
    whole = table.rows(table.recompute == FULL)
    smallest, largest = stage_sizes(scenario, whole)
    if int(np.sum(smallest)) > MOST_NUMBERED:
        own = replace(chosen, recompute="full", recompute_layers=0, recompute_every=0)
        whole = PlanTable.from_plans([own])
        smallest, largest = stage_sizes(scenario, whole)
    rows, number = every_count(smallest - (smallest == largest))
    return replace(whole.rows(rows), recompute_layers=number)


def _joined(first: PlanTable, second: PlanTable) -> PlanTable:
    return PlanTable(
        **{
            name: np.concatenate([getattr(first, name), getattr(second, name)])
            for name in PlanTable.__slots__
        }
    )


def sensitivities(choices: Choices) -> tuple[Sensitivity, ...]:
    """Return the sensitivity to every figure of the cluster."""
    return tuple(_sensitivity(choices, figure) for figure in figures(choices.scenario))


def _sensitivity(choices: Choices, figure: ScaledFigure) -> Sensitivity:
    find = _memory_change if figure.name == MEMORY else _rate_change
    alone = choices.table.rows([choices.chosen])
    more = _steps(choices, figure, MORE, alone)[0][0] if figure.name != MEMORY else None
    before = choices.step[choices.chosen]
    return Sensitivity(
        figure.name,
        figure.words,
        figure.unit,
        figure.value,
        less=find(choices, figure, LOWEST),
        more=find(choices, figure, HIGHEST),
        step_change=0.0 if more is None else float(more / before - 1.0),
    )


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


# --- rates: plans that can win are priced again ---


def _steps(
    choices: Choices, figure: ScaledFigure, scale: float, table: PlanTable
) -> tuple[Floats, Floats]:
    return _in_chunks(replace(choices.scenario, cluster=figure.scaled(scale)), table)


def _in_chunks(scenario: Scenario, table: PlanTable) -> tuple[Floats, Floats]:
    parts = [
        step_times(scenario, table.rows(slice(start, start + CHUNK)))
        for start in range(0, len(table), CHUNK)
    ]
    seconds, least = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return seconds, least


class _Race:
    """Fastest plan that fits under a scaled rate.

    ``bounds``: lower bounds of the steps at all remaining scales; a plan whose bound exceeds the
    step of the chosen plan need not be priced.
    """

    def __init__(self, choices: Choices, figure: ScaledFigure, fastest: float) -> None:
        self.choices, self.figure = choices, figure
        others = np.flatnonzero(choices.fits)
        self.rows = others[others != choices.chosen]
        self.bounds = choices.least[self.rows]
        if fastest > 1.0:
            self.bounds = self._steps(fastest, self.rows)[1]

    def _steps(self, scale: float, rows: NDArray[np.int64]) -> tuple[Floats, Floats]:
        return _steps(self.choices, self.figure, scale, self.choices.table.rows(rows))

    def winner(self, scale: float, *, keep: bool = False) -> tuple[int, float]:
        """Return the row of the best plan, and the relative slowdown of the chosen one.

        ``keep``: all later scales are slower, so the bounds found now hold there, too.
        """
        chosen = self.choices.chosen
        mine = float(self._steps(scale, np.array([chosen]))[0][0])
        able = np.flatnonzero(self.bounds < mine)
        if not len(able):
            return chosen, 0.0
        steps, least = self._steps(scale, self.rows[able])
        if keep:
            self.bounds[able] = least
        best = int(np.argmin(steps))
        gain = float(mine / steps[best] - 1.0)
        return (int(self.rows[able[best]]), gain) if gain > FASTER else (chosen, 0.0)


def _rate_change(choices: Choices, figure: ScaledFigure, end: float) -> Crossover | None:
    if not choices.fits[choices.chosen]:
        return None
    race = _Race(choices, figure, max(1.0, end))
    scales = np.geomspace(1.0, end, GRID + 1)[1:].tolist()
    faster_first = sorted(scales, reverse=True)
    winners = {scale: race.winner(scale, keep=True) for scale in faster_first}
    changed = [scale for scale in scales if winners[scale][0] != choices.chosen]
    if not changed:
        return None
    scale = changed[0]
    before = scales[scales.index(scale) - 1] if scale != scales[0] else 1.0
    race = _Race(choices, figure, max(1.0, scale))  # the bounds before are of slower scales
    while abs(np.log(scale / before)) > CLOSE:
        middle = float(np.sqrt(scale * before))
        still = race.winner(middle)[0] == choices.chosen
        before, scale = (middle, scale) if still else (before, middle)
    first = race.winner(scale)[0]
    last, keeping = winners[end]
    return _change(choices, figure, (scale, first), (end, last), keeping)


# --- the batch: a new search ---


def other_batches(
    scenario: Scenario, chosen: Plan, fixed: Mapping[str, Any] | None = None
) -> tuple[BatchChoice, ...]:
    """Search again with half, double and four times the batch."""
    found = []
    for factor in BATCHES:
        batch = int(scenario.workload.global_batch_size * factor)
        if batch < 1 or batch != scenario.workload.global_batch_size * factor:
            continue
        workload = replace(scenario.workload, global_batch_size=batch)
        plans = search(replace(scenario, workload=workload), fixed, top=1).plans
        best = plans[0] if plans else None
        found.append(BatchChoice(batch, best, best is not None and same_layout(chosen, best)))
    return tuple(found)
