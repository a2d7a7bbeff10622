"""The plan of ``fit`` where the default plan does not fit: the simplest of the fastest that do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.pricing.simulated_steps import above, simulated_steps
from cost_models.scenario import Scenario
from planner.advice.changes import too_small
from planner.assessment.assess import Assessment, assess
from planner.search.search import search

CLOSE: Final = 0.01  # plans whose steps differ by less are told apart by their simplicity
COMPARED: Final = 50  # fastest plans that are compared
# the schedules from the one that every trainer has to those that few have
SCHEDULES_BY_USE: Final = (
    "1f1b",
    "gpipe",
    "interleaved_1f1b",
    "zero_bubble",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)


def searched_plan(scenario: Scenario, fixed: Mapping[str, Any]) -> tuple[Plan, Assessment] | None:
    """Return the simplest of the fastest plans with the fields in ``fixed``; None: none fits."""
    if too_small(scenario, fixed.get("offload", "none")):
        return None  # without a search
    plans = list(search(scenario, fixed, top=COMPARED).plans)
    if not plans:
        return None
    table = PlanTable.from_plans(plans)
    step = above(price(scenario, table).step, simulated_steps(scenario, table))
    near = np.flatnonzero(step <= (1.0 + CLOSE) * step.min())
    plan = min((plans[row] for row in near), key=complexity)  # the first: the fastest
    assessment = assess(scenario, plan)
    return (plan, assessment) if assessment.fits else None


def complexity(plan: Plan) -> tuple[int, ...]:
    """Return a key that sorts plans by how much a trainer must support, the least first.

    The pipeline schedule counts first, then the number of axes besides data parallelism, then
    replicas of shards and recomputation of some layers only.
    """
    axes = (
        plan.tensor_parallel,
        plan.pipeline_parallel,
        plan.context_parallel,
        plan.expert_parallel,
    )
    schedule = plan.pipeline_schedule if plan.pipeline_parallel > 1 else "1f1b"
    return (
        SCHEDULES_BY_USE.index(schedule),
        sum(degree > 1 for degree in axes),
        int(plan.dp_replicate > 1),
        int(plan.recompute_layers > 0),
    )
