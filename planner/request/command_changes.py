"""Plans as options that are typed behind those of another one: what that one had is taken back."""

from __future__ import annotations

from typing import Final

from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from planner.request.command import describe_plan, typed_batch

DEFAULT_PLAN: Final = Plan()
# what describe_plan leaves out at its default, typed
DEFAULT_OPTION: Final = {
    "tensor_parallel": "--tp 1",
    "sequence_parallel": "--no-sp",
    "pipeline_parallel": "--pp 1",
    "virtual_stages": "--virtual-stages 1",
    "dp_replicate": "--dp-replicate 1",
    "context_parallel": "--cp 1",
    "expert_parallel": "--ep 1",
    "expert_tensor_parallel": "--etp",
    "secondary_ranks": "--secondary-ranks 1",
    "quantised_weights": "--no-quantised-weights",
    "quantised_gradients": "--no-quantised-gradients",
    "offload": "--offload none",
    "offload_device": "--offload-device cpu",
}
TAKE_BACK: Final = " --recompute-layers 0"  # what was typed before


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
    """Return options for what an earlier plan had and this one leaves at its default."""
    return [
        option
        for field, option in DEFAULT_OPTION.items()
        if getattr(plan, field) == getattr(DEFAULT_PLAN, field) != getattr(before, field)
        and (field != "sequence_parallel" or plan.tensor_parallel == 1)
    ]
