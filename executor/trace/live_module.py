"""Trace of a module that a training script holds already, without its weights.

A copy of the module has fake parameters and buffers of the same shapes: nothing is allocated,
moved or computed, and the module itself is not touched. The copy runs with the arguments of one
batch, so that its memory is exact for that number of rows only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.plan.workload import Precision
from executor.compat import FakeTensorMode
from executor.trace.linear_fit import ROWS, pass_lines
from executor.trace.module_blocks import blocks, recompute
from executor.trace.module_factory import one_line
from executor.trace.trace import SCHEMA_VERSION, PassRunner, describe_module
from hardware_profiles.errors import InputError


def trace_live(
    module: nn.Module,
    arguments: Mapping[str, Any],
    *,
    rows: int,
    precision: Precision,
    device: str = "cpu",
    recomputes: bool = False,
    every_size: bool = False,
) -> dict[str, Any]:
    """Trace a module called with ``arguments`` of ``rows`` rows, with the operators of ``device``.

    ``every_size``: at several numbers of rows, with and without recomputation, as
    ``executor.trace.trace``; else at ``rows`` rows alone, recomputed only if it ``recomputes``.
    """
    name = type(module).__name__
    kept = next((p.dtype for p in module.parameters() if p.requires_grad), torch.float32)
    shapes = {
        key: (value.shape, value.dtype, bool(value.dim()) and len(value) == rows)
        for key, value in arguments.items()
        if isinstance(value, Tensor)
    }
    others = {key: value for key, value in arguments.items() if key not in shapes}

    def inputs(count: int) -> dict[str, Any]:
        return others | {
            key: torch.zeros((count, *shape[1:]) if batched else shape, dtype=dtype)
            for key, (shape, dtype, batched) in shapes.items()
        }

    with one_line(name), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        traced = _fake_copy(module, fake)
        parts = blocks(traced)
        run = PassRunner(traced, parts, inputs, precision, device, kept)
        sizes: Sequence[int] = ROWS if every_size else (rows,)
        passes: dict[str, Any] = {}
        if every_size or not (recomputes and parts):
            passes["none"] = pass_lines([run.timeline(count) for count in sizes])
        notes = []
        if parts and (every_size or recomputes):
            run.rule_blocks()
            recompute(parts.values())
            passes["full"] = pass_lines([run.timeline(count) for count in sizes])
        if run.sums:
            notes.append("the module returns no loss: the sum of its outputs is differentiated")
        document = describe_module(name, traced, parts, inputs, run)
    return {
        "schema_version": SCHEMA_VERSION,
        **document,
        "precision": precision,
        "device": device,
        "passes": {"none": passes.get("none", passes.get("full")), **passes},
        "notes": notes,
        "weight_bytes": float(kept.itemsize),
    }


def _fake_copy(module: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """Return a copy of a module whose tensors have shapes only; shared ones stay shared."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for value in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
            if not isinstance(value, Tensor) or id(value) in memo:
                continue
            if type(value) not in (Tensor, nn.Parameter):
                raise InputError(
                    f"{type(value).__name__} parameters cannot be traced; check the module before "
                    "it is sharded or quantised"
                )
            shape = torch.empty(value.shape, dtype=value.dtype, device="cpu")
            memo[id(value)] = (
                nn.Parameter(shape, value.requires_grad)
                if isinstance(value, nn.Parameter)
                else shape
            )
    copied: nn.Module = copy.deepcopy(module, memo)
    return copied.train()
