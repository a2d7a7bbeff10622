"""Times and peak memory of pipeline stages with arbitrary layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec import Struct, structs

from cost_models.model.spec import ModelSpec
from cost_models.partition.recomputed_layers import RecomputedLayers, recomputed_layers
from cost_models.partition.schedules import ranks_of_stages
from cost_models.partition.stages import PipelineRank, contents_of_rank
from cost_models.plan.plan import Plan, split_layers
from cost_models.scenario import Scenario
from cost_models.step_time.pipeline_simulation import makespan
from hardware_profiles.progress import stages
from planner.refinement.rank_prices import OfPlan, Seconds, fewest_that_fit, rank_passes, rank_peaks

Ranges = Sequence[tuple[int, int]]
Pair = tuple[int, int]  # layers [first, last)
SAME: Final = 1e-9  # relative
SIZES: Final = (1.0, 2.0, 5.0, 1.0)  # seconds, relative: longest stages, their fit, memory, times
NEAR: Final = 2  # layers more or less than an even stage has, of stages that are priced first


class StageCost(NamedTuple):
    """The fewest recomputed first layers with which a stage fits, and its seconds."""

    recomputed: int
    seconds: Seconds


class StageContents(Struct, dict=True):
    """Contents of the stages of a pipeline with one stage on each rank.

    The time of a stage depends on its layers and on whether it is the first or the last one; its
    memory also on its position. A key contains the kinds of the layers and, for models with encoder
    and decoder, the tensors that a stage sends.

    Where a rank has several stages and all layers are of one kind, a *stage* is all of a rank's:
    time and memory depend on their number of layers together (``split_over_stages``).
    """

    model: ModelSpec
    stages: int
    owner: tuple[int, ...] = ()  # the rank of each stage; empty: one stage on each rank
    _contents: dict[tuple[int, int, int, int], PipelineRank] = {}
    _keys: dict[tuple[int, int, int], Any] = {}
    _ranges: dict[tuple[int, int], list[Pair]] = {}

    @classmethod
    def of_plan(cls, model: ModelSpec, plan: Plan) -> StageContents:
        """Return the contents for the pipeline of a plan."""
        owner = tuple(ranks_of_stages(plan)) if plan.virtual_stages > 1 else ()
        return cls(model, plan.pipeline_parallel, owner)

    @cached_property
    def least(self) -> list[int]:
        """Fewest layers of each stage: the first and the last may hold embedding and head alone."""
        owner = self.owner or range(self.stages)
        inner = Counter(owner[1:-1])
        return [inner[rank] for rank in range(self.stages)]

    def split_over_stages(self, rank: int, layers: int) -> list[int]:
        """Return the layers of each of a rank's stages, as even as possible."""
        last = len(self.owner) - 1
        mine = [s for s, owner in enumerate(self.owner) if owner == rank]
        each, more = divmod(layers, len(mine))
        # the stages with embedding or head have no more layers than the others
        order = sorted(range(len(mine)), key=lambda n: mine[n] in (0, last))
        sizes = [each] * len(mine)
        for n in order[:more]:
            sizes[n] += 1
        return sizes

    def ranges_of(self, layers: Sequence[int]) -> tuple[Pair, ...]:
        """Return the layers of every stage; ``layers``: their number on each rank."""
        left = [self.split_over_stages(rank, n) for rank, n in enumerate(layers)]
        ends = list(accumulate(left[rank].pop(0) for rank in self.owner))
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    def layers_of_ranks(self, ranges: Sequence[Pair]) -> list[int]:
        """Return the number of layers on each rank; ``ranges``: of every stage."""
        pairs = list(zip(self.owner, ranges, strict=True))
        return [
            sum(b - a for owner, (a, b) in pairs if owner == rank) for rank in range(self.stages)
        ]

    def recomputed_of(self, ranges: Sequence[Pair], layers: Sequence[int]) -> tuple[int, ...]:
        """Return the recomputed layers of every stage; ``layers``: their number on each rank."""
        sizes = [last - first for first, last in ranges]
        mine = [[s for s, r in enumerate(self.owner) if r == rank] for rank in range(self.stages)]
        of_ranks = [spread(n, own, sizes) for n, own in zip(layers, mine, strict=True)]
        return tuple(map(sum, zip(*of_ranks, strict=True)))

    def key(self, stage: int, first: int, last: int) -> Any:
        """Return the properties of a stage that determine its time."""
        place = (stage, first, last)
        if place not in self._keys:
            layers: Any = last - first
            if len(self.model.kinds) > 1:
                layers = self.model.pattern[first:last]
            if self.model.bridge_layer is not None:
                layers = structs.replace(self.of(stage, first, last, 0), index=0, positions=())
            self._keys[place] = (stage == 0, stage == self.stages - 1, layers)
        return self._keys[place]

    def of(self, stage: int, first: int, last: int, recomputed: int) -> PipelineRank:
        """Return the contents of a stage; the other stages split the remaining layers evenly."""
        place = (stage, first, last, recomputed)
        if place not in self._contents and self.owner:
            counts = list(self.least)
            counts[stage] = last - first
            counts[stage - 1] += self.model.num_layers - sum(counts)
            ranges = self.ranges_of(counts)
            again = self.recomputed_of(
                ranges, [recomputed * (r == stage) for r in range(self.stages)]
            )
            self._contents[place] = contents_of_rank(
                self.model, ranges, self.owner, stage, recomputed=RecomputedLayers(by_stage=again)
            )
        elif place not in self._contents:
            later, layers = self.stages - 1 - stage, self.model.num_layers
            before, left = _evenly(first, stage), layers - last
            after = [(layers - b, layers - a) for a, b in reversed(_evenly(left, later))]
            self._contents[place] = contents_of_rank(
                self.model,
                [*before, (first, last), *after],
                range(self.stages),
                stage,
                recomputed=RecomputedLayers(by_stage=(recomputed,) * self.stages),
            )
        return self._contents[place]

    def ranges(self, stage: int, sizes: Iterable[int]) -> list[Pair]:
        """Return layers that a stage may have, one range for each key."""
        return [pair for size in sizes for pair in self.ranges_of_size(stage, size)]

    def ranges_of_size(self, stage: int, size: int) -> list[Pair]:
        """Return the same of one number of layers."""
        if self.owner:
            most = self.model.num_layers - sum(self.least) + self.least[stage]
            return [(0, size)] if self.least[stage] <= size <= most else []
        if (stage, size) not in self._ranges:
            layers, later = self.model.num_layers, self.stages - 1 - stage
            latest = layers - max(0, later - 1) - size  # the last stage may be empty, too
            starts = list(range(max(0, stage - 1), latest + 1))
            if stage == 0 or later == 0:
                starts = [0 if stage == 0 else layers - size] if starts else []
            elif size == 0:
                starts = []
            elif len(self.model.kinds) == 1:
                starts = [min(stage, latest)] if starts else []
            found: dict[Any, Pair] = {}
            for first in starts:
                pair = first, first + size
                found.setdefault(self.key(stage, *pair), pair)
            self._ranges[stage, size] = list(found.values())
        return self._ranges[stage, size]

    def of_one_kind(self, stage: int, low: int, high: int) -> bool:
        """Whether a stage with each number of layers can have those of one kind alone."""
        if len(self.model.kinds) == 1:
            return True
        every = [self.ranges_of_size(stage, size) for size in range(low, high + 1)]
        if self.model.bridge_layer is not None or any(len(pairs) != 1 for pairs in every):
            return False
        return len(set(self.model.pattern[slice(*every[-1][0])])) == 1

    @property
    def different(self) -> list[int]:
        """Return stages that differ in more than their position."""
        if self.model.bridge_layer is not None:
            return list(range(self.stages))
        return sorted({0, min(1, self.stages - 1), self.stages - 1})


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
            for stage in costs[number].contents.different
            for pair in costs[number].contents.ranges(stage, sizes)
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


def spread(number: int, mine: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return recomputed layers of each stage: ``number`` layers in turn over the stages ``mine``.

    >>> spread(5, [0, 2], [4, 4, 2])
    (3, 0, 2)
    """
    shared = [0] * len(sizes)
    while number:
        for stage in mine:
            if number and shared[stage] < sizes[stage]:
                shared[stage] += 1
                number -= 1
    return tuple(shared)


def _evenly(layers: int, stages: int) -> Ranges:
    """Return stages as even as possible; the first has none where there are fewer layers."""
    if stages > layers:
        return [(0, 0), *_evenly(layers, stages - 1)]
    return split_layers(layers, stages) if stages else ()


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
    places = [
        (number, stage, low, high)
        for number, one in enumerate(costs)
        for stage, (low, high) in enumerate(one.sizes)
        if one.contents.of_one_kind(stage, low, high)
    ]

    def rank_of(place: int, removed: int) -> OfPlan:
        number, stage, _, high = places[place]
        one = costs[number]
        (pair,) = one.contents.ranges_of_size(stage, high - removed)
        return number, one.contents.of(stage, *pair, one.most_recomputed(stage, pair))

    if not places:
        return
    most = [high - low for *_, low, high in places]
    plans, allowed = [one.plan for one in costs], costs[0].most_bytes
    removed = fewest_that_fit(costs[0].scenario, plans, most, rank_of, allowed)
    largest = [[high for _, high in one.sizes] for one in costs]
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
