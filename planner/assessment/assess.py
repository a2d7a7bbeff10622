"""Assessment of plans: predicted memory and time, and the verdict against the memory budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from cost_models.memory.parts import MemoryParts
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan_file import PlanFile
from cost_models.pricing.estimate import PredictionTable, RankMemory, memories_by_rank, price
from cost_models.pricing.prediction import (
    MemoryPrediction,
    TimePrediction,
    communication_prediction,
    memory_prediction,
    time_prediction,
    to_json,
)
from cost_models.pricing.simulated_steps import with_simulated_steps
from cost_models.scenario import Scenario
from cost_models.step_time.parts import TimeParts
from cost_models.uncertainty import memory_spread
from planner.assessment.host_memory import HostMemory, host_memory
from planner.assessment.verdict import Budget, Verdict, memory_budget, verdict


class PeakMemory(Protocol):
    """Predicted peak memory of one accelerator with its interval, in bytes."""

    @property
    def peak_bytes(self) -> float:
        """Predicted peak."""
        ...

    @property
    def low_bytes(self) -> float:
        """Lower end of the interval."""
        ...

    @property
    def high_bytes(self) -> float:
        """Upper end of the interval."""
        ...


class Assessed(Protocol):
    """Peak memory with its verdict, of a plan for training, serving or a traced module."""

    @property
    def verdict(self) -> Verdict:
        """fits, tight or does_not_fit."""
        ...

    @property
    def budget(self) -> Budget:
        """Memory that a plan may use on one accelerator."""
        ...

    @property
    def memory(self) -> PeakMemory:
        """Predicted peak memory."""
        ...


@dataclass(frozen=True, slots=True)
class Assessment:
    """Predicted memory and time of one legal plan, and whether it fits."""

    plan: Plan
    verdict: Verdict
    budget: Budget
    memory: MemoryPrediction
    time: TimePrediction
    host: HostMemory

    @property
    def fits(self) -> bool:
        """Whether the plan fits with its whole interval."""
        return self.verdict == "fits"

    @property
    def margin_bytes(self) -> float:
        """Budget less predicted peak; negative where the peak is larger."""
        return self.budget.size - self.memory.peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the plain JSON values of plan, memory and time."""
        return {
            "plan": self.plan.to_dict(),
            "memory": {
                **verdict_document(self),
                **self.memory.to_dict(),
                "host": self.host.to_dict(),
            },
            "time": self.time.to_dict(),
        }


def amounts(parts: MemoryParts | TimeParts) -> dict[str, float]:
    """Return the parts of one plan's memory (bytes) or step time (seconds) by name."""
    return {f.name: float(getattr(parts, f.name)) for f in fields(parts)}


def verdict_document(assessed: Assessed) -> dict[str, Any]:
    """Return verdict, budget and margin as plain JSON values."""
    budget = assessed.budget
    return {
        "verdict": assessed.verdict,
        "capacity_bytes": budget.capacity,
        "budget_bytes": budget.size,
        "budget_source": budget.reason,
        "margin_bytes": budget.size - assessed.memory.peak_bytes,
    }


def assess(
    scenario: Scenario, plan: Plan, layer_ranges: Sequence[tuple[int, int]] | None = None
) -> Assessment:
    """Return the assessment of one legal plan."""
    (assessment,) = assess_plans(scenario, [plan], layer_ranges)
    return assessment


def assess_plans(
    scenario: Scenario, plans: Sequence[Plan], layer_ranges: Sequence[tuple[int, int]] | None = None
) -> list[Assessment]:
    """Return the assessments of legal plans, priced as one table."""
    if not plans:
        return []
    table = PlanTable.from_plans(list(plans))
    priced = price(scenario, table, layer_ranges)
    priced = with_simulated_steps(scenario, table, priced, layer_ranges)
    ranks = memories_by_rank(scenario, table, layer_ranges)
    return [
        _assessment(scenario, plan, priced.row(row), of_plan)
        for row, (plan, of_plan) in enumerate(zip(plans, ranks, strict=True))
    ]


def _assessment(
    scenario: Scenario, plan: Plan, priced: PredictionTable, ranks: Sequence[RankMemory]
) -> Assessment:
    memory = memory_prediction(scenario, priced, ranks)
    budget = memory_budget(scenario.cluster.accelerator)
    host = host_memory(scenario, priced)
    spread = memory_spread(scenario.software.name)
    on_device = verdict(memory.peak_bytes, budget.size, spread)
    return Assessment(
        plan=plan,
        verdict="does_not_fit" if host.short_of else on_device,
        budget=budget,
        memory=memory,
        time=time_prediction(scenario, plan, priced),
        host=host,
    )


def plan_file(scenario: Scenario, plan: Plan, created_by: str) -> PlanFile:
    """Return the contents of a plan.json, with the scenario's pinned stages or even stages."""
    ranges = default_layer_ranges(scenario, plan)
    document = assess(scenario, plan, ranges).to_dict()
    return PlanFile(
        model=scenario.model,
        cluster=scenario.cluster,
        workload=scenario.workload,
        plan=plan,
        layer_ranges=ranges,
        prediction={
            "memory": document["memory"],
            "time": document["time"],
            "communication": to_json(communication_prediction(scenario, plan, ranges)),
        },
        created_by=created_by,
        software=scenario.software.name,
        stage_recompute_layers=scenario.stage_recompute_layers,
    )
