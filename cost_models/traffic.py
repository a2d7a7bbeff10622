"""How many collectives of one kind, and how many bytes they move."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.arrays import Real


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
