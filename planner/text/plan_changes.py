"""Differences between two plans in words."""

from __future__ import annotations

from typing import Any, Final

from cost_models.plan.plan import Plan

CHANGED_NAMES: Final = {
    "data_parallel": "dp",
    "tensor_parallel": "tp",
    "pipeline_parallel": "pp",
    "virtual_stages": "vp",
    "pipeline_schedule": "schedule",
    "zero_stage": "zero",
    "sequence_parallel": "sp",
    "micro_batch_size": "mbs",
    "context_parallel": "cp",
    "context_parallel_method": "cp method",
    "expert_parallel": "ep",
}
DERIVED: Final = ("num_microbatches",)  # from other fields


def changes(before: Plan, after: Plan) -> str:
    """Return the differences between two plans in short form.

    >>> changes(Plan(tensor_parallel=2), Plan(tensor_parallel=4, recompute="full"))
    'tp 2 -> 4, recompute none -> full'
    """
    old, new = before.to_dict(), after.to_dict()
    return ", ".join(
        f"{CHANGED_NAMES.get(name, name)} {_value_words(old[name])} -> {_value_words(new[name])}"
        for name in old
        if old[name] != new[name] and name not in DERIVED
    )


def same_layout(first: Plan, second: Plan) -> bool:
    """Return whether two plans differ at most in fields that follow from the batch."""
    return not changes(first, second)


def _value_words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
