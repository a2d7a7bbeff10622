"""What is said about one plan, as plain JSON values: fit, plan and plan.json share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cost_models.model.parameters import active_parameters
from cost_models.model.spec import ModelSpec
from cost_models.partition.of_plan import default_layer_ranges
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan_file import PlanFile
from cost_models.pricing.estimate import PredictionTable, RankMemory, memories_by_rank, price
from cost_models.pricing.prediction import (
    communication_prediction,
    memory_prediction,
    time_prediction,
    to_json,
)
from cost_models.pricing.simulated_steps import with_simulated_steps
from cost_models.scenario import Scenario
from cost_models.uncertainty import memory_spread
from hardware_profiles.cluster.build import describe
from hardware_profiles.cluster.schema import Cluster
from planner.assessment.host_memory import host_document
from planner.assessment.verdict import memory_budget, verdict


def model_document(model: ModelSpec) -> dict[str, Any]:
    """Name and size of the model."""
    return {
        "name": model.name,
        "family": model.family,
        "parameters": model.num_parameters,
        "active_parameters": round(active_parameters(model)),
    }


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """Name and size of the cluster."""
    return {
        "name": cluster.name,
        "description": describe(cluster),
        "accelerator": cluster.accelerator.name,
        "num_gpus": cluster.num_gpus,
        "num_nodes": cluster.num_nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "capacity_bytes": cluster.accelerator.memory_capacity.value,
    }


def plan_document(
    scenario: Scenario, plan: Plan, layer_ranges: Sequence[tuple[int, int]] | None = None
) -> dict[str, Any]:
    """Plan, memory and time of one legal plan, and whether it fits."""
    (document,) = plan_documents(scenario, [plan], layer_ranges)
    return document


def plan_documents(
    scenario: Scenario, plans: Sequence[Plan], layer_ranges: Sequence[tuple[int, int]] | None = None
) -> list[dict[str, Any]]:
    """Return the documents of some plans, which are priced as one table."""
    if not plans:
        return []
    table = PlanTable.from_plans(list(plans))
    priced = price(scenario, table, layer_ranges)
    priced = with_simulated_steps(scenario, table, priced, layer_ranges)
    ranks = memories_by_rank(scenario, table, layer_ranges)
    return [
        _document(scenario, plan, priced.row(row), of_plan)
        for row, (plan, of_plan) in enumerate(zip(plans, ranks, strict=True))
    ]


def _document(
    scenario: Scenario, plan: Plan, priced: PredictionTable, ranks: Sequence[RankMemory]
) -> dict[str, Any]:
    memory = memory_prediction(scenario, priced, ranks)
    allowed = memory_budget(scenario.cluster.accelerator)
    budget = allowed.size
    host = host_document(scenario, priced)
    around = memory_spread(scenario.software.name)
    short = host["short_of"] is not None
    return {
        "plan": plan.to_dict(),
        "memory": {
            "verdict": "does_not_fit" if short else verdict(memory.peak_bytes, budget, around),
            "capacity_bytes": scenario.cluster.accelerator.memory_capacity.value,
            "budget_bytes": budget,
            "budget_source": f"{allowed.kind}: {allowed.source}",
            "margin_bytes": budget - memory.peak_bytes,
            **memory.to_dict(),
            "host": host,
        },
        "time": time_prediction(scenario, plan, priced).to_dict(),
    }


def plan_file(scenario: Scenario, plan: Plan, created_by: str) -> PlanFile:
    """Return the contents of a plan.json, with the stages of the scenario or even ones."""
    ranges = default_layer_ranges(scenario, plan)
    document = plan_document(scenario, plan, ranges)
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
