"""Options of a plan that override those of an earlier plan when appended to its command."""

from __future__ import annotations

from typing import Final

from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from hardware_profiles.options import declared
from planner.request.command import batch_option, describe_plan, shown_fields

RESET_RECOMPUTE_LAYERS: Final = " --recompute-layers 0"  # overrides an earlier number


def plan_override(
    scenario: Scenario, plan: Plan, before: Plan, *, reset_recompute: bool = False
) -> str:
    """Return options for a whole plan and its batch that override those of ``before``.

    ``reset_recompute``: also reset the numbers of recomputed layers.
    """
    words = [
        describe_plan(plan),
        *_reset_options(plan, before),
        batch_override(scenario, plan, before),
    ]
    return " ".join(words) + (RESET_RECOMPUTE_LAYERS if reset_recompute else "")


def batch_override(scenario: Scenario, plan: Plan, before: Plan) -> str:
    """Return options for the batch, and for the number of micro-batches if it has changed."""
    options = batch_option(scenario.workload)
    if plan.num_microbatches != before.num_microbatches:
        options += f" --num-microbatches {plan.num_microbatches}"
    return options


def _reset_options(plan: Plan, before: Plan) -> list[str]:
    """Return options that reset fields of an earlier plan to the defaults that this plan has."""
    shown = shown_fields(plan)
    return [
        one.as_flag(one.default)
        for name, one in declared(Plan).items()
        if one.option is not None
        and one.option.pasted != "never"
        and one.option.of != "recompute"  # see RESET_RECOMPUTE_LAYERS
        and name not in shown
        and getattr(plan, name) == one.default != getattr(before, name)
    ]
