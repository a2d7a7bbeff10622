"""Models and options that the bundled executor is tested with: a file that its tests write.

Other families and options can be priced; the executor refuses them by name.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args

from cost_models.legality.executor_limits import unsupported_field, untrained, untrained_recompute
from cost_models.model.spec import ModelSpec
from cost_models.plan.plan import Plan
from cost_models.plan.recompute import modules_of
from cost_models.plan.workload import AdapterTargets, Workload

SUPPORTED_FILE: Final = Path(__file__).parent / "executor_proofs.json"
OF_FAMILY: Final = ("tensor_parallel", "pipeline_parallel", "expert_parallel")
AXES: Final = (*OF_FAMILY, "dp_replicate", "context_parallel")


@cache
def supported() -> dict[str, Any]:
    """Return the contents of executor_proofs.json."""
    found: dict[str, Any] = json.loads(SUPPORTED_FILE.read_text(encoding="utf-8"))
    return found


def unproven(model: ModelSpec, workload: Workload, plan: Plan) -> str | None:
    """Return the first option of a model or a plan that no test covers, as text; else None.

    Replicas, context parallelism and schedules do not depend on the family; the other axes do.
    """
    proven = supported()
    families = proven["families"]
    for reason in (
        unsupported_field(plan),
        untrained_recompute(workload, plan),
        *untrained(model, workload),
    ):
        if reason is not None:
            return reason
    targets = workload.adapter_targets
    if workload.adapter != "none" and targets not in get_args(AdapterTargets):
        return f"adapter_targets = {targets} (only {', '.join(get_args(AdapterTargets))})"
    if model.family not in families:
        return f"model_type {model.family} (it trains {', '.join(families)})"
    everywhere = {axis for axes in families.values() for axis in axes}
    for axis in AXES:
        known = families[model.family] if axis in OF_FAMILY else everywhere
        if getattr(plan, axis) > 1 and axis not in known:
            return f"{axis} = {getattr(plan, axis)} with model_type {model.family} (only 1)"
    words: dict[str, str] = {"offload": plan.offload, "adapter": workload.adapter}
    if plan.pipeline_parallel > 1:
        words["pipeline_schedule"] = plan.pipeline_schedule
    if plan.context_parallel > 1:
        words["context_parallel_method"] = plan.context_parallel_method
    if reason := _unproven_recompute(plan.recompute, proven["recompute"]):
        return reason
    for name, value in words.items():
        if value not in proven[name]:
            return f"{name} = {value} (only {', '.join(proven[name])})"
    return None


def _unproven_recompute(setting: str, proven: list[str]) -> str | None:
    """Return a setting of recomputation that no test covers, as text; modules are proven singly."""
    modules = {module for known in proven for module in modules_of(known)}
    if setting in proven or (modules_of(setting) and modules.issuperset(modules_of(setting))):
        return None
    return f"recompute = {setting} (only {', '.join(proven)})"
