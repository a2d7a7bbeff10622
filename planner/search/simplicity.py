"""How much a plan asks of a trainer, and the simplest among plans that are equally fast.

Predictions do not tell apart plans whose steps differ little: in published sweeps of one model,
cluster and batch, the ratio of prediction to measurement of a plan differs from its median in the
sweep by 2.2 % (vtrain-multi), 2.3 % (bigscience-v100) and 4.0 % (vtrain-single) in the median
(``error between plans`` of ``shardplan validate``). Of the plans within about half of that of the
fastest (``CLOSE``) the simplest is proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from msgspec import Struct

from cost_models.plan.plan import Plan
from hardware_profiles.fields import names_in

CLOSE: Final = 0.01  # plans whose steps differ by less are told apart by their simplicity
# the schedules from the one that every trainer has to those that few have
SCHEDULES_BY_USE: Final = names_in("""
    1f1b gpipe interleaved_1f1b zero_bubble interleaved_zero_bubble zbv dualpipev
""")


class Tie(Struct, frozen=True):
    """Plans whose steps are within ``CLOSE`` of the fastest."""

    plans: int  # how many, the fastest included
    fastest: Plan
    seconds: float  # a step of the fastest

    @classmethod
    def of(cls, seconds: Sequence[float], plans: Sequence[Plan]) -> Tie | None:
        """Count the plans of a search; ``seconds``: steps, ascending."""
        near = close_to_first(seconds)
        return cls(len(near), plans[0], seconds[0]) if near else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "within": CLOSE,
            "plans": self.plans,
            "fastest": {"plan": self.fastest.to_dict(), "step_seconds": self.seconds},
        }


def close_to_first(seconds: Sequence[float]) -> list[int]:
    """Return the positions of steps within ``CLOSE`` of the first."""
    return [row for row, step in enumerate(seconds) if step <= (1.0 + CLOSE) * seconds[0]]


def simplest_first(seconds: Sequence[float], plans: Sequence[Plan]) -> list[int]:
    """Return the order of plans in which the simplest of the fastest comes first.

    ``seconds``: steps, ascending. The fastest: those within ``CLOSE`` of the first. The others keep
    their order.
    """
    near = close_to_first(seconds)
    if not near:
        return []
    first = min(near, key=lambda row: complexity(plans[row]))
    return [first, *(row for row in range(len(plans)) if row != first)]


def distinct_first(plans: Sequence[Plan], order: Sequence[int]) -> list[int]:
    """Return an order of plans with the first one of every degrees before all others.

    Degrees: of tensor, pipeline, context and expert parallelism.
    """
    firsts: dict[tuple[int, ...], int] = {}
    for row in order:
        firsts.setdefault(degrees(plans[row]), row)
    return [*firsts.values(), *(row for row in order if firsts[degrees(plans[row])] != row)]


def complexity(plan: Plan) -> tuple[int, ...]:
    """Return a key that sorts plans by how much a trainer must support, the least first.

    The pipeline schedule counts first, then the number of axes besides data parallelism, then
    replicas of shards, ZeRO++ and offload, and recomputation of some layers only.
    """
    schedule = plan.pipeline_schedule if plan.pipeline_parallel > 1 else "1f1b"
    further = (
        plan.secondary_ranks > 1,
        plan.quantised_weights,
        plan.quantised_gradients,
        plan.offload != "none",
        "+" in plan.offload,
    )
    return (
        SCHEDULES_BY_USE.index(schedule),
        sum(degree > 1 for degree in degrees(plan)),
        int(plan.dp_replicate > 1),
        sum(further),
        int(plan.recompute_layers > 0),
    )


def degrees(plan: Plan) -> tuple[int, ...]:
    """Return the degrees of tensor, pipeline, context and expert parallelism."""
    return (
        plan.tensor_parallel,
        plan.pipeline_parallel,
        plan.context_parallel,
        plan.expert_parallel,
    )
