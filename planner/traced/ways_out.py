"""Ways out for a traced module that does not fit, and the largest micro-batch of one that does.

Every way out is priced by the same formulas and listed only if it fits; the cheapest change first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from cost_models.plan.plan import Plan
from hardware_profiles.record import Record
from planner.advice.changes import MAX_NODES, resized
from planner.assessment.reach import MAX_MICRO_BATCH, largest
from planner.request.command import cluster_argument, describe_plan
from planner.traced.scenario import TracedScenario, assess_traced, why_illegal, with_batch

MOST_WAYS: Final = 5


class TracedWayOut(Record, frozen=True):
    """A priced change with which a plan of a traced module fits."""

    change: str
    options: str
    plan: Plan
    peak_bytes: float
    step_seconds: float
    num_gpus: int


def ways_out(scenario: TracedScenario, plan: Plan) -> tuple[TracedWayOut, ...]:
    """Return up to MOST_WAYS priced changes with which the plan fits, cheapest first."""
    found: list[TracedWayOut] = []
    for changed, other, change in _changes(scenario, plan):
        way = _check(changed, other, change, moved=changed.cluster is not scenario.cluster)
        if way is not None and way.options not in {one.options for one in found}:
            found.append(way)
        if len(found) == MOST_WAYS:
            break
    return tuple(found)


def largest_micro_batch(scenario: TracedScenario, plan: Plan) -> int | None:
    """Return the largest micro-batch size that fits with the same num_microbatches."""

    def larger(size: int) -> float:
        batch = size * plan.num_microbatches * plan.data_parallel
        changed, larger_plan = with_batch(scenario, batch), replace(plan, micro_batch_size=size)
        if why_illegal(changed, larger_plan) is not None:
            return math.inf
        return assess_traced(changed, [larger_plan])[0].share_of_budget

    return largest(larger, MAX_MICRO_BATCH) or None


def _changes(scenario: TracedScenario, plan: Plan) -> Iterator[tuple[TracedScenario, Plan, str]]:
    if plan.recompute != "full":
        yield scenario, replace(plan, recompute="full"), "recompute full"
    for stage in range(plan.zero_stage + 1, 4):
        yield scenario, replace(plan, zero_stage=stage), f"shard more: ZeRO-{stage}"
    if plan.micro_batch_size > 1:
        times = plan.num_microbatches * plan.micro_batch_size
        one = replace(plan, micro_batch_size=1, num_microbatches=times)
        yield scenario, one, "micro-batch size 1"
    least = replace(plan, micro_batch_size=1, recompute="full")
    least = replace(least, num_microbatches=scenario.global_batch_size // plan.data_parallel)
    for stage in range(4):
        other = replace(least, zero_stage=stage)
        yield scenario, other, f"recompute full, ZeRO-{stage}, micro-batch size 1"
    nodes = scenario.cluster.num_nodes * 2
    grows = scenario.on_gpu and not scenario.cluster.levels
    while nodes <= MAX_NODES and grows:
        larger = resized(scenario.cluster, nodes)
        batch = max(scenario.global_batch_size, larger.num_gpus * plan.micro_batch_size)
        times = max(1, batch // (larger.num_gpus * plan.micro_batch_size))
        wider = replace(plan, data_parallel=larger.num_gpus, zero_stage=3, num_microbatches=times)
        changed = with_batch(replace(scenario, cluster=larger), wider.global_batch_size)
        yield changed, wider, f"{nodes} nodes ({larger.num_gpus} accelerators)"
        nodes *= 2


def _check(
    scenario: TracedScenario, plan: Plan, change: str, *, moved: bool = False
) -> TracedWayOut | None:
    """Price one changed plan; None unless it is legal and fits."""
    if why_illegal(scenario, plan) is not None:
        return None
    assessment = assess_traced(scenario, [plan])[0]
    if not assessment.fits:
        return None
    options = f"{describe_plan(plan)} --global-batch-size {scenario.global_batch_size}"
    if moved:
        name = cluster_argument(scenario.cluster)
        nodes = scenario.cluster.num_nodes
        options = f"{name or f'(nodes = {nodes} in the cluster file)'} {options}"
    return TracedWayOut(
        change=change,
        options=options,
        plan=plan,
        peak_bytes=assessment.memory.peak_bytes,
        step_seconds=assessment.time.step_seconds,
        num_gpus=scenario.cluster.num_gpus,
    )
