"""Assessment of plans: predicted memory and time, and the verdict against the memory budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from msgspec.structs import asdict

from cost_models.memory.parts import MemoryParts
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan_file import PlanFile
from cost_models.pricing.estimate import PredictionTable, RankMemory, price_with_ranks
from cost_models.pricing.prediction import (
    MemoryPrediction,
    TimePrediction,
    communication_prediction,
    memory_prediction,
    time_prediction,
)
from cost_models.pricing.simulated_steps import with_simulated_steps
from cost_models.scenario import Scenario
from cost_models.step_time.parts import TimeParts
from cost_models.uncertainty import peak_interval
from hardware_profiles.record import to_json
from planner.assessment.host_memory import HostMemory, host_memory
from planner.assessment.verdict import Budget, Verdict, memory_budget, plan_verdict_spread, verdict


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


Memory = TypeVar("Memory", bound=PeakMemory, covariant=True)


@dataclass(frozen=True, slots=True)
class MemoryAssessment(Generic[Memory]):
    """Peak memory of one legal plan and its verdict: for training, serving or a traced module."""

    plan: Plan
    verdict: Verdict
    budget: Budget
    memory: Memory

    @property
    def fits(self) -> bool:
        """Whether the plan fits with its whole interval."""
        return self.verdict == "fits"

    @property
    def margin_bytes(self) -> float:
        """Budget less predicted peak; negative where the peak is larger."""
        return self.budget.size - self.memory.peak_bytes

    @property
    def share_of_budget(self) -> float:
        """Upper end of the interval as a share of the budget."""
        return self.memory.high_bytes / self.budget.size

    @property
    def memory_row(self) -> dict[str, float]:
        """Peak and margin in bytes, as columns of a table of plans."""
        return {"peak_bytes": self.memory.peak_bytes, "margin_bytes": self.margin_bytes}

    def verdict_document(self) -> dict[str, Any]:
        """Return verdict, budget and margin as plain JSON values."""
        return {
            "verdict": self.verdict,
            "capacity_bytes": self.budget.capacity,
            "budget_bytes": self.budget.size,
            "budget_source": self.budget.reason,
            "margin_bytes": self.margin_bytes,
        }


@dataclass(frozen=True, slots=True)
class Assessment(MemoryAssessment[MemoryPrediction]):
    """Predicted memory and time of one legal plan, and whether it fits."""

    time: TimePrediction
    host: HostMemory

    @property
    def is_short_on_the_host_alone(self) -> bool:
        """Whether the accelerators have room, and a node's memory or drives do not."""
        return self.host.short_of is not None and self.margin_bytes >= 0.0

    def row(self) -> dict[str, Any]:
        """Return the plan and its figures as one row of a table, in SI units."""
        return {
            **self.plan.to_dict(),
            **self.memory_row,
            "step_seconds": self.time.step_seconds,
            "tokens_per_second_per_gpu": self.time.tokens_per_second_per_gpu,
            "mfu": self.time.mfu,
            **{f"{name}_seconds": seconds for name, seconds in amounts(self.time.parts).items()},
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the plain JSON values of plan, memory and time."""
        return {
            "plan": self.plan.to_dict(),
            "memory": {
                **self.verdict_document(),
                **self.memory.to_dict(),
                "host": self.host.to_dict(),
            },
            "time": self.time.to_dict(),
        }


def amounts(parts: MemoryParts | TimeParts) -> dict[str, float]:
    """Return the parts of one plan's memory (bytes) or step time (seconds) by name."""
    return {name: float(value) for name, value in asdict(parts).items()}


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
    priced, ranks, seconds = price_with_ranks(scenario, table, layer_ranges)
    priced = with_simulated_steps(scenario, table, priced, seconds=seconds)
    return [
        _assessment(scenario, plan, priced.row(row), of_plan)
        for row, (plan, of_plan) in enumerate(zip(plans, ranks, strict=True))
    ]


def _assessment(
    scenario: Scenario, plan: Plan, priced: PredictionTable, ranks: Sequence[RankMemory]
) -> Assessment:
    memory = memory_prediction(scenario, plan, priced, ranks)
    budget = memory_budget(scenario.cluster.accelerator)
    host = host_memory(scenario, priced)
    spread = plan_verdict_spread(scenario)
    ends = peak_interval(memory.peak_bytes, float(priced.typical_peak[0]), spread)
    on_device = verdict(*ends, budget.size)
    return Assessment(
        plan=plan,
        verdict="does_not_fit" if host.short_of else on_device,
        budget=budget,
        memory=memory,
        time=time_prediction(scenario, plan, priced),
        host=host,
    )


def plan_file(scenario: Scenario, plan: Plan, created_by: str, trainer: str = "") -> PlanFile:
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
        trainer=trainer,
        stage_recompute_layers=scenario.stage_recompute_layers,
    )
