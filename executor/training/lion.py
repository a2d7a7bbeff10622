"""Lion (Chen et al., arXiv:2302.06675, algorithm 2): the sign of an interpolation, one state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):  # type: ignore[misc]
    """Lion, elementwise: shards of a tensor are updated as the whole tensor is.

        c = b1 m + (1 - b1) g      w = w - lr (sign c + decay w)      m = b2 m + (1 - b2) g

    All tensors at once: ``c`` is a copy of them, whatever their number.
    """

    def __init__(
        self, params: Iterable[Any], *, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": 1e-4, "betas": betas, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:
        """Update all parameters that have a gradient."""
        assert closure is None
        with torch.no_grad():
            for group in self.param_groups:
                self._update(group)

    def _update(self, group: dict[str, Any]) -> None:
        weights = [p for p in group["params"] if p.grad is not None]
        if not weights:
            return
        gradients: list[Tensor] = [p.grad for p in weights]
        momenta = [self._momentum(p) for p in weights]
        first, second = group["betas"]
        signs = torch._foreach_lerp(momenta, gradients, 1.0 - first)
        torch._foreach_sign_(signs)
        torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, signs, alpha=-group["lr"])
        del signs
        torch._foreach_lerp_(momenta, gradients, 1.0 - second)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
        momentum: Tensor = state["exp_avg"]
        return momentum
