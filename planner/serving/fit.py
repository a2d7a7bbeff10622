"""``fit(..., inference=True)``: whether a model and its cache fit, and the largest load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cost_models.model.spec import ModelSpec
from cost_models.plan.plan import Plan
from cost_models.serving.kv_cache import has_cache
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError
from planner.serving.answer import ServingAnswer
from planner.serving.request import build_serving
from planner.serving.scenario import (
    PLAN_FIELDS,
    ServingAssessment,
    ServingScenario,
    assess_serving,
    usual_layouts,
    why_not,
    with_workload,
)
from planner.serving.times import ServingTimePrediction, predict_serving_time
from planner.serving.ways_out import serving_reach, serving_ways


def fit_serving(
    model: ModelSpec,
    cluster: Cluster,
    fixed: Mapping[str, Any],
    *,
    concurrency: int | None = None,
    **asked: Any,
) -> ServingAnswer:
    """Return whether a cluster serves a number of sequences of a given length, with the margin.

    ``fixed``: the given fields of the plan. By default a replica has the fewest accelerators with
    which everything fits; the others hold more replicas. ``asked``: options of ``build_serving``.
    """
    one_each = 1 if concurrency is None else concurrency
    scenario, assumptions = build_serving(model, cluster, concurrency=one_each, **asked)
    assessment, why = _layout(scenario, fixed)
    plan = assessment.plan
    named = PLAN_FIELDS if plan.expert_parallel > 1 else PLAN_FIELDS[:3]
    taken = [f"{name} {getattr(plan, name)}" for name in named if name not in fixed]
    if taken:
        assumptions.append(f"{', '.join(taken)} (default: {why})")
    if concurrency is None:  # as many as there are replicas: each still has one
        scenario = with_workload(scenario, concurrency=plan.data_parallel)
        assumptions.append(
            f"concurrency {plan.data_parallel} (default: one sequence for each replica)"
        )
    fits = assessment.fits
    try:
        time: ServingTimePrediction | None = predict_serving_time(scenario, plan)
    except InputError as error:
        time = None
        assumptions.append(f"time is not predicted: {error}")
    return ServingAnswer(
        scenario=scenario,
        plan=plan,
        assessment=assessment,
        time=time,
        assumptions=tuple(assumptions),
        ways_out=() if fits else serving_ways(scenario, plan),
        reach=serving_reach(scenario, plan) if fits and has_cache(model) else {},
    )


def _layout(scenario: ServingScenario, fixed: Mapping[str, Any]) -> tuple[ServingAssessment, str]:
    """Return the first layout that fits, else the smallest, with the reason for the choice."""
    best: ServingAssessment | None = None
    for plan in usual_layouts(scenario, fixed):
        assessment = assess_serving(scenario, plan)
        if assessment.fits:
            return assessment, "the smallest replica that fits, and as many as there is place for"
        if best is None or assessment.memory.peak_bytes < best.memory.peak_bytes:
            best = assessment
    if best is None:
        raise InputError(_why_no_layout(scenario, fixed))
    return best, "nothing fits, so the one that needs least"


def _why_no_layout(scenario: ServingScenario, fixed: Mapping[str, Any]) -> str:
    """Return why the requested plan, or the simplest one, is illegal."""
    pinned = 1 if scenario.layer_ranges is None else len(scenario.layer_ranges)
    tp, pp = fixed.get("tensor_parallel", 1), fixed.get("pipeline_parallel", pinned)
    data = fixed.get("data_parallel", max(1, scenario.cluster.num_gpus // (tp * pp)))
    plan = Plan(
        data_parallel=data,
        tensor_parallel=tp,
        pipeline_parallel=pp,
        expert_parallel=fixed.get("expert_parallel", 1),
    )
    why = why_not(scenario, plan)
    if why is None:  # pragma: no cover - layouts() would have found it
        raise AssertionError(plan)
    return why
