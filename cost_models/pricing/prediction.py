"""What is predicted for one plan, as plain JSON values: memory, time and collectives by stage.

``fit`` and ``plan`` print it, plan.json carries it, and the executor asks for it again where the
plan in a file is not the one that was priced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from cost_models.memory.parts import MemoryParts
from cost_models.memory.peak import MOMENTS
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan_file import PlanFile
from cost_models.pricing.estimate import (
    Priced,
    RankMemory,
    price,
    rank_communication,
    rank_memories,
    throughput,
)
from cost_models.scenario import Scenario
from cost_models.step_time.parts import TimeParts
from cost_models.uncertainty import interval, memory_spread, time_spread
from hardware_profiles.software.trainer import software_profile

MEMORY_PARTS: Final = tuple(f.name for f in fields(MemoryParts))
TIME_PARTS: Final = tuple(f.name for f in fields(TimeParts))
Ranges = Sequence[tuple[int, int]]
# of mfu and hfu: appendix B of PaLM (arXiv:2204.02311); HFU adds what recomputation repeats
CONVENTION: Final = (
    "model FLOP: 6 N + 12 L h s a token (scores in full, causal or not), of trained parts only; "
    "over the datasheet's dense peak of the precision"
)
SAME: Final = 1e-9  # relative: what a plan.json says and what is predicted for it


def predict(scenario: Scenario, plan: Plan, layer_ranges: Ranges) -> dict[str, Any]:
    """Return memory, time and communication of one legal plan."""
    priced = price(scenario, PlanTable.from_plans([plan]), layer_ranges)
    return {
        "memory": memory_prediction(scenario, priced, rank_memories(scenario, plan, layer_ranges)),
        "time": time_prediction(scenario, plan, priced),
        "communication": communication_prediction(scenario, plan, layer_ranges),
    }


def scenario_of(file: PlanFile) -> Scenario:
    """Return everything but the plan and its stages that a plan.json holds."""
    return Scenario(
        file.model,
        file.cluster,
        file.workload,
        software_profile(file.software),
        stage_recompute_layers=file.stage_recompute_layers,
    )


def still_holds(file: PlanFile, fresh: Mapping[str, Any]) -> bool:
    """Return whether a plan.json predicts for its plan what is predicted now."""
    try:
        kept = file.prediction
        numbers = [(kept["memory"]["peak_bytes"], fresh["memory"]["peak_bytes"])]
        numbers += [(kept["time"]["step_seconds"], fresh["time"]["step_seconds"])]
        same = all(abs(a - b) <= SAME * abs(b) for a, b in numbers)
        return same and bool(kept["communication"] == fresh["communication"])
    except (KeyError, TypeError):
        return False


def memory_prediction(
    scenario: Scenario, priced: Priced, ranks: Sequence[RankMemory]
) -> dict[str, Any]:
    """Peak with its interval, its parts, and every pipeline rank's own peak."""
    peak = float(priced.peak[0])
    low, high = interval(peak, memory_spread(scenario.software.name))
    return {
        "peak_bytes": peak,
        "low_bytes": low,
        "high_bytes": high,
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


def time_prediction(scenario: Scenario, plan: Plan, priced: Priced) -> dict[str, Any]:
    """Step time with its interval and parts, and the rates that follow from it."""
    step = float(priced.step[0])
    spread = time_spread(
        scenario.software.name, scenario.cluster.accelerator, experts=scenario.model.has_experts
    )
    low, high = interval(step, spread)
    parts = {name: float(getattr(priced.time, name)[0]) for name in TIME_PARTS}
    rates = throughput(scenario, plan, step)
    mfu = rates["mfu"]
    # what is computed twice counts for hardware, not for the model
    twice = 1.0 + parts["recompute"] / parts["compute"]
    return {
        "step_seconds": step,
        "low_seconds": low,
        "high_seconds": high,
        "parts": parts,
        "slowest_stage": int(priced.slowest_rank[0]),
        "tokens_per_second": scenario.workload.tokens_per_step / step,
        "tokens_per_second_per_gpu": rates["tokens_per_second_per_gpu"],
        "mfu": mfu,
        "hfu": None if mfu is None else mfu * twice,
        "utilisation_convention": CONVENTION,
    }


def communication_prediction(
    scenario: Scenario, plan: Plan, ranges: Ranges
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
        for stage, by_axis in enumerate(rank_communication(scenario, plan, ranges))
        for (axis, kind), traffic in sorted(by_axis.items())
        if float(traffic.count[0]) > 0  # type: ignore[index]
    ]
