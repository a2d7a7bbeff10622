"""Times and peak memory of pipeline stages with arbitrary layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec import Struct

from cost_models.partition.recomputed_layers import recomputed_layers
from cost_models.partition.schedules import ranks_of_stages
from cost_models.partition.stages import PipelineRank, contents_of_rank
from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from cost_models.step_time.pipeline_simulation import makespan
from hardware_profiles.progress import stages
from planner.refinement.rank_prices import OfPlan, Seconds, fewest_that_fit, rank_passes, rank_peaks
from planner.refinement.stage_contents import Pair, Ranges, StageContents

SAME: Final = 1e-9  # relative
SIZES: Final = (1.0, 2.0, 5.0, 1.0)  # seconds, relative: longest stages, their fit, memory, times
TOLD: Final = 8  # stages of a plan that are fitted before the others
NEAR: Final = 2  # layers more or less than an even stage has, of stages that are priced first


class StageCost(NamedTuple):
    """The fewest recomputed first layers with which a stage fits, and its seconds."""

    recomputed: int
    seconds: Seconds


class StageCosts(Struct):
    """Costs of the stages of a plan (``StageContents``), filled by ``price_stages``.

    ``limit``: seconds of a step; stages with which it takes longer are left out. ``longest``:
    seconds of a micro-batch that each stage may take within it. Fewer layers or more recomputation
    never need more memory. ``by_stage``: each stage recomputes as few layers as fit; otherwise as
    many as the plan says.
    """

    scenario: Scenario
    plan: Plan
    contents: StageContents
    limit: float = np.inf
    longest: Sequence[float] = ()
    by_stage: bool = True
    most_bytes: float = np.inf  # largest peak that is allowed
    sizes: list[Pair] = []  # fewest and most layers of each stage
    seconds: dict[Any, Seconds] = {}
    found: dict[Any, StageCost | None] = {}

    @classmethod
    def of(
        cls, scenario: Scenario, plan: Plan, limit: float = np.inf, *, by_stage: bool = True
    ) -> StageCosts:
        """Return the costs of the stages of one plan."""
        longest = [limit / plan.num_microbatches] * plan.pipeline_parallel
        contents = StageContents.of_plan(scenario.model, plan)
        costs = cls(scenario, plan, contents, limit, longest, by_stage)
        price_stages([costs])
        return costs

    @property
    def possible(self) -> bool:
        """Whether stages within the limit can have all layers."""
        return all(low <= high for low, high in self.sizes)

    def cheapest(self, stage: int, first: int, last: int) -> StageCost | None:
        """Return the cost with the fewest recomputed layers that fit.

        None if it does not fit or exceeds the limit. A plan without recomputation recomputes none,
        others the first layers of the stage.
        """
        return self.found.get((stage, self.contents.key(stage, first, last)))

    @property
    def recomputes(self) -> bool:
        """Whether each stage recomputes a number of layers of its own."""
        return self.by_stage and self.plan.recompute != "none"

    def ranges(self, stage: int) -> list[Pair]:
        """Return the layers that a stage may have."""
        low, high = self.sizes[stage]
        return self.contents.ranges(stage, range(low, high + 1))

    def of_plan(self, stage: int, pair: Pair) -> int:
        """Return how many layers of a stage the plan recomputes."""
        layers, of = pair[1] - pair[0], self.contents
        if self.plan.recompute == "none":
            return 0
        sizes = of.split_over_stages(stage, layers) if of.owner else [layers]
        return sum(min(self.plan.recompute_layers or layers, size) for size in sizes)

    def within(self, stage: int, pair: Pair) -> bool:
        """Whether a stage without recomputation takes no longer than it may."""
        return self.seconds[self.contents.key(stage, *pair), 0].whole <= self.longest[stage]

    def most_recomputed(self, stage: int, pair: Pair) -> int:
        """Return the most recomputed layers with which a stage takes no longer than it may."""
        key, layers = self.contents.key(stage, *pair), pair[1] - pair[0]
        if not self.recomputes or not layers:
            return self.of_plan(stage, pair)
        without, whole = self.seconds[key, 0].whole, self.seconds[key, layers].whole
        each = (whole - without) / layers
        spare = self.longest[stage] - without
        return layers if spare >= layers * each else max(0, int((1.0 + SAME) * spare / each))


def price_stages(costs: Sequence[StageCosts]) -> None:
    """Price the stages that pipelines within the limits may have, of plans of one scenario."""
    if not costs:
        return
    with stages(*SIZES) as begin:
        _price_stages(costs, begin)


def _price_stages(costs: Sequence[StageCosts], begin: Callable[[str], None]) -> None:
    words = f"pricing the stages of {len(costs):,} plans"
    begin(words)
    _find_sizes(costs)
    begin(words)
    _fit_sizes([one for one in costs if one.possible])
    items = [
        (number, stage, pair)
        for number, one in enumerate(costs)
        if one.possible
        for stage in range(one.contents.stages)
        for pair in one.ranges(stage)
        if one.within(stage, pair)
    ]

    def rank_of(item: int, recomputed: int) -> OfPlan:
        number, stage, pair = items[item]
        one = costs[number]
        if not one.by_stage:
            recomputed = one.of_plan(stage, pair)
        return number, one.contents.of(stage, *pair, recomputed)

    most = [
        costs[number].most_recomputed(stage, pair) if costs[number].by_stage else 0
        for number, stage, pair in items
    ]
    begin(words)
    plans, allowed = [one.plan for one in costs], costs[0].most_bytes
    fewest = fewest_that_fit(costs[0].scenario, plans, most, rank_of, allowed)
    fitting = [
        (number, stage, pair, n if costs[number].by_stage else costs[number].of_plan(stage, pair))
        for (number, stage, pair), n in zip(items, fewest, strict=True)
        if n is not None
    ]
    begin(words)
    _price_seconds(costs, fitting)
    for number, stage, pair, recomputed in fitting:
        one, key = costs[number], costs[number].contents.key(stage, *pair)
        one.found[stage, key] = StageCost(recomputed, one.seconds[key, recomputed])


def _find_sizes(costs: Sequence[StageCosts]) -> None:
    """Bound the layers of every stage by those that it may have without recomputation.

    More layers never take less time, so that those near an even split mostly tell.
    """
    layers = costs[0].scenario.model.num_layers
    least = [one.contents.least for one in costs]
    most = [layers - sum(each) + max(each) for each in least]
    even = [-(-layers // one.contents.stages) for one in costs]
    low = [max(0, number - NEAR) for number in even]
    high = [min(last, number + NEAR + number // 4) for number, last in zip(even, most, strict=True)]
    left = {number: range(low[number], high[number] + 1) for number in range(len(costs))}
    while left:  # shorter stages, where all are too long; longer ones, where none is
        wanted = [
            (number, stage, pair, 0)
            for number, sizes in left.items()
            for stage, pair in costs[number].contents.different(sizes)
        ]
        _price_seconds(costs, wanted)
        again, left = left, {}
        for number in again:
            found = _largest(costs[number], low[number], high[number])
            costs[number].sizes = sizes_of(found, layers, least[number])
            if min(found) < low[number] and low[number] > 0:
                left[number], low[number] = range(low[number]), 0
            elif max(found) == high[number] < most[number]:
                first, high[number] = high[number] + 1, min(most[number], 2 * high[number])
                left[number] = range(first, high[number] + 1)
    ends = [
        (number, stage, pair, recomputed)
        for number, one in enumerate(costs)
        if one.possible
        for stage in range(one.contents.stages)
        for pair in one.ranges(stage)
        for recomputed in {0, pair[1] - pair[0] if one.recomputes else 0}
    ]
    _price_seconds(costs, ends)


def sizes_of(largest: Sequence[int], layers: int, least: Sequence[int]) -> list[Pair]:
    """Return the fewest and the most layers of stages with at most ``largest`` layers each.

    ``least``: layers that a stage needs.

    >>> sizes_of([3, 4], 6, [0, 0]), sizes_of([3, 3, 3], 3, [0, 1, 0])
    ([(2, 3), (3, 4)], [(0, 3), (1, 3), (0, 3)])
    """
    spare = sum(largest) - layers
    return [(max(low, high - spare), high) for low, high in zip(least, largest, strict=True)]


def _largest(costs: StageCosts, least: int, most: int) -> list[int]:
    """Return the most layers of every stage within its time, of ``least`` to ``most``.

    One less than ``least`` if all take longer.
    """
    of, found = costs.contents, []
    for stage in range(of.stages):
        sizes = (
            size
            for size in range(most, least - 1, -1)
            if any(costs.within(stage, pair) for pair in of.ranges_of_size(stage, size))
        )
        found.append(next(sizes, least - 1))
    return found


def _fit_sizes(costs: Sequence[StageCosts]) -> None:
    """Lower the most layers of every stage to those with which it fits in its time.

    For layers of one kind: more layers need more memory, and leave less time to recompute them.
    """
    allowed, bounds = costs[0].most_bytes if costs else np.inf, [one.sizes for one in costs]
    largest = [[high for _, high in sizes] for sizes in bounds]
    for among_first in (True, False):  # with a few stages, most plans have no room for all layers
        places = [
            (number, stage, low, high)
            for number, (one, sizes) in enumerate(zip(costs, bounds, strict=True))
            if one.possible
            for stage, (low, high) in enumerate(sizes)
            if (stage % max(1, len(sizes) // TOLD) == 0) == among_first
            and one.contents.of_one_kind(stage, low, high)
        ]

        def rank_of(place: int, removed: int, places: list[Any] = places) -> OfPlan:
            number, stage, _, high = places[place]
            one = costs[number]
            (pair,) = one.contents.ranges_of_size(stage, high - removed)
            return number, one.contents.of(stage, *pair, one.most_recomputed(stage, pair))

        if not places:
            continue
        most = [high - low for *_, low, high in places]
        plans = [one.plan for one in costs]
        removed = fewest_that_fit(costs[0].scenario, plans, most, rank_of, allowed)
        for (number, stage, _, high), fewer in zip(places, removed, strict=True):
            largest[number][stage] = 0 if fewer is None else high - fewer
        for one, each in zip(costs, largest, strict=True):
            one.sizes = sizes_of(each, one.scenario.model.num_layers, one.contents.least)


def _price_seconds(
    costs: Sequence[StageCosts], wanted: Sequence[tuple[int, int, Pair, int]]
) -> None:
    """Price the seconds of stages with numbers of recomputed layers."""
    new: dict[tuple[int, Any], PipelineRank] = {}
    for number, stage, pair, recomputed in wanted:
        of = costs[number].contents
        key = of.key(stage, *pair), recomputed
        if key not in costs[number].seconds and (number, key) not in new:
            new[number, key] = of.of(stage, *pair, recomputed)
    if new:
        ranks = [(number, rank) for (number, _), rank in new.items()]
        seconds = rank_passes(costs[0].scenario, [one.plan for one in costs], ranks)
        for (number, key), one in zip(new, seconds, strict=True):
            costs[number].seconds[key] = one


def ranks_of(
    scenario: Scenario, plan: Plan, ranges: Ranges, by_stage: tuple[int, ...] | None
) -> list[PipelineRank]:
    """Return the contents of every pipeline rank of a plan with given stages."""
    owner, recomputed = ranks_of_stages(plan), recomputed_layers(plan, by_stage)
    return [
        contents_of_rank(scenario.model, ranges, owner, rank, recomputed=recomputed)
        for rank in range(plan.pipeline_parallel)
    ]


def simulated_step(
    scenario: Scenario, plan: Plan, ranges: Ranges, by_stage: tuple[int, ...] | None = None
) -> float:
    """Return the simulated step of a plan with given stages, in seconds."""
    ranks = [(0, rank) for rank in ranks_of(scenario, plan, ranges, by_stage)]
    *passes, once = zip(*rank_passes(scenario, [plan], ranks), strict=True)
    owner = ranks_of_stages(plan)
    by_kind = ([kind[rank] / plan.virtual_stages for rank in owner] for kind in passes)
    return makespan(plan, *by_kind) + float(max(once))


def peaks(
    scenario: Scenario, plan: Plan, ranges: Ranges, by_stage: tuple[int, ...] | None = None
) -> list[float]:
    """Return the peak memory of every pipeline rank in bytes."""
    ranks = [(0, rank) for rank in ranks_of(scenario, plan, ranges, by_stage)]
    found: list[float] = rank_peaks(scenario, [plan], ranks).tolist()
    return found


def with_stages(scenario: Scenario, ranges: Ranges, by_stage: tuple[int, ...] | None) -> Scenario:
    """Return a scenario with given stages and recomputed layers of each."""
    pairs = tuple((first, last) for first, last in ranges)
    return replace(scenario, layer_ranges=pairs, stage_recompute_layers=by_stage)
