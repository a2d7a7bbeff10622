"""Seconds and peak memory of pipeline ranks of many plans, priced together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple
from numpy.typing import NDArray

from cost_models.arrays import Real
from cost_models.compute.rates import training_rates
from cost_models.memory.peak import rank_timeline
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import PipelineRank
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.rank_rows import RankRows, of_ranks
from cost_models.scenario import Scenario
from cost_models.step_time.overlap import Hiding, exposed_data_seconds
from cost_models.step_time.rank_time import rank_seconds
from planner.assessment.verdict import budget_bytes, plan_verdict_spread

Floats = NDArray[np.float64]
OfPlan = tuple[int, PipelineRank]  # number of a plan, and one of its ranks
AT_ONCE: Final = 1_000  # peaks that cost about as much as a further call of the formulas


class _Columns(Struct, frozen=True):
    """Columns of ``Seconds``."""

    forward: Real
    backward: Real
    weights: Real
    once: Real


class Seconds(NamedTuple):
    """Seconds of a rank: of the passes of one micro-batch, and once a step."""

    forward: float
    backward: float
    weights: float  # part of ``backward`` that schedules with split backward passes defer
    once: float  # exposed data-parallel communication and the optimizer

    @property
    def whole(self) -> float:
        """Both passes of a micro-batch."""
        return self.forward + self.backward


class _Peak(Struct, frozen=True):
    size: Real


def max_peak(scenario: Scenario, most: float = np.inf) -> float:
    """Return the largest peak in bytes of a rank that fits with its whole interval.

    No more than ``most``.
    """
    spread = plan_verdict_spread(scenario)
    return min(most, budget_bytes(scenario.cluster) / (1.0 + spread.above))


def rank_passes(
    scenario: Scenario, plans: Sequence[Plan], ranks: Sequence[OfPlan]
) -> list[Seconds]:
    """Return the seconds of every rank."""
    found = _of_plans(scenario, plans, ranks, _seconds_formula(scenario))
    return [Seconds(*row) for row in found.T.tolist()]


def table_passes(scenario: Scenario, table: PlanTable, ranks: Sequence[RankRows]) -> list[Floats]:
    """Return the seconds of both passes of a micro-batch; ``ranks``: rows and their rank."""
    if not ranks:
        return []
    records = of_ranks(scenario, table, ranks, _seconds_formula(scenario))
    return [np.add(record.forward, record.backward) for record in records]


def _seconds_formula(scenario: Scenario) -> Callable[[RankView], _Columns]:
    software = scenario.software
    cluster, precision = scenario.cluster, scenario.workload.precision
    rate = training_rates(cluster.accelerator, precision, software, cluster.num_gpus)

    def seconds(view: RankView) -> _Columns:
        found = rank_seconds(view, rate)
        exposed = exposed_data_seconds(
            found, view.table, Hiding.of(software), on_gpu=scenario.on_gpu
        )
        once = exposed + found.optimizer
        return _Columns(found.forward_pass, found.backward_pass, found.weights, once)

    return seconds


def rank_peaks(scenario: Scenario, plans: Sequence[Plan], ranks: Sequence[OfPlan]) -> Floats:
    """Return the peak memory of every rank in bytes."""

    def peak(view: RankView) -> _Peak:
        return _Peak(np.max(np.stack([parts.peak for parts in rank_timeline(view)]), axis=0))

    return _of_plans(scenario, plans, ranks, peak).ravel()


def _of_plans(
    scenario: Scenario,
    plans: Sequence[Plan],
    ranks: Sequence[OfPlan],
    formula: Callable[[RankView], Any],
) -> Floats:
    """Return the fields of a formula's record (rows) of every rank (columns).

    The formula is evaluated for a column of plans for each distinct object among the ranks.
    """
    columns: dict[int, tuple[PipelineRank, list[int], list[int]]] = {}
    for position, (plan, rank) in enumerate(ranks):
        _, rows, positions = columns.setdefault(id(rank), (rank, [], []))
        rows.append(plan)
        positions.append(position)
    pairs = [(np.array(rows), rank) for rank, rows, _ in columns.values()]
    found = np.zeros((0, 0))
    if pairs:
        records = of_ranks(scenario, PlanTable.from_plans(list(plans)), pairs, formula)
        order = np.concatenate([positions for *_, positions in columns.values()])
        fields = zip(*map(astuple, records), strict=True)
        found = np.stack([np.concatenate(values) for values in fields])
        found[:, order] = found.copy()
    return found


def fewest_that_fit(
    scenario: Scenario,
    plans: Sequence[Plan],
    most: Sequence[int],
    rank_of: Callable[[int, int], OfPlan],
    most_bytes: float = np.inf,
) -> list[int | None]:
    """Return the fewest layers to recompute, or to remove, with which each of several ranks fits.

    None: too large. ``most``: of every rank; ``rank_of``: a rank with a number of such layers;
    ``most_bytes``: the largest peak that is allowed, whatever fits.
    Another layer never increases the peak, by about as much each: unless all numbers are few, the
    secant between one that does not fit and one that fits gives the next to try, with the one
    before it.
    """
    limit, end = max_peak(scenario, most_bytes), np.array(most, dtype=int)
    low, high = np.full(len(end), -1), end + 1  # does not fit, fits
    known = np.zeros((len(end), max(most, default=0) + 1))  # bytes
    while len(rows := np.flatnonzero(high - low > 1)):
        between = high[rows] - low[rows] - 1
        largest, smallest = high[rows] > end[rows], low[rows] < 0  # whether it is to be tried
        if between.sum() <= AT_ONCE:
            rows = np.repeat(rows, between)
            numbers = np.arange(len(rows)) - np.repeat(np.cumsum(between) - between, between)
            numbers += low[rows] + 1
        elif np.any(largest):
            rows = rows[largest]
            numbers = end[rows]
        elif np.any(smallest):
            rows = rows[smallest]
            numbers = np.zeros_like(rows)
        else:
            over, under = known[rows, low[rows]], known[rows, high[rows]]
            share = (over - limit) / np.maximum(1.0, over - under)
            guess = np.ceil(low[rows] + share * (high[rows] - low[rows])).astype(int)
            guess = np.clip(guess, low[rows] + 1, high[rows])
            numbers = np.concatenate([guess, np.maximum(guess - 1, low[rows])])
            rows = np.tile(rows, 2)
        ranks = [rank_of(*pair) for pair in zip(rows.tolist(), numbers.tolist(), strict=True)]
        known[rows, numbers] = peak = rank_peaks(scenario, plans, ranks)
        fits = peak <= limit
        np.minimum.at(high, rows[fits], numbers[fits])
        np.maximum.at(low, rows[~fits], numbers[~fits])
    return [
        None if number > last else number
        for number, last in zip(high.tolist(), end.tolist(), strict=True)
    ]
