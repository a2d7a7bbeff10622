"""How much a plan asks of a trainer, and the simplest among plans that are equally fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cost_models.plan.plan import Plan

CLOSE: Final = 0.01  # plans whose steps differ by less are told apart by their simplicity
COMPARED: Final = 20  # fastest plans that are compared
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
