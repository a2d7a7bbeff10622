"""A first plan within about a second: the simplest of the fastest that every trainer runs.

Three searches: without pipelines; with 1F1B pipelines; and, only where neither has a plan that
fits, all plans of ``search``. So "no plan fits" is exact, and the plan is the best of the common
ones: other schedules, which ``search`` compares, may be faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cost_models.memory.optimizer_states import OPTIMIZER_TRAITS
from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from hardware_profiles.options import Declared, declared
from planner.assessment.verdict import budget_bytes
from planner.search.search import SearchResult, search

CLOSE: Final = 0.01  # plans whose steps differ by less are told apart by their simplicity
COMPARED: Final = 20  # fastest plans that are compared
COMMON: Final[dict[str, Any]] = {
    "pipeline_schedule": "1f1b",
    "virtual_stages": 1,
    "dp_replicate": 1,
}
FLAT: Final[dict[str, Any]] = {"pipeline_parallel": 1}
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


@dataclass(frozen=True, slots=True)
class FirstPlan:
    """Result of a quick search."""

    plan: Plan | None  # one that fits, or else a tight one
    fits: bool  # with its whole interval
    smallest: Plan | None  # the legal plan with the smallest peak; None: no plan is legal
    priced: int  # plans


def is_complete(fixed: Mapping[str, Any]) -> bool:
    """Whether pinned fields name a whole plan, so that the others are at their defaults."""
    return all(name in fixed for name, one in declared(Plan).items() if _always(one))


def _always(one: Declared) -> bool:
    return one.option is not None and one.option.pasted == "always"


def first_plan(
    scenario: Scenario,
    fixed: Mapping[str, Any],
    offloads: Sequence[str] = ("none",),
    *,
    common_only: bool = False,
) -> FirstPlan:
    """Return the simplest of the fastest common plans with the fields in ``fixed``.

    ``offloads``: allowed values of Plan.offload. ``common_only``: without the third search.
    """
    offloads = [fixed["offload"]] if "offload" in fixed else offloads
    common_only = common_only or all(too_small(scenario, one) for one in offloads)
    found = _searches(scenario, fixed, offloads, common_only=common_only)
    best = [one for one in found if one.fits] or [one for one in found if one.plans]
    pairs = sorted(
        (pair for one in best for pair in zip(one.seconds, one.plans, strict=True)),
        key=lambda pair: pair[0],
    )
    order = simplest_first([seconds for seconds, _ in pairs], [plan for _, plan in pairs])
    return FirstPlan(
        plan=pairs[order[0]][1] if order else None,
        fits=any(one.fits for one in found),
        smallest=min(found, key=lambda one: one.smallest_peak).smallest,
        priced=sum(one.counts.priced + one.counts.part_recomputed for one in found),
    )


def _searches(
    scenario: Scenario, fixed: Mapping[str, Any], offloads: Sequence[str], *, common_only: bool
) -> list[SearchResult]:
    """Return the results of the three searches, as far as they are needed."""
    own = "pipeline_parallel" in fixed or scenario.layer_ranges is not None
    spaces: list[Mapping[str, Any]] = [{**COMMON, **({} if own else FLAT), **fixed}]
    if not own and scenario.cluster.num_gpus > 1:
        spaces.append({**COMMON, "recompute_layers": 0, **fixed})
    found = [search(scenario, space, top=COMPARED, offloads=offloads) for space in spaces]
    if not (common_only or any(one.fits for one in found)):
        found.append(search(scenario, fixed, top=COMPARED, offloads=offloads))
    return found


def simplest_first(seconds: Sequence[float], plans: Sequence[Plan]) -> list[int]:
    """Return the order of plans in which the simplest of the fastest comes first.

    ``seconds``: steps, ascending. The fastest: those within ``CLOSE`` of the first. The others keep
    their order.
    """
    near = [row for row, step in enumerate(seconds) if step <= (1.0 + CLOSE) * seconds[0]]
    if not near:
        return []
    first = min(near, key=lambda row: complexity(plans[row]))
    return [first, *(row for row in range(len(plans)) if row != first)]


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


def least_bytes(scenario: Scenario, offload: str = "none") -> float:
    """Return the least bytes that all accelerators together have to keep, however many they are.

    One copy of the trained weights in the precision of the updates, and the optimizer states,
    unless they are offloaded.
    """
    workload, rule = scenario.workload, OPTIMIZER_TRAITS[scenario.workload.optimizer]
    if "weights" in offload:
        return 0.0
    kept = rule.is_uniform and not rule.paged and "optimizer" not in offload
    states = workload.state_bytes * rule.states if kept else 0.0
    return scenario.model.num_trainable_parameters * (workload.master_bytes + states)


def too_small(scenario: Scenario, offload: str = "none") -> bool:
    """Whether no plan can fit: even ``least_bytes`` exceed the budgets of all accelerators."""
    if not scenario.on_gpu:
        return False
    shared, software = least_bytes(scenario, offload) / scenario.cluster.num_gpus, scenario.software
    runtime = software.memory.context_bytes + software.memory.allocator_slack * shared
    return shared + runtime > budget_bytes(scenario.cluster)
