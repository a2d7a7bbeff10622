"""Host copies of the tensors that a rank writes, taken between two steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from executor.checkpoint.format.index import STATE, WEIGHTS, state_name
from executor.training.optimizer import ParameterShard
from executor.training.trainer import Trainer

Files = dict[str, dict[str, Tensor]]  # file of the rank -> name in it -> tensor


class Snapshot:
    """Copies this rank's tensors; the memory is reused by the next snapshot."""

    def __init__(self, trainer: Trainer, share: Sequence[ParameterShard]) -> None:
        self.trainer, self.share = trainer, share
        self.memory: dict[str, Tensor] = {}

    def take(self) -> Files:
        """Return the copies: master weights, and their optimizer state."""
        state = {
            state_name(key, h.layout.name): value
            for h in self.share
            for key, value in self.trainer.optimizer.state(h).items()
        }
        copies = {
            # in turn: a 4-bit matrix is unpacked for its copy
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
        """Return a copy on the host, in memory of the last snapshot where possible."""
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
