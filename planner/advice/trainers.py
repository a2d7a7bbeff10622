"""The best step of each common trainer, for a line of an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cost_models.legality.capabilities import all_capabilities, capabilities_of
from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from hardware_profiles.progress import report
from planner.refinement.best_partition import best_staged
from planner.request.constraints import Constraint
from planner.request.limits import searches_of
from planner.search.search import search

COMMON: Final = ("nemo", "torchtitan", "deepspeed", "hf-trainer")
MOST_GPUS: Final = 1024  # beyond, the searches of all take longer than a third of the plan's own


@dataclass(frozen=True, slots=True)
class BestOfTrainer:
    """The fastest plan that fits among those that a trainer runs, at the trainer's prices."""

    software: str  # as --software names it
    step_seconds: float
    plan: Plan
    layers: tuple[int, ...] | None = None  # of every stage, where they are not the usual ones

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "software": self.software,
            "step_seconds": self.step_seconds,
            "plan": self.plan.to_dict(),
            "layers": None if self.layers is None else list(self.layers),
        }


def best_of_trainers(
    scenario: Scenario, fixed: Mapping[str, Any], require: Sequence[Constraint] = ()
) -> tuple[BestOfTrainer, ...]:
    """Return the best of every common trainer, the fastest first; one without a plan is left out.

    None for adapters, which each trainer places in a model of its own, and for large clusters.
    """
    if scenario.workload.adapter != "none" or scenario.world_size > MOST_GPUS:
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
        pins = {**one.pins, **fixed}
        below = np.inf if best is None else best.step_seconds
        asked = (*require, *one.require)
        result = search(one.scenario, pins, require=asked, top=1, below=below, with_near=True)
        if not result.fits:
            continue
        best = BestOfTrainer(name, result.seconds[0], result.plans[0])
        staged = best_staged(
            one.scenario,
            result.plans,
            result.near,
            best.step_seconds,
            recomputed=result.recomputed,
            require=asked,
        )
        if staged is not None:
            best = BestOfTrainer(name, staged.step, staged.plan, staged.layers)
    return best
