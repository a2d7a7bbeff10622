"""Optimizer offload to host memory (ZeRO-Offload, Ren et al., arXiv:2101.06840, sec. 4.1).

Moments and a copy of the weights that a rank updates live on the host, where torch's fused CPU
kernel updates them. Gradients are copied down, new weights up; the device needs no buffer, since
both copies are between existing tensors. On a CPU, host memory is the device's: weights are updated
in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from executor.ops import offload_activations
from executor.ops.offload_activations import host_copy, host_is_device
from executor.training.optimizer import Optimizer, ParameterShard


class OffloadedOptimizer(Optimizer):
    """The same optimizer over host copies of this rank's shards."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, updated=_on_host, **options)
        self.on_gpu = any(h.local.is_cuda for h in self.shards)

    def step(
        self,
        learning_rate: float,
        nonfinite: Tensor | None = None,
        factor: Tensor | None = None,
        **_: Any,
    ) -> None:
        """Copy gradients to the host, update, copy the new weights back; drop the gradients."""
        factor = self.prescaled(factor)  # before gradients are copied
        offloaded = [h for h in self.shards if self.updated[id(h)] is not h.local]
        gradients = {id(h): host_copy(h.gradient) for h in offloaded}
        self._wait()  # the host reads the copies
        host = [
            None if number is None else number.to(offload_activations.HOST)
            for number in (nonfinite, factor)
        ]
        super().step(learning_rate, *host, gradients=gradients)
        with torch.no_grad():
            for h in offloaded:
                h.local.copy_(self.updated[id(h)], non_blocking=True)
        self._wait()  # the next step overwrites the host copies

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()


def _on_host(shard: ParameterShard) -> Tensor:
    """Return the tensor updated for a shard: a host copy, or the shard itself on a CPU."""
    if host_is_device(shard.local.device):
        return shard.local
    copy = host_copy(shard.local.detach())
    if shard.local.is_cuda:
        torch.cuda.current_stream().synchronize()
    return torch.nn.Parameter(copy)
