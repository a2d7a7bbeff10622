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

Where a rank has v stages, the stages above are ranks, which share the layers out
(``StageContents``): the sums have 1/v of their seconds, and the last bound is left out.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from cost_models.partition.schedules import SPLIT
from cost_models.plan.plan import PlanTable, split_layers
from cost_models.step_time.pipeline_bound import pipeline_bound
from cost_models.step_time.pipeline_simulation import makespan
from planner.refinement.stage_costs import StageCost, StageCosts

ONE_STAGE_A_RANK: Final = ("gpipe", "1f1b", "zero_bubble")
MOST_NODES: Final = 3_000  # partial pipelines extended at most
MOST_SIMULATED: Final = 100
SAME: Final = 1e-9  # relative
Ranges = tuple[tuple[int, int], ...]


class StageSplit(Struct, frozen=True):
    """Layers and recomputed layers of every stage, and the simulated step."""

    layer_ranges: Ranges
    recomputed: tuple[int, ...]  # number of recomputed first layers of each stage
    step: float  # seconds

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return tuple(last - first for first, last in self.layer_ranges)


def best_stages(
    costs: StageCosts, *, most_nodes: int = MOST_NODES, most_simulated: int = MOST_SIMULATED
) -> tuple[StageSplit | None, bool]:
    """Return the stages with the shortest simulated step that fit, and whether that is proven.

    None if no stages fit and have a step below the limit of the costs.
    """
    search = _SplitSearch(costs, most_simulated)
    search.run(most_nodes)
    return search.best, search.proven


class _Node(Struct, frozen=True):
    """A partial pipeline: its first stages have layers."""

    stages: tuple[StageCost, ...]
    ends: tuple[int, ...]  # end of each stage's layers, exclusive
    forward: float  # sums over the filled stages
    inputs: float
    longest: float  # the largest bound of a filled stage
    once: float


class _SplitSearch:
    def __init__(self, costs: StageCosts, most_simulated: int) -> None:
        self.most_simulated, self.owner = most_simulated, costs.contents.owner
        self.plan, self.costs = costs.plan, costs
        self.count, self.layers = self.plan.pipeline_parallel, costs.scenario.model.num_layers
        self.microbatches = self.plan.num_microbatches
        self.splits = self.plan.pipeline_schedule in SPLIT
        self.table = PlanTable.from_plans([self.plan])
        self.best: StageSplit | None = None
        self.proven = True
        self.limit = costs.limit  # seconds that a step has to beat
        self.simulated = 0
        self.seen: set[tuple[int, ...]] = set()
        least = [low for low, _ in costs.sizes]
        self.later = [sum(least[stage + 1 :]) for stage in range(self.count)]  # fewest layers

    def run(self, most_nodes: int) -> None:
        if not self.costs.possible:
            return
        longest, rest, through = self._bounds()
        if not np.isfinite(longest[0][0]):
            return  # no stages fit
        heap: list[tuple[float, int, _Node]] = []
        ticket = itertools.count()

        def extend(node: _Node) -> None:
            for child in self._children(node):
                bound = self._bound(child, longest, rest)
                if bound < self.limit:
                    heapq.heappush(heap, (bound, next(ticket), child))

        extend(_Node((), (), 0.0, 0.0, 0.0, 0.0))
        if heap:
            self._try(tuple(last for _, last in split_layers(self.layers, self.count)))
            self._try(through)
        extended = 1
        while heap:
            bound, _, node = heapq.heappop(heap)
            if bound >= self.limit * (1.0 - SAME):
                break
            if len(node.ends) == self.count:
                if self.simulated >= self.most_simulated:
                    self.proven = False
                    break
                self._try(node.ends)
                continue
            if extended >= most_nodes:
                self.proven = False
                break
            extended += 1
            extend(node)

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
        once = max(c.seconds.once for c in costs)
        if self._least(costs) + once >= self.limit:
            return
        self.simulated += 1
        virtual, owner = self.plan.virtual_stages, self.owner or range(self.count)
        by_kind = (
            [getattr(costs[rank].seconds, kind) / virtual for rank in owner]
            for kind in ("forward", "backward", "weights")
        )
        step = makespan(self.plan, *by_kind) + once
        if step < self.limit * (1.0 - SAME):
            recomputed = tuple(c.recomputed for c in costs)
            if self.owner:
                of = self.costs.contents
                ranges = of.ranges_of([last - first for first, last in ranges])
                recomputed = of.recomputed_of(ranges, recomputed)
            self.limit = step
            self.best = StageSplit(ranges, recomputed, step)

    def _bounds(self) -> tuple[list[list[float]], list[list[float]], tuple[int, ...]]:
        """Return ``longest``, ``rest`` and the stage ends that minimise the longest stage."""
        count, layers = self.count, self.layers
        longest = [[np.inf] * (layers + 1) for _ in range(count + 1)]
        rest = [[np.inf] * (layers + 1) for _ in range(count + 1)]
        chosen = [[layers] * (layers + 1) for _ in range(count + 1)]
        longest[count][layers] = rest[count][layers] = 0.0
        limit, firsts = self.limit / self.microbatches, self._firsts()
        for stage in reversed(range(count)):
            last_stage = stage == count - 1
            for first in firsts[stage]:
                for last in self._lasts(stage, first):
                    found = self.costs.cheapest(stage, first, last)
                    if found is None or found.seconds.whole > limit:
                        break  # more layers need more memory and time
                    cost = found.seconds
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

    def _firsts(self) -> list[range]:
        """Return the possible first layers of every stage."""
        least, most = zip(*self.costs.sizes, strict=True)
        return [
            range(
                max(sum(least[:stage]), self.layers - sum(most[stage:])),
                min(sum(most[:stage]), self.layers - sum(least[stage:])) + 1,
            )
            for stage in range(self.count)
        ]

    def _lasts(self, stage: int, first: int) -> range:
        """Return the possible ends of a stage that begins with a layer."""
        low, high = self.costs.sizes[stage]
        latest = min(self.layers - self.later[stage], first + high)
        if stage == self.count - 1:
            return range(self.layers, latest + 1) if first + low <= self.layers else range(0)
        return range(first + low, latest + 1)

    def _children(self, node: _Node) -> list[_Node]:
        stage, first = len(node.ends), node.ends[-1] if node.ends else 0
        children = []
        for last in self._lasts(stage, first):
            found = self.costs.cheapest(stage, first, last)
            if found is None:
                break
            cost = found.seconds
            late = cost.weights if self.splits else 0.0
            busy = self.microbatches * cost.whole
            bound = node.forward + max(busy, busy - self.microbatches * late + node.inputs)
            if bound >= self.limit:
                break
            children.append(
                _Node(
                    (*node.stages, found),
                    (*node.ends, last),
                    node.forward + cost.forward / self.plan.virtual_stages,
                    node.inputs + (cost.backward - late) / self.plan.virtual_stages,
                    max(node.longest, bound),
                    max(node.once, cost.once),
                )
            )
        return children

    def _bound(self, node: _Node, longest: list[list[float]], rest: list[list[float]]) -> float:
        stage, first = len(node.ends), node.ends[-1]
        if stage == self.count:
            return self._least(node.stages) + node.once
        before = node.forward + (0.0 if self.splits else node.inputs)
        to_come = before + self.microbatches * longest[stage][first]
        through = 0.0 if self.owner else node.forward + node.inputs + rest[stage][first]
        return max(node.longest, to_come, through) + node.once

    def _least(self, stages: Sequence[StageCost]) -> float:
        """Return a lower bound of the seconds of all micro-batches."""
        columns = (
            np.array([[getattr(c.seconds, name)] for c in stages])
            for name in ("forward", "backward", "weights")
        )
        return float(pipeline_bound(self.table, *columns)[0])
