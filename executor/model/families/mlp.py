"""Dense feed-forwards: two matrices, or three with a gate."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from executor.model.families.description import FeedForward, Layer
from executor.model.families.linears import columns, row


def gated(gate: str, up: str, down: str, activation: str = "act_fn") -> FeedForward:
    """Activation of the gate times up projection (Shazeer, arXiv:2002.05202)."""

    def forward(module: Any, layer: Layer, x: Tensor) -> Tensor:
        opened, lifted = columns(
            layer.axis, x, module.get_submodule(gate), module.get_submodule(up)
        )
        inner = module.get_submodule(activation)(opened) * lifted
        return row(layer.axis, inner, module.get_submodule(down))

    return forward


def plain(up: str, down: str, activation: str = "act") -> FeedForward:
    """Two matrices around an activation."""

    def forward(module: Any, layer: Layer, x: Tensor) -> Tensor:
        (inner,) = columns(layer.axis, x, module.get_submodule(up))
        return row(layer.axis, module.get_submodule(activation)(inner), module.get_submodule(down))

    return forward


def fused_gated(gate_up: str, down: str, activation: str = "activation_fn") -> FeedForward:
    """The gated feed-forward with one matrix for gate and up projection."""

    def forward(module: Any, layer: Layer, x: Tensor) -> Tensor:
        (both,) = columns(layer.axis, x, module.get_submodule(gate_up))
        opened, lifted = both.chunk(2, -1)
        return row(
            layer.axis,
            lifted * module.get_submodule(activation)(opened),
            module.get_submodule(down),
        )

    return forward
