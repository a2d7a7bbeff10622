"""Dense feed-forward blocks: two matrices, or three with a gate."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from executor.model.families.description import FeedForward, Layer
from executor.model.families.linears import column_parallel, row_parallel


def gated(gate: str, up: str, down: str) -> FeedForward:
    """Gated MLP: activation of the gate times up projection (Shazeer, arXiv:2002.05202)."""

    def forward(module: Any, layer: Layer, x: Tensor) -> Tensor:
        opened, lifted = column_parallel(
            layer.axis, x, module.get_submodule(gate), module.get_submodule(up)
        )
        inner = module.get_submodule("act_fn")(opened) * lifted
        return row_parallel(layer.axis, inner, module.get_submodule(down))

    return forward


def ungated(up: str, down: str, activation: str = "act") -> FeedForward:
    """MLP without gate: two matrices around an activation."""

    def forward(module: Any, layer: Layer, x: Tensor) -> Tensor:
        (inner,) = column_parallel(layer.axis, x, module.get_submodule(up))
        return row_parallel(
            layer.axis, module.get_submodule(activation)(inner), module.get_submodule(down)
        )

    return forward


def fused_gated(module: Any, layer: Layer, x: Tensor) -> Tensor:
    """Gated MLP with one matrix for gate and up projection."""
    (both,) = column_parallel(layer.axis, x, module.gate_up_proj)
    opened, lifted = both.chunk(2, -1)
    return row_parallel(layer.axis, lifted * module.activation_fn(opened), module.down_proj)
