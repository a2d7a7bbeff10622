"""New plan for the remaining accelerators of a cluster, with the same model and training.

The executor runs this as a subprocess when a node does not come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models.plan_file import PlanFile, read_plan_file
from cost_models.pricing.prediction import scenario_of
from hardware_profiles.cluster.subset import part_of
from hardware_profiles.errors import InputError, NoLegalPlanError
from planner.assessment.assess import plan_file
from planner.search.search import search


@dataclass(frozen=True, slots=True)
class Replanned:
    """The previous plan and the best plan for the remaining accelerators."""

    before: PlanFile
    file: PlanFile

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences that affect the training."""
        old, new = (f.workload.global_batch_size for f in (self.before, self.file))
        if old == new:
            return ()
        ranks = self.file.plan.world_size
        return (
            f"global_batch_size {old} -> {new}: no plan for {ranks} accelerators keeps it; one "
            "step now reads another number of samples at the same learning rate",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {"schema_version": 1, "plan": self.file.plan.to_dict(), "notes": list(self.notes)}


def replan(path: Path, accelerators: int) -> Replanned:
    """Search for the best plan on ``accelerators`` of the cluster of a plan.json.

    The global batch is kept if a plan with it fits; else the nearest divisible one is used.
    """
    before = read_plan_file(path)
    ranks = before.plan.world_size
    if not 1 <= accelerators <= ranks:
        raise InputError(f"--gpus = {accelerators} (must be 1 to {ranks}, those of {path})")
    scenario = replace(
        scenario_of(before),
        cluster=part_of(before.cluster, accelerators),
        stage_recompute_layers=None,  # invalid for other stages
    )
    for batch in _batches(before.workload.global_batch_size, accelerators):
        found = replace(scenario, workload=replace(scenario.workload, global_batch_size=batch))
        result = search(found, top=1)
        if result.plans:
            return Replanned(before, plan_file(found, result.plans[0], before.created_by))
    raise NoLegalPlanError(f"{path}: nothing fits {accelerators} of its {ranks} accelerators")


def _batches(wanted: int, accelerators: int) -> Iterator[int]:
    """Yield the wanted batch, then the nearest one that the accelerators divide."""
    yield wanted
    nearest = max(1, round(wanted / accelerators)) * accelerators
    if nearest != wanted:
        yield nearest
