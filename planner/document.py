"""What is said about one plan, as plain JSON values: fit, plan and plan.json share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

from cost_models.estimate import (
    Setting,
    default_layer_ranges,
    price,
    rank_communication,
    rank_memories,
    throughput,
)
from cost_models.memory import MOMENTS, MemoryParts
from cost_models.parameters import active_parameters
from cost_models.plan import Plan, PlanTable
from cost_models.plan_file import PlanFile
from cost_models.step_time import TimeParts
from cost_models.uncertainty import MEMORY, interval, time_half_width
from hardware_profiles.build import describe
from planner.verdict import budget_bytes, verdict

MEMORY_PARTS: Final = tuple(f.name for f in fields(MemoryParts))
TIME_PARTS: Final = tuple(f.name for f in fields(TimeParts))


def model_document(setting: Setting) -> dict[str, Any]:
    """Name and size of the model."""
    return {
        "name": setting.model.name,
        "family": setting.model.family,
        "parameters": setting.model.num_parameters,
        "active_parameters": round(active_parameters(setting.model)),
    }


def cluster_document(setting: Setting) -> dict[str, Any]:
    """Name and size of the cluster."""
    cluster = setting.cluster
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
    setting: Setting, plan: Plan, layer_ranges: Sequence[tuple[int, int]] | None = None
) -> dict[str, Any]:
    """Plan, memory and time of one legal plan."""
    priced = price(setting, PlanTable.from_plans([plan]), layer_ranges)
    ranges = layer_ranges or default_layer_ranges(setting, plan)
    return {
        "plan": plan.to_dict(),
        "memory": _memory(setting, plan, ranges, float(priced.peak[0]), priced),
        "time": _time(setting, plan, float(priced.step[0]), priced),
    }


def _memory(
    setting: Setting, plan: Plan, ranges: Sequence[tuple[int, int]], peak: float, priced: Any
) -> dict[str, Any]:
    low, high = interval(peak, MEMORY)
    budget = budget_bytes(setting.cluster)
    ranks = rank_memories(setting, plan, ranges)
    return {
        "verdict": verdict(peak, budget),
        "peak_bytes": peak,
        "low_bytes": low,
        "high_bytes": high,
        "capacity_bytes": setting.cluster.accelerator.memory_capacity.value,
        "budget_bytes": budget,
        "margin_bytes": budget - peak,
        "limiting_stage": int(priced.limiting_rank[0]),
        "moment": MOMENTS[int(priced.moment[0])],
        "parts": {name: float(getattr(priced.memory, name)[0]) for name in MEMORY_PARTS},
        "stages": [
            {
                "stage": index,
                "peak_bytes": float(parts.peak),
                "allocated_bytes": float(parts.allocated),
                "moment": MOMENTS[moment],
                "parts": {name: float(getattr(parts, name)) for name in MEMORY_PARTS},
            }
            for index, (parts, moment) in enumerate(ranks)
        ],
    }


def _time(setting: Setting, plan: Plan, step: float, priced: Any) -> dict[str, Any]:
    low, high = interval(step, time_half_width(setting.cluster.accelerator))
    parts = {name: float(getattr(priced.time, name)[0]) for name in TIME_PARTS}
    rates = throughput(setting, plan, step)
    mfu = rates["mfu"]
    # what is computed twice counts for hardware, not for the model
    twice = 1.0 + parts["recompute"] / parts["compute"]
    return {
        "step_seconds": step,
        "low_seconds": low,
        "high_seconds": high,
        "parts": parts,
        "slowest_stage": int(priced.slowest_rank[0]),
        "tokens_per_second_per_gpu": rates["tokens_per_second_per_gpu"],
        "mfu": mfu,
        "hfu": None if mfu is None else mfu * twice,
    }


def communication_document(
    setting: Setting, plan: Plan, ranges: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """Collectives of every pipeline rank in one step: axis, kind, count, bytes."""
    return [
        {
            "stage": stage,
            "axis": axis,
            "kind": kind,
            "count": round(float(traffic.count[0])),  # type: ignore[index]
            "bytes": round(float(traffic.size[0])),  # type: ignore[index]
        }
        for stage, by_axis in enumerate(rank_communication(setting, plan, ranges))
        for (axis, kind), traffic in sorted(by_axis.items())
        if float(traffic.count[0]) > 0  # type: ignore[index]
    ]


def plan_file(setting: Setting, plan: Plan, created_by: str) -> PlanFile:
    """Return the contents of a plan.json for a plan with even stages."""
    ranges = default_layer_ranges(setting, plan)
    document = plan_document(setting, plan, ranges)
    return PlanFile(
        model=setting.model,
        cluster=setting.cluster,
        workload=setting.workload,
        plan=plan,
        layer_ranges=ranges,
        prediction={
            "memory": document["memory"],
            "time": document["time"],
            "communication": communication_document(setting, plan, ranges),
        },
        created_by=created_by,
    )
