"""The best step of each common trainer, for a line of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from msgspec import field

from cost_models.legality.capabilities import all_capabilities, capabilities_of
from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from hardware_profiles.progress import report
from hardware_profiles.record import Record
from planner.refinement.best_partition import StagedPlan, best_staged
from planner.refinement.placed_plan import PlacedPlan
from planner.refinement.placement import SMALL, best_placed, can_be_placed
from planner.refinement.rank_orders import Order
from planner.request.constraints import Constraint, holds_if_faster
from planner.request.limits import searches_of
from planner.search.distinct import DISTINCT, TOP
from planner.search.search import SearchResult, search

COMMON: Final = ("nemo", "torchtitan", "deepspeed", "hf-trainer")
MOST_GPUS: Final = 1024  # beyond, the searches of all take longer than a third of the plan's own


class BestOfTrainer(Record, frozen=True):
    """The fastest plan that fits among those that a trainer runs, at the trainer's prices."""

    software: str  # as --software names it
    step_seconds: float
    plan: Plan
    layers: tuple[int, ...] | None = None  # of every stage, where they are not the usual ones
    # the accelerator of each rank, where it is not the usual one
    order: Order | None = field(default=None, name="rank_order")

    @classmethod
    def placed(cls, software: str, found: PlacedPlan) -> BestOfTrainer:
        """Return a plan in an order of its own."""
        ranges = found.scenario.layer_ranges
        layers = None if ranges is None else tuple(last - first for first, last in ranges)
        return cls(software, found.step, found.plan, layers, found.order)


def best_of_trainers(
    scenario: Scenario, fixed: Mapping[str, Any], require: Sequence[Constraint] = ()
) -> tuple[BestOfTrainer, ...]:
    """Return the best of every common trainer, the fastest first; one without a plan is left out.

    None for adapters, which each trainer places in a model of its own, for large clusters, and for
    CPU processes, which other trainers are not compared on. Orders of ranks are searched on up to
    SMALL accelerators.
    """
    on_cpu = scenario.cluster.accelerator.device == "cpu"
    if on_cpu or scenario.workload.adapter != "none" or scenario.world_size > MOST_GPUS:
        return ()
    found = (_best(scenario, name, fixed, require) for name in COMMON)
    return tuple(sorted((one for one in found if one), key=lambda one: one.step_seconds))


def _best(
    scenario: Scenario, name: str, fixed: Mapping[str, Any], require: Sequence[Constraint]
) -> BestOfTrainer | None:
    report(f"searching the plans of {name}")
    best: BestOfTrainer | None = None
    for one in searches_of(scenario, name):
        table = capabilities_of(one.scenario.software) or all_capabilities().get(name)
        pinned = fixed.get("zero_stage", one.pins.get("zero_stage"))
        if table is None or table.problem_of_workload(scenario.workload) is not None:
            continue
        if pinned != one.pins.get("zero_stage", pinned):
            continue
        asked = (*require, *one.require)
        run_search = partial(search, fixed={**one.pins, **fixed}, require=asked)
        # in an order of its own a plan may beat a leader that it does not beat in the default one
        placed = can_be_placed(scenario.cluster) and scenario.world_size <= SMALL
        below = np.inf if best is None or placed else best.step_seconds
        result = run_search(
            one.scenario, top=TOP, distinct=DISTINCT, below=below, with_near=True
        )  # as many as ``plan`` finds: their layers are chosen
        if not result.fits:
            continue
        found = [BestOfTrainer(name, result.seconds[0], result.plans[0])]
        staged = best_staged(
            one.scenario,
            result.plans,
            result.near,
            found[0].step_seconds,
            recomputed=result.recomputed,
            require=asked,
        )
        if staged is not None:
            found.append(BestOfTrainer(name, staged.step, staged.plan, staged.layers))
        if placed and all(holds_if_faster(each) for each in asked if each.of_result):
            own = _placed(one.scenario, result, staged, run_search, asked)
            found += [] if own is None else [BestOfTrainer.placed(name, own)]
        best = min([*found, *filter(None, [best])], key=lambda each: each.step_seconds)
    return best


def _placed(
    scenario: Scenario,
    result: SearchResult,
    staged: StagedPlan | None,
    run_search: Callable[..., SearchResult],
    require: Sequence[Constraint],
) -> PlacedPlan | None:
    """Return the plan that is fastest in an order of its own; None without a gain."""
    return best_placed(
        scenario,
        result.plans,
        staged,
        lambda own, top, below: run_search(own, top=top, below=below),
        result.near,
        recomputed=result.recomputed,
        require=require,
    )
