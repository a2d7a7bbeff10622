"""The full Hugging Face module as a reference for the stages of a plan."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cost_models.plan_file import PlanFile
from executor.compat import causal_lm
from executor.dtypes import master_dtype
from executor.model.parameter_layout import ParameterLayout, parameter_layouts, random_tensor
from executor.model.stage import add_adapter
from executor.ops.nf4 import pack
from executor.parallel.tensor_parallel import UNSHARDED, TensorAxis


def reference_model(file: PlanFile, seed: int) -> nn.Module:
    """Return the full Hugging Face module on the CPU with the same initial values."""
    model = causal_lm(
        file.model.config,
        device="cpu",
        dtype=master_dtype(file.workload),
        attention_kernel=file.workload.attention_kernel,
    )
    table = parameter_layouts(file.model, UNSHARDED)
    dtype = master_dtype(file.workload)
    for name, layout in table.items():
        if layout.is_adapter:
            path, small, _ = name.rsplit(".", 2)
            linear = model.get_submodule(path)
            add_adapter(linear, small, layout, file.workload, dtype=dtype)
            linear.forward = partial(_adapted_forward, linear)
    with torch.no_grad():
        for name, layout in table.items():
            model.get_parameter(name).requires_grad_(not layout.frozen)
            model.get_parameter(name).copy_(_start(file, layout, seed))
    return model


def _start(file: PlanFile, layout: ParameterLayout, seed: int) -> Tensor:
    """Return a whole tensor's initial values.

    For a 4-bit tensor, those unpacked from its slices.
    """
    if not layout.quantised:
        return random_tensor(layout, seed, layout.ranges(UNSHARDED))
    full = torch.empty(layout.shape, dtype=master_dtype(file.workload))
    for rank in range(file.plan.tensor_parallel):
        pieces = layout.ranges(TensorAxis(size=file.plan.tensor_parallel, rank=rank))
        values = random_tensor(layout, seed, pieces)
        slice_ = pack(values.t() if layout.transposed else values).matrix(full.dtype)
        slice_ = slice_.t() if layout.transposed else slice_
        dim = layout.shard_dim or 0
        places = torch.cat([torch.arange(start, stop) for start, stop in pieces[dim]])
        full.index_copy_(dim, places, slice_)
    return full


def _adapted_forward(linear: Any, x: Tensor) -> Tensor:
    """Compute an adapted matrix of the reference from its definition."""
    inner = F.linear(x, linear.lora_A.weight)
    return type(linear).forward(linear, x) + linear.lora_scale * F.linear(
        inner, linear.lora_B.weight
    )
