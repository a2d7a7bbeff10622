"""How many collectives of one kind, and how many bytes they move."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.arrays import Flag, Real


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind on one axis in one step."""

    count: Real
    size: Real  # bytes, all together

    def __add__(self, other: Traffic) -> Traffic:
        """Add counts and bytes."""
        return Traffic(self.count + other.count, self.size + other.size)

    def times(self, repeats: Real) -> Traffic:
        """Repeat everything."""
        return Traffic(self.count * repeats, self.size * repeats)


@dataclass(frozen=True, slots=True)
class TrafficHabits:
    """What trainers do differently; the default: the bundled executor."""

    gather_bytes: float | None = None  # of an element that a layer casts first (fp8); None: c
    gathers_again: bool = True  # inputs of column-cut matrices, instead of keeping them
    gathers_by_matrix: bool = False  # each matrix its input, not those that read the same
    gathers_logits: bool = False  # of all columns, before the loss
    reduces_once: Flag = False  # gradients stay whole until the last micro-batch (no_sync)
