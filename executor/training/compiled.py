"""torch.compile of the layers: one graph for all layers of a kind, weights as its inputs.

FSDP2's hooks and pipeline messages stay outside. Collectives inside a layer (tensor parallelism)
split its graph in pieces, which are compiled one by one. A step measured operator by operator runs
eagerly: memory by category and predictions are those of eager layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Final

import torch

from cost_models.plan.plan import Plan
from cost_models.plan.workload import Adapter
from executor.model.stage import Stage
from executor.parallel.mesh import gather_json
from executor.support import UNCOMPILED_FAMILIES
from hardware_profiles.errors import InputError

COMPILED_RECOMPUTE: Final = ("none", "selective", "full")
MAX_MESSAGE: Final = 200  # characters of the compiler's error


def check_compilable(plan: Plan, family: str = "", adapter: Adapter = "none") -> None:
    """Raise an InputError for a plan whose compiled layers were not compared with eager ones."""
    if family in UNCOMPILED_FAMILIES:
        raise InputError(
            f"--compile: for {family} compiled values are not proven equal to eager ones"
        )
    if plan.offloads_activations:
        raise InputError(
            f"--compile: with offload {plan.offload} compiled values are not proven equal to "
            "eager ones"
        )
    if plan.recompute not in COMPILED_RECOMPUTE:
        raise InputError(
            f"--compile: with recompute {plan.recompute} compiled values are not proven equal to "
            f"eager ones (only {', '.join(COMPILED_RECOMPUTE)})"
        )
    for name in ("context_parallel", "expert_parallel"):
        if (value := getattr(plan, name)) > 1:
            raise InputError(
                f"--compile: with {name} {value} compiled values are not proven equal to eager ones"
            )
    if adapter == "qlora":
        raise InputError(
            "--compile: with adapter qlora compiled values are not proven equal to eager ones"
        )


def compile_layers(stages: Sequence[Stage], device: torch.device) -> str | None:
    """Compile the layers of this rank, or return why it is impossible; all ranks decide alike."""
    failures = [error for error in gather_json(_failure(device), device) if error is not None]
    if failures:
        return f"--compile: layers run eagerly, because torch.compile failed: {failures[0]}"
    # torch's tracer reads every input's gradient, a shard's gathered weight among them
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    for stage in stages:
        for name in stage.layer_names:
            module = stage.get_submodule(name)
            module.forward = torch.compile(module.forward, dynamic=False)
    return None


def _failure(device: torch.device) -> str | None:
    """Compile a small function; return the error (no C++ compiler, no triton), if any."""
    try:
        torch.compile(_probe, dynamic=False)(torch.ones(8, device=device))
    except Exception as error:  # the backends raise whatever their tools raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return (lines[0] if lines else type(error).__name__)[:MAX_MESSAGE]
    return None


def _probe(x: torch.Tensor) -> torch.Tensor:
    return (x * 2.0).sin()
