"""The small matrices of LoRA beside a frozen matrix."""

from __future__ import annotations

from typing import Any

from torch import nn

from cost_models.plan.workload import Workload
from executor.model.layout import Layout


def add_adapter(linear: Any, small: str, layout: Layout, workload: Workload, **place: Any) -> None:
    """Put one small matrix, lora_A or lora_B, beside a matrix."""
    outputs, inputs = layout.shape
    linear.add_module(small, nn.Linear(inputs, outputs, bias=False, **place))
    linear.lora_scale = workload.adapter_alpha / workload.adapter_rank
