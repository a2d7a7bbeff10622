"""Number and bytes of collectives of one kind, and the options of trainers that change them."""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from cost_models.arrays import Flag, Real


class Traffic(Struct, frozen=True):
    """Collectives of one kind on one axis in one step."""

    count: Real
    size: Real  # bytes, in total

    def __add__(self, other: Traffic) -> Traffic:
        """Add counts and bytes."""
        return Traffic(self.count + other.count, self.size + other.size)

    def times(self, repeats: Real) -> Traffic:
        """Multiply counts and bytes."""
        return Traffic(self.count * repeats, self.size * repeats)


class TrafficOptions(Struct, frozen=True):
    """Communication choices in which trainers differ; the defaults are the bundled executor's."""

    gather_bytes: float | None = (
        None  # bytes per element that a layer casts before gathering (fp8); None: c
    )
    regathers_inputs: bool = (
        True  # gathers inputs of column-parallel matrices again instead of saving them
    )
    gathers_per_matrix: bool = False  # one gather for each matrix, not for each shared input
    gathers_logits: bool = False  # over the vocabulary, before the loss
    matrix_share: float = 1.0  # of c bytes, in which ZeRO gathers the matrices of layers (fp8)
    reduces_once: Flag = False  # gradients stay unsharded until the last micro-batch (no_sync)
    all_reduces: bool = False  # gradients under ZeRO-1 and 2, instead of scattering their sum


EXECUTOR_OPTIONS: Final = TrafficOptions()


def no_traffic(rows: int) -> Traffic:
    """Return columns of no collectives."""
    return Traffic(np.zeros(rows), np.zeros(rows))
