"""A plan as options appended to those of an earlier plan, whose settings they take back."""

from __future__ import annotations

from typing import Final

from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from hardware_profiles.options import declared
from planner.request.command import batch_option, describe_plan, shown_fields

TAKE_BACK: Final = " --recompute-layers 0"  # the number that was given before


def replan_options(
    scenario: Scenario, plan: Plan, before: Plan, *, reset_recompute: bool = False
) -> str:
    """Return a whole plan and its batch as options, to be typed behind those of another one.

    ``reset_recompute``: numbers of recomputed layers are taken back, too.
    """
    words = [
        describe_plan(plan),
        *_taken_back(plan, before),
        rebatch_options(scenario, plan, before),
    ]
    return " ".join(words) + (TAKE_BACK if reset_recompute else "")


def rebatch_options(scenario: Scenario, plan: Plan, before: Plan) -> str:
    """Return the batch as options; whoever typed a number of micro-batches needs the new one."""
    option = batch_option(scenario.workload)
    if plan.num_microbatches != before.num_microbatches:
        option += f" --num-microbatches {plan.num_microbatches}"
    return option


def _taken_back(plan: Plan, before: Plan) -> list[str]:
    """Return options for fields that an earlier plan set and this one leaves at their defaults."""
    shown = shown_fields(plan)
    return [
        one.as_option(one.default)
        for name, one in declared(Plan).items()
        if one.option is not None
        and one.option.pasted != "never"
        and one.option.of != "recompute"  # see TAKE_BACK
        and name not in shown
        and getattr(plan, name) == one.default != getattr(before, name)
    ]
