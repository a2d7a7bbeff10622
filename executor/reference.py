"""The whole Hugging Face module, to hold a plan's stages against."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cost_models.plan_file import PlanFile
from executor.adapters import add_adapter
from executor.compat import causal_lm
from executor.layout import fresh_tensor, layouts
from executor.models import MASTER_DTYPE
from executor.tensor_parallel import WHOLE


def reference_model(file: PlanFile, seed: int) -> nn.Module:
    """Return the whole Hugging Face module on the CPU with the same start values."""
    model = causal_lm(
        file.model.config,
        device="cpu",
        dtype=MASTER_DTYPE[file.workload.precision],
        attention_kernel=file.workload.attention_kernel,
    )
    table = layouts(file.model, WHOLE)
    dtype = MASTER_DTYPE[file.workload.precision]
    for name, layout in table.items():
        if layout.is_adapter:
            path, small, _ = name.rsplit(".", 2)
            linear = model.get_submodule(path)
            add_adapter(linear, small, layout, file.workload, dtype=dtype)
            linear.forward = partial(_adapted_forward, linear)
    with torch.no_grad():
        for name, layout in table.items():
            model.get_parameter(name).requires_grad_(not layout.frozen)
            model.get_parameter(name).copy_(fresh_tensor(layout, seed, layout.ranges(WHOLE)))
    return model


def _adapted_forward(linear: Any, x: Tensor) -> Tensor:
    """What an adapted matrix of the reference gives, written out."""
    inner = F.linear(x, linear.lora_A.weight)
    return type(linear).forward(linear, x) + linear.lora_scale * F.linear(
        inner, linear.lora_B.weight
    )
