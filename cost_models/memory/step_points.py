"""Transient memory (all but weights and optimizer state) at a point of a step, and its maximum.

Units: bytes, columns of a plan table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from cost_models.arrays import Count, Flag, Real, pick
from cost_models.model.spec import ModelSpec
from cost_models.partition.stages import PipelineRank

# gradients, activations, logits, buffers; and weights that are freed, which count negative
TransientParts = tuple[Real, ...]


def total(parts: TransientParts) -> Real:
    """Return gradients + activations + logits + buffers - freed weights."""
    return sum(parts[:4], start=0.0 - parts[4])


class StepPoint(Struct, frozen=True):
    """Transient memory at one point of a step, and the plans whose steps have that point."""

    parts: TransientParts
    exists: Flag = True

    def masked(self) -> TransientParts:
        """Return the parts; 0 under plans without this point."""
        if self.exists is True:
            return self.parts
        return tuple(np.where(self.exists, part, 0.0) for part in self.parts)


def largest_point(points: Sequence[StepPoint]) -> TransientParts:
    """Return, row by row, the parts of the point with the largest total."""
    found = [point.masked() for point in points]
    if len(found) == 1:
        return found[0]
    index = np.argmax(np.stack([total(parts) for parts in found]), axis=0)
    return tuple(pick([parts[part] for parts in found], index) for part in range(5))


def backward_layers(model: ModelSpec, rank: PipelineRank) -> Count:
    """Layers of a rank that have a backward pass."""
    counts = zip(rank.kind_counts, model.kinds, strict=True)
    return sum(count for count, kind in counts if not kind.forward_only)
