"""A plan of an answer with its assessment, cost and training run."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from msgspec import Struct

from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from planner.assessment.assess import Assessment, assess
from planner.refinement.best_partition import StagedPlan
from planner.refinement.placed_plan import PlacedPlan
from planner.request.options.choices import Objective
from planner.run_cost.failures import TrainingRun, training_run
from planner.run_cost.training_run import RunRequest, StepCost


class RankedPlan(Struct, frozen=True, dict=True):
    """One plan of one case with its assessment, cost and training run."""

    scenario: Scenario
    plan: Plan
    step: StepCost
    job: RunRequest
    placed: PlacedPlan | None = None  # with its own order of ranks, as in the scenario
    staged: StagedPlan | None = None  # with stages of its own, as in the scenario
    trainer: str = ""  # whose plans alone were searched

    @cached_property
    def assessment(self) -> Assessment:
        """The assessment of the plan, as ``fit`` returns it."""
        return assess(self.scenario, self.plan)

    @cached_property
    def run(self) -> TrainingRun | None:
        """Training run with and without failures; None without tokens and limits."""
        return training_run(self.scenario, self.plan, self.job, self.step)

    @property
    def is_own(self) -> bool:
        """Whether the plan has its own stages or order of ranks."""
        return self.staged is not None or self.placed is not None

    @property
    def fits(self) -> bool:
        """Whether the plan fits with its whole interval."""
        return self.assessment.fits

    def value(self, objective: Objective) -> float:
        """Return bytes, or seconds, dollars or joules of a token; infinity if unknown."""
        known = {
            "time": self.step.seconds / self.step.tokens,
            "memory": self.assessment.memory.peak_bytes,
            "cost": self.step.per_token("cost"),
            "energy": self.step.per_token("energy"),
        }[objective]
        return float("inf") if known is None else float(known)

    def own_document(self) -> dict[str, Any]:
        """Return its own stages and order of ranks as plain JSON values."""
        return {
            "staged": None if self.staged is None else self.staged.to_dict(),
            "placed": None if self.placed is None else self.placed.to_dict(),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        cost = self.step.accelerator_cost
        return {
            "cluster": self.scenario.cluster.name,
            "num_gpus": self.scenario.cluster.num_gpus,
            "precision": self.scenario.workload.precision,
            "global_batch_size": self.scenario.workload.global_batch_size,
            **self.assessment.to_dict(),
            "cost": {
                "dollars_per_gpu_hour": cost.dollars_per_hour,
                "watts_per_gpu": cost.watts,
                "dollars_per_step": self.step.dollars,
                "joules_per_step": self.step.joules,
                "dollars_per_token": self.step.per_token("cost"),
                "joules_per_token": self.step.per_token("energy"),
            },
            "job": None if self.run is None else self.run.to_dict(),
            **self.own_document(),
        }
