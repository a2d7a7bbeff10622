"""Assignment of layers to pipeline stages with the shortest simulated step that fits.

Best-first branch and bound: stages are filled from the first to the last. Dynamic programming over
(stage, first layer) bounds the remaining stages:

    longest(s, a)  least time of the longest of the stages s.. with the layers a..
    rest(s, a)     least time of one micro-batch through these stages, and of the other
                   micro-batches through the last stage

Lower bounds on a partial pipeline, with f, i, w the seconds of forward passes and of gradients of
inputs and weights, m micro-batches, and sums over the stages before a stage s:

    sum f + max(m (f + i + w), m (f + i) + sum i)        for every filled stage
    sum f + sum i + m longest                            for the remaining stages
    sum f + sum i + rest                                 for the last stage

Complete pipelines are bounded by ``pipeline_bound`` and simulated in the order of their bounds, so
the result is optimal unless a limit stops the search. Every stage recomputes the fewest layers with
which it fits: recomputing a layer makes no pass shorter.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np

from cost_models.plan.plan import Plan, PlanTable, split_layers
from cost_models.scenario import Scenario
from cost_models.step_time.pipeline_bound import pipeline_bound
from cost_models.step_time.pipeline_simulation import makespan
from hardware_profiles.progress import advance
from planner.refinement.stage_costs import StageCost, StageCosts

ONE_STAGE_A_RANK: Final = ("gpipe", "1f1b", "zero_bubble")
MOST_NODES: Final = 3_000  # partial pipelines extended at most
MOST_SIMULATED: Final = 100
SAME: Final = 1e-9  # relative
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StageSplit:
    """Layers and recomputed layers of every stage, and the simulated step."""

    layer_ranges: Ranges
    recomputed: tuple[int, ...]  # number of recomputed first layers of each stage
    step: float  # seconds
    proven: bool  # optimal; else a limit stopped the search
    simulated: int

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return tuple(last - first for first, last in self.layer_ranges)


def can_be_uneven(scenario: Scenario, plan: Plan) -> bool:
    """Whether uneven stages are searched: one stage a rank, on GPUs, nothing about it pinned."""
    return (
        plan.pipeline_parallel > 1
        and plan.virtual_stages == 1
        and plan.pipeline_schedule in ONE_STAGE_A_RANK
        and plan.offload == "none"
        and plan.recompute_layers == 0
        and scenario.layer_ranges is None
        and scenario.stage_recompute_layers is None
        and scenario.on_gpu
    )


def best_stages(
    scenario: Scenario,
    plan: Plan,
    *,
    most_nodes: int = MOST_NODES,
) -> StageSplit | None:
    """Return the stages with the shortest simulated step that fit; None if none fit."""
    return _SplitSearch(scenario, plan).run(most_nodes)


@dataclass(frozen=True, slots=True)
class _Node:
    """A partial pipeline: its first stages have layers."""

    stages: tuple[StageCost, ...]
    ends: tuple[int, ...]  # end of each stage's layers, exclusive
    forward: float  # sums over the filled stages
    inputs: float
    longest: float  # the largest bound of a filled stage
    once: float


class _SplitSearch:
    def __init__(self, scenario: Scenario, plan: Plan) -> None:
        self.plan = plan
        self.costs = StageCosts(scenario, plan)
        self.count, self.layers = plan.pipeline_parallel, scenario.model.num_layers
        self.microbatches = plan.num_microbatches
        self.splits = plan.pipeline_schedule == "zero_bubble"
        self.table = PlanTable.from_plans([plan])
        self.best: StageSplit | None = None
        self.simulated = 0
        self.seen: set[tuple[int, ...]] = set()
        # fewest and most layers of each stage
        self.sizes = [(1, self.layers)] * self.count

    def run(self, most_nodes: int) -> StageSplit | None:
        even = split_layers(self.layers, self.count)
        self._try(tuple(last for _, last in even))
        if len(self.costs.scenario.model.kinds) == 1:
            self._narrow([last - first for first, last in even])
        longest, rest, through = self._bounds()
        if not np.isfinite(longest[0][0]):
            return None  # no stages fit at all
        self._try(through)
        proven = True
        heap: list[tuple[float, int, _Node]] = []
        ticket = itertools.count()
        heapq.heappush(heap, (0.0, next(ticket), _Node((), (), 0.0, 0.0, 0.0, 0.0)))
        extended = 0
        while heap:
            bound, _, node = heapq.heappop(heap)
            if self.best is not None and bound >= self.best.step * (1.0 - SAME):
                break
            if len(node.ends) == self.count:
                if self.simulated >= MOST_SIMULATED:
                    proven = False
                    break
                self._try(node.ends)
                continue
            if extended >= most_nodes:
                proven = False
                break
            extended += 1
            for child in self._children(node):
                bound = self._bound(child, longest, rest)
                if self.best is None or bound < self.best.step:
                    heapq.heappush(heap, (bound, next(ticket), child))
        found = self.best
        if found is None:
            return None
        return StageSplit(found.layer_ranges, found.recomputed, found.step, proven, self.simulated)

    def _try(self, ends: tuple[int, ...]) -> None:
        """Simulate a complete pipeline, and keep it if it is the best."""
        if ends in self.seen:
            return
        self.seen.add(ends)
        ranges = tuple(zip((0, *ends[:-1]), ends, strict=True))
        stages = [self.costs.cheapest(s, *pair) for s, pair in enumerate(ranges)]
        if any(stage is None for stage in stages):
            return
        costs = [stage for stage in stages if stage is not None]
        self.simulated += 1
        step = makespan(
            self.plan,
            [c.forward for c in costs],
            [c.backward for c in costs],
            [c.weights for c in costs],
        ) + max(c.once for c in costs)
        if self.best is None or step < self.best.step * (1.0 - SAME):
            recomputed = tuple(c.recomputed for c in costs)
            self.best = StageSplit(ranges, recomputed, step, True, self.simulated)

    def _bounds(self) -> tuple[list[list[float]], list[list[float]], tuple[int, ...]]:
        """Return ``longest``, ``rest`` and the stage ends that minimise the longest stage."""
        count, layers = self.count, self.layers
        longest = [[np.inf] * (layers + 1) for _ in range(count + 1)]
        rest = [[np.inf] * (layers + 1) for _ in range(count + 1)]
        chosen = [[layers] * (layers + 1) for _ in range(count + 1)]
        longest[count][layers] = rest[count][layers] = 0.0
        limit = np.inf if self.best is None else self.best.step / self.microbatches
        for last_stages, stage in enumerate(reversed(range(count))):
            last_stage = last_stages == 0
            firsts = range(stage, layers - (count - stage) + 1) if stage else range(1)
            for number, first in enumerate(firsts):
                advance((last_stages + number / len(firsts)) / count)
                if self.plan.recompute == "none":
                    self._probe(stage, first, limit)
                for last in self._lasts(stage, first):
                    cost = self.costs.cheapest(stage, first, last)
                    if cost is None or cost.whole > limit:
                        break  # more layers need more memory and time
                    most = max(cost.whole, longest[stage + 1][last])
                    if most < longest[stage][first]:
                        longest[stage][first], chosen[stage][first] = most, last
                    passes = cost.whole - (cost.weights if self.splits else 0.0)
                    if last_stage:
                        passes = passes * self.microbatches
                    rest[stage][first] = min(rest[stage][first], passes + rest[stage + 1][last])
        ends: list[int] = []
        for stage in range(count):
            ends.append(chosen[stage][ends[-1] if ends else 0])
        return longest, rest, tuple(ends)

    def _lasts(self, stage: int, first: int) -> range:
        """Return the possible ends of a stage that begins with a layer."""
        low, high = self.sizes[stage]
        latest = min(self.layers - (self.count - stage - 1), first + high)
        if stage == self.count - 1:
            return range(self.layers, latest + 1) if first + low <= self.layers else range(0)
        return range(first + low, latest + 1)

    def _narrow(self, even: list[int]) -> None:
        """Bound the size of every stage, for layers of one kind.

        A stage that alone takes longer than the best pipeline is too large; the largest sizes of
        the other stages bound it from below.
        """
        limit = np.inf if self.best is None else self.best.step / self.microbatches
        most = self.layers - self.count + 1

        def worth_it(stage: int, size: int) -> bool:
            first = self.layers - size if stage == self.count - 1 else stage
            cost = self.costs.cheapest(stage, first, first + size)
            return cost is not None and cost.whole <= limit

        high = []
        for stage, size in enumerate(even):
            while size < most and worth_it(stage, size + 1):
                size += 1
            while size > 1 and not worth_it(stage, size):
                size -= 1
            high.append(size)
        low = [max(1, self.layers - (sum(high) - size)) for size in high]
        self.sizes = list(zip(low, high, strict=True))

    def _probe(self, stage: int, first: int, limit: float) -> None:
        """Price the largest stage below the limit first: if it fits, all smaller ones fit."""
        lasts = self._lasts(stage, first)
        worth = [last for last in lasts if self.costs.seconds(stage, first, last, 0)[0] <= limit]
        if worth:
            self.costs.cheapest(stage, first, worth[-1])

    def _children(self, node: _Node) -> list[_Node]:
        stage, first = len(node.ends), node.ends[-1] if node.ends else 0
        children = []
        for last in self._lasts(stage, first):
            cost = self.costs.cheapest(stage, first, last)
            if cost is None:
                break
            late = cost.weights if self.splits else 0.0
            busy = self.microbatches * cost.whole
            bound = node.forward + max(busy, busy - self.microbatches * late + node.inputs)
            if self.best is not None and bound >= self.best.step:
                break
            children.append(
                _Node(
                    (*node.stages, cost),
                    (*node.ends, last),
                    node.forward + cost.forward,
                    node.inputs + cost.backward - late,
                    max(node.longest, bound),
                    max(node.once, cost.once),
                )
            )
        return children

    def _bound(self, node: _Node, longest: list[list[float]], rest: list[list[float]]) -> float:
        stage, first = len(node.ends), node.ends[-1]
        if stage == self.count:
            columns = (
                np.array([[getattr(c, name)] for c in node.stages])
                for name in ("forward", "backward", "weights")
            )
            return float(pipeline_bound(self.table, *columns)[0]) + node.once
        before = node.forward + (0.0 if self.splits else node.inputs)
        to_come = before + self.microbatches * longest[stage][first]
        through = node.forward + node.inputs + rest[stage][first]
        return max(node.longest, to_come, through) + node.once
