"""The parts of the memory of one accelerator, and the fullest of several ranks.

Units: bytes; columns of a plan table.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from cost_models.arrays import Real, pick

# names of the parts in every answer, those of serving too
PART_WORDS: Final = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "logits",
    "kv_cache": "KV cache",
    "buffers": "temporary buffers",
    "runtime": "CUDA and allocator",
}


class MemoryParts(Struct, frozen=True):
    """Bytes on one accelerator at its peak, by kind.

    ``weights``: all copies, master weights included; ``optimizer``: the states alone; ``buffers``:
    temporary buffers; ``runtime``: CUDA and what the allocator cannot use.
    """

    weights: Real
    gradients: Real
    optimizer: Real
    activations: Real
    logits: Real
    buffers: Real
    runtime: Real

    @property
    def allocated(self) -> Real:
        """Bytes of live tensors."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.logits
            + self.buffers
        )

    @property
    def peak(self) -> Real:
        """Bytes that the device shows as used."""
        return self.allocated + self.runtime


def stack_ranks(per_rank: list[tuple[MemoryParts, Real]]) -> tuple[MemoryParts, Real, Real]:
    """Return the parts of the rank with the largest peak, that rank's position, its moment."""
    peaks = np.stack([parts.peak for parts, _ in per_rank])
    limiting = np.argmax(peaks, axis=0)
    chosen = {
        name: pick([getattr(parts, name) for parts, _ in per_rank], limiting)
        for name in MemoryParts.__struct_fields__
    }
    moment = pick([moment for _, moment in per_rank], limiting)
    return MemoryParts(**chosen), limiting, moment
