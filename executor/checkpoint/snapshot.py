"""Copies in host memory of what a rank writes, taken between two steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from executor.checkpoint.index import STATE, WEIGHTS
from executor.training.optimizer import Held
from executor.training.trainer import Trainer

Files = dict[str, dict[str, Tensor]]  # file of the rank -> name in it -> tensor


class Snapshot:
    """Copies this rank's share; the memory is used again by the next one."""

    def __init__(self, trainer: Trainer, share: Sequence[Held]) -> None:
        self.trainer, self.share = trainer, share
        self.memory: dict[str, Tensor] = {}

    def take(self) -> Files:
        """Return the copies: master weights, and what the optimizer remembers of them."""
        state = {
            state_name(key, h.layout.name): value
            for h in self.share
            for key, value in self.trainer.optimizer.state(h).items()
        }
        copies = {
            # one after the other: a matrix in 4 bits is unpacked for it
            WEIGHTS: {
                h.layout.name: self._copy(f"{WEIGHTS}/{h.layout.name}", h.saved())
                for h in self.share
            },
            STATE: {name: self._copy(f"{STATE}/{name}", value) for name, value in state.items()},
        }
        copies = {kind: tensors for kind, tensors in copies.items() if tensors}
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.device)
        return copies

    def _copy(self, key: str, tensor: Tensor) -> Tensor:
        """Return a copy on the host, in memory of the last snapshot where there is some."""
        tensor = tensor.detach()
        memory = self.memory.get(key)
        if memory is None or (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
            memory = torch.empty_like(
                tensor,
                device="cpu",
                memory_format=torch.contiguous_format,
                pin_memory=tensor.device.type == "cuda",
            )
            self.memory[key] = memory
        return memory.copy_(tensor, non_blocking=True)


def state_name(key: str, name: str) -> str:
    """Return what the optimizer's memory of a parameter is called in a file."""
    return f"{key}/{name}"
