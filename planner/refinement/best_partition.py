"""Uneven pipeline stages for the best plans of a search.

The search prices even stages with the same number of recomputed layers each. For each of the first
plans this module finds the stages with the shortest simulated step, and returns the plan with the
shortest step of all. The gain is relative to the simulated step of the best plan with even stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import Plan, PlanTable, split_layers
from cost_models.scenario import Scenario
from hardware_profiles.progress import report, tracked
from planner.refinement.minimal_recompute import minimal_recompute_layers
from planner.refinement.stage_costs import simulated_step, with_stages
from planner.refinement.stage_search import Ranges, best_stages, can_be_uneven

FINALISTS: Final = 3  # plans; each takes up to a second
STAGES_OF: Final = "optimizing stages of plan {number} of {total}"
GAIN: Final = 1e-3  # smallest gain, as a share of the step, that is worth uneven stages
RECOMPUTES: Final = ("full", "selective")


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """A plan with its own stages and numbers of recomputed layers."""

    rank: int  # position among the plans of the search, from 0
    plan: Plan
    layer_ranges: Ranges
    by_stage: tuple[int, ...] | None  # recomputed layers of each stage; None: as in the plan
    step: float  # simulated seconds
    even_step: float  # simulated seconds of the best plan with even stages
    proven: bool  # whether these stages are proven to be optimal for the plan

    @property
    def gain(self) -> float:
        """Share of the step time that is saved."""
        return 1.0 - self.step / self.even_step

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return tuple(last - first for first, last in self.layer_ranges)

    def scenario(self, scenario: Scenario) -> Scenario:
        """Return a scenario with these stages."""
        return with_stages(scenario, self.layer_ranges, self.by_stage)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "rank": self.rank,
            "plan": self.plan.to_dict(),
            "layers": list(self.layers),
            "recompute_layers": None if self.by_stage is None else list(self.by_stage),
            "step_seconds": self.step,
            "even_step_seconds": self.even_step,
            "gain": self.gain,
            "proven": self.proven,
        }


def best_staged(scenario: Scenario, plans: Sequence[Plan]) -> StagedPlan | None:
    """Return the first plan whose best stages give the shortest step; None without a gain."""
    if not plans or not scenario.on_gpu:
        return None
    if scenario.layer_ranges is not None or scenario.stage_recompute_layers is not None:
        return None
    even = _even_step(scenario, plans[0])
    report("optimizing pipeline stages")
    finalists = list(enumerate(plans[:FINALISTS]))
    found = [
        staged
        for rank, plan in tracked(finalists, STAGES_OF)
        if (staged := staged_plan(scenario, plan, rank, even)) is not None
    ]
    best = min(found, key=lambda one: one.step, default=None)
    return best if best is not None and best.gain > GAIN else None


def _even_step(scenario: Scenario, plan: Plan) -> float:
    return simulated_step(scenario, plan, split_layers(scenario.model.num_layers, plan.num_stages))


def staged_plan(scenario: Scenario, plan: Plan, rank: int, even_step: float) -> StagedPlan | None:
    """Return a plan with its best stages; None if its stages are not optimised or none fit."""
    plan = replace(plan, recompute_layers=0)  # chosen for each stage instead
    if can_be_uneven(scenario, plan):
        found = best_stages(scenario, plan)
        if found is None:
            return None
        ranges, recomputed, proven = found.layer_ranges, found.recomputed, found.proven
    elif (
        plan.recompute in RECOMPUTES
        and plan.recompute_every == 0
        and plan.offload == "none"
        and scenario.on_gpu
    ):
        ranges = split_layers(scenario.model.num_layers, plan.num_stages)
        shared = minimal_recompute_layers(scenario, plan, ranges)
        if shared is None:
            return None
        recomputed, proven = shared, True
    else:
        return None
    by_stage: tuple[int, ...] | None = recomputed
    if not any(recomputed):
        plan, by_stage = replace(plan, recompute="none"), None
    elif recomputed == tuple(last - first for first, last in ranges):
        by_stage = None
    staged = with_stages(scenario, ranges, by_stage)
    if legality_codes(staged, PlanTable.from_plans([plan]))[0]:
        return None
    step = simulated_step(scenario, plan, ranges, by_stage)
    return StagedPlan(rank, plan, ranges, by_stage, step, even_step, proven)
