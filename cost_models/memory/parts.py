"""The parts of the memory of one accelerator, and the fullest of several ranks.

Units: bytes; columns of a plan table.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    moment = pick([moment for _, moment in per_rank], limiting)
    return chosen_parts([parts for parts, _ in per_rank], limiting), limiting, moment


def chosen_parts(several: Sequence[MemoryParts], number: Real) -> MemoryParts:
    """Return, plan by plan, the parts at a position of several."""
    names = MemoryParts.__struct_fields__
    return MemoryParts(**{n: pick([getattr(p, n) for p in several], number) for n in names})
