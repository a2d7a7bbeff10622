"""How far predictions were off, as the half-width of a 90 % interval, relative to the prediction.

Each number is the 90th percentile of the absolute error of a command in this repository, rounded
up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class HalfWidth:
    """A relative half-width and the command that measured it."""

    value: float
    source: str


# time on GPUs: the two published tables
TIME_ON_GPU: Final = HalfWidth(0.15, "python -m benchmarks.published_step_times")
TIME_ON_CPU: Final = HalfWidth(0.5, "python -m benchmarks.here")
MEMORY: Final = HalfWidth(0.08, "python -m benchmarks.traced_memory")


def interval(value: float, half_width: HalfWidth) -> tuple[float, float]:
    """Return the low and high end.

    >>> interval(100.0, HalfWidth(0.1, ""))
    (90.0, 110.0)
    """
    return value * (1.0 - half_width.value), value * (1.0 + half_width.value)
