"""A plan as options appended to those of an earlier plan, whose settings they take back."""

from __future__ import annotations

from typing import Final

from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from hardware_profiles.options import declared
from planner.request.command import describe_plan, shown_fields, typed_batch

TAKE_BACK: Final = " --recompute-layers 0"  # the number that was given before


def retyped_plan(scenario: Scenario, plan: Plan, before: Plan, *, anew: bool = False) -> str:
    """Return a whole plan and its batch as options, to be typed behind those of another one.

    ``anew``: numbers of recomputed layers are taken back, too.
    """
    words = [describe_plan(plan), *_taken_back(plan, before), retyped_batch(scenario, plan, before)]
    return " ".join(words) + (TAKE_BACK if anew else "")


def retyped_batch(scenario: Scenario, plan: Plan, before: Plan) -> str:
    """Return the batch as options; whoever typed a number of micro-batches needs the new one."""
    typed = typed_batch(scenario.workload)
    if plan.num_microbatches != before.num_microbatches:
        typed += f" --num-microbatches {plan.num_microbatches}"
    return typed


def _taken_back(plan: Plan, before: Plan) -> list[str]:
    """Return options for fields that an earlier plan set and this one leaves at their defaults."""
    shown = shown_fields(plan)
    return [
        one.typed(one.default)
        for name, one in declared(Plan).items()
        if one.option is not None
        and one.option.pasted != "never"
        and one.option.of != "recompute"  # see TAKE_BACK
        and name not in shown
        and getattr(plan, name) == one.default != getattr(before, name)
    ]
