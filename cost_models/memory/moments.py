"""What there is beside weights and optimizer at one place of a step, and the fullest of places.

Units: bytes, columns of a plan table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cost_models.arrays import Count, Flag, Real, pick
from cost_models.model.spec import ModelSpec
from cost_models.partition.stages import PipelineRank

# gradients, activations, logits, buffers, and weights that are not there any more
AtMoment = tuple[Real, ...]


def total(place: AtMoment) -> Real:
    """Return the bytes of a place, beside all weights and the optimizer."""
    return sum(place[:4], start=0.0 - place[4])


@dataclass(frozen=True, slots=True)
class Moment:
    """One place at one moment, where there is such a one."""

    parts: AtMoment
    there: Flag = True

    def whole(self) -> AtMoment:
        """Return the parts; nothing where it does not exist."""
        if self.there is True:
            return self.parts
        return tuple(np.where(self.there, part, 0.0) for part in self.parts)


def fullest(moments: Sequence[Moment]) -> AtMoment:
    """Return, row by row, the place with most bytes."""
    places = [moment.whole() for moment in moments]
    if len(places) == 1:
        return places[0]
    index = np.argmax(np.stack([total(place) for place in places]), axis=0)
    return tuple(pick([place[part] for place in places], index) for part in range(5))


def walked_layers(model: ModelSpec, rank: PipelineRank) -> Count:
    """Layers of a rank that a backward pass reaches."""
    counts = zip(rank.kind_counts, model.kinds, strict=True)
    return sum(count for count, kind in counts if not kind.forward_only)
