"""The optimizer in host memory (ZeRO-Offload, Ren et al., arXiv:2101.06840, sec. 4.1).

Moments and a copy of the weights that a rank updates live on the host, where torch's fused CPU
kernel updates them. Gradients go down, new weights come up; the device needs no buffer, since both
copies are between tensors that exist anyway. On a CPU host memory is the device's: weights are
updated where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from executor.ops.offload_activations import host_is_device
from executor.training.optimizer import Held, Optimizer


class OffloadedOptimizer(Optimizer):
    """The same optimizer over host copies of this rank's parts."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, updated=_on_host, **options)
        self.on_gpu = any(h.local.is_cuda for h in self.held)

    def step(
        self,
        learning_rate: float,
        spoiled: Tensor | None = None,
        factor: Tensor | None = None,
        **_: Any,
    ) -> None:
        """Copy gradients down, update there, copy the new weights up; drop the gradients."""
        factor = self.left_to_kernel(factor)  # before gradients are copied
        apart = [h for h in self.held if self.updated[id(h)] is not h.local]
        gradients = {id(h): host_copy(h.gradient) for h in apart}
        self._wait()  # the host reads what was copied
        host = [None if number is None else number.cpu() for number in (spoiled, factor)]
        super().step(learning_rate, *host, gradients=gradients)
        with torch.no_grad():
            for h in apart:
                h.local.copy_(self.updated[id(h)], non_blocking=True)
        self._wait()  # the next step writes here again

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()


def _on_host(held: Held) -> Tensor:
    """Return the tensor that is updated for a part: a copy in host memory where that is apart."""
    if host_is_device(held.local.device):
        return held.local
    copy = host_copy(held.local.detach())
    if held.local.is_cuda:
        torch.cuda.current_stream().synchronize()
    return torch.nn.Parameter(copy)


def host_copy(tensor: Tensor) -> Tensor:
    """Start to copy a tensor into host memory, pinned where the tensor is on a GPU."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)
