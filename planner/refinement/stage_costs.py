"""Times and peak memory of single pipeline stages with arbitrary layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import structs

from cost_models.compute.rates import training_rates
from cost_models.memory.peak import rank_memory
from cost_models.partition.rank_view import RankView
from cost_models.partition.recomputed_layers import RecomputedLayers, recomputed_layers
from cost_models.partition.schedules import ranks_of_stages
from cost_models.partition.stages import PipelineRank, contents_of_rank
from cost_models.plan.plan import Plan, PlanTable, split_layers
from cost_models.scenario import Scenario
from cost_models.step_time.overlap import Hiding, exposed_data_seconds
from cost_models.step_time.parts import RankSeconds
from cost_models.step_time.pipeline_simulation import makespan
from cost_models.step_time.rank_time import rank_seconds
from cost_models.uncertainty import verdict_spread
from planner.assessment.verdict import budget_bytes

Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of a stage: for one micro-batch, and once a step."""

    recomputed: int  # number of recomputed first layers
    forward: float
    backward: float
    weights: float  # part of ``backward`` that schedules with split backward passes defer
    once: float  # exposed data-parallel communication and the optimizer

    @property
    def whole(self) -> float:
        """Both passes of a micro-batch."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Pricing:
    """Times and peak memory of single pipeline ranks of one plan."""

    scenario: Scenario
    plan: Plan

    @cached_property
    def table(self) -> PlanTable:
        """The plan as a table of one row."""
        return PlanTable.from_plans([self.plan])

    def seconds(self, rank: PipelineRank) -> RankSeconds:
        """Return the times of a rank in seconds."""
        scenario = self.scenario
        rate = training_rates(
            scenario.cluster.accelerator, scenario.workload.precision, scenario.software
        )
        return rank_seconds(RankView(scenario, self.table, rank), rate)

    def once(self, seconds: RankSeconds) -> float:
        """Return the seconds of a rank once a step, after its last pass."""
        software = self.scenario.software
        exposed = exposed_data_seconds(
            seconds,
            self.table,
            Hiding.of(software),
            on_gpu=self.scenario.on_gpu,
        )
        return one(exposed) + one(seconds.optimizer)

    def peak(self, rank: PipelineRank) -> float:
        """Return the peak memory of a rank in bytes."""
        parts, *_ = rank_memory(RankView(self.scenario, self.table, rank))
        return one(parts.peak)


def one(column: Any) -> float:
    """Return the only value of a column."""
    return float(np.ravel(column)[0])


class StageCosts:
    """Cached costs of the stages of a plan with one stage on each rank.

    The time of a stage depends on its layers and on whether it is the first or last stage; its
    memory also on its position. The cache key contains the kinds of its layers and, for models with
    encoder and decoder, the tensors that a stage sends. Fewer layers or more recomputation never
    need more memory.
    """

    def __init__(self, scenario: Scenario, plan: Plan) -> None:
        assert plan.virtual_stages == 1
        self.scenario, self.plan = scenario, plan
        self.pricing = Pricing(scenario, plan)
        spread = verdict_spread(scenario.software.name, scenario.cluster.num_gpus)
        self.max_peak = budget_bytes(scenario.cluster) / (1.0 + spread.above)
        self._seconds: dict[Any, tuple[float, float, float, float, float]] = {}
        self._peaks: dict[Any, float] = {}
        self._least: dict[Any, int | None] = {}
        # by stage, layers that fit without recomputation
        self._fitting: dict[int, list[tuple[int, int]]] = {}
        self._keys: dict[tuple[int, int, int], Any] = {}

    def seconds(
        self, stage: int, first: int, last: int, recomputed: int
    ) -> tuple[float, float, float, float, float]:
        """Return seconds: both passes, forward, backward, its deferred part, and once a step."""
        key = (self._key(stage, first, last), recomputed)
        if key not in self._seconds:
            found = self.pricing.seconds(self._contents(stage, first, last, recomputed))
            passes = one(found.forward_pass), one(found.backward_pass)
            once = self.pricing.once(found)
            self._seconds[key] = (sum(passes), *passes, one(found.weights), once)
        return self._seconds[key]

    def peak(self, stage: int, first: int, last: int, recomputed: int) -> float:
        """Return the peak memory of a stage in bytes."""
        key = (stage, self._key(stage, first, last), recomputed)
        if key not in self._peaks:
            contents = self._contents(stage, first, last, recomputed)
            self._peaks[key] = self.pricing.peak(contents)
        return self._peaks[key]

    def cheapest(self, stage: int, first: int, last: int) -> StageCost | None:
        """Return the cost with the fewest recomputed layers that fit; None if it does not fit.

        A plan without recomputation recomputes none; else the first layers of the stage.
        """
        key = (stage, self._key(stage, first, last))
        if key not in self._least:
            self._least[key] = self._least_that_fits(stage, first, last)
        least = self._least[key]
        if least is None:
            return None
        return StageCost(least, *self.seconds(stage, first, last, least)[1:])

    def _least_that_fits(self, stage: int, first: int, last: int) -> int | None:
        most = 0 if self.plan.recompute == "none" else last - first
        known = self._fitting.setdefault(stage, [])
        if any(self._within(stage, (first, last), other) for other in known):
            return 0

        def fits(recomputed: int) -> bool:
            return self.peak(stage, first, last, recomputed) <= self.max_peak

        smaller = self._least.get((stage, self._key(stage, first, last - 1)), 0)
        if smaller == 0 and fits(0):
            known.append((first, last))
            return 0
        low = max(0, (smaller or 0) - 1)  # does not fit
        high = min(most, low + 1)
        while not fits(high):
            if high == most:
                return None
            low, high = high, min(most, 2 * high - low + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high

    def _within(self, stage: int, layers: tuple[int, int], other: tuple[int, int]) -> bool:
        """Whether layers are a subset of others, or not more of the only kind of layer."""
        if other[0] <= layers[0] and layers[1] <= other[1]:
            return True
        model = self.scenario.model
        return len(model.kinds) == 1 and layers[1] - layers[0] <= other[1] - other[0]

    def _key(self, stage: int, first: int, last: int) -> Any:
        place = (stage, first, last)
        if place not in self._keys:
            model, stages = self.scenario.model, self.plan.pipeline_parallel
            key: Any = (stage == 0, stage == stages - 1, model.pattern[first:last])
            if model.bridge_layer is not None:
                key = structs.replace(self._contents(stage, first, last, 0), index=0, positions=())
            self._keys[place] = key
        return self._keys[place]

    def _contents(self, stage: int, first: int, last: int, recomputed: int) -> PipelineRank:
        """Return the contents of a stage; the other stages split the remaining layers evenly."""
        stages, layers = self.plan.pipeline_parallel, self.scenario.model.num_layers
        before = split_layers(first, stage) if stage else ()
        after = split_layers(layers - last, stages - 1 - stage) if stage < stages - 1 else ()
        ranges = [*before, (first, last), *((last + a, last + b) for a, b in after)]
        return contents_of_rank(
            self.scenario.model,
            ranges,
            range(stages),
            stage,
            recomputed=RecomputedLayers(by_stage=(recomputed,) * stages),
        )


def simulated_step(
    scenario: Scenario, plan: Plan, ranges: Ranges, by_stage: tuple[int, ...] | None = None
) -> float:
    """Return the simulated step of a plan with given stages, in seconds."""
    pricing, owner = Pricing(scenario, plan), ranks_of_stages(plan)
    recomputed = recomputed_layers(plan, by_stage)
    ranks = [
        pricing.seconds(
            contents_of_rank(scenario.model, ranges, owner, rank, recomputed=recomputed)
        )
        for rank in range(plan.pipeline_parallel)
    ]
    virtual = plan.virtual_stages
    passes = makespan(
        plan,
        *(
            [one(getattr(ranks[owner[stage]], name)) / virtual for stage in range(plan.num_stages)]
            for name in ("forward_pass", "backward_pass", "weights")
        ),
    )
    return passes + max(pricing.once(rank) for rank in ranks)


def peaks(
    scenario: Scenario, plan: Plan, ranges: Ranges, by_stage: tuple[int, ...] | None = None
) -> list[float]:
    """Return the peak memory of every pipeline rank in bytes."""
    pricing, owner = Pricing(scenario, plan), ranks_of_stages(plan)
    recomputed = recomputed_layers(plan, by_stage)
    return [
        pricing.peak(contents_of_rank(scenario.model, ranges, owner, rank, recomputed=recomputed))
        for rank in range(plan.pipeline_parallel)
    ]


def with_stages(scenario: Scenario, ranges: Ranges, by_stage: tuple[int, ...] | None) -> Scenario:
    """Return a scenario with given stages and recomputed layers of each."""
    pairs = tuple((first, last) for first, last in ranges)
    return replace(scenario, layer_ranges=pairs, stage_recompute_layers=by_stage)
