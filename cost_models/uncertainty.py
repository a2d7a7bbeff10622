"""How far predictions were off, as the half-width of a 90 % interval, relative to the prediction.

Each number comes from the errors that a command in this repository prints; none is a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hardware_profiles.schema import Accelerator


@dataclass(frozen=True, slots=True)
class HalfWidth:
    """A relative half-width and where it comes from."""

    value: float
    source: str


# 90th percentile of the absolute error on published runs of that architecture, rounded up
TIME_BY_ARCHITECTURE: Final[Mapping[str, HalfWidth]] = {
    "Ampere": HalfWidth(0.10, "python -m benchmarks.published_step_times: 22 runs on A100"),
    "Hopper": HalfWidth(
        0.30, "python -m benchmarks.published_step_times: 4 runs on H100, all predicted too fast"
    ),
}
# nobody's run was compared: the widest of the others
TIME_ELSEWHERE: Final = HalfWidth(0.30, "as Hopper; no published run was compared")
TIME_ON_CPU: Final = HalfWidth(0.5, "python -m benchmarks.here")
# 90th percentile of the traced cases: 3.1 %; the rest is for allocator slack and the libraries' own
# memory on a GPU, which no trace on a CPU shows.
MEMORY: Final = HalfWidth(0.08, "python -m benchmarks.traced_memory")


def time_half_width(accelerator: Accelerator) -> HalfWidth:
    """Return the half-width of step times on an accelerator."""
    if accelerator.device == "cpu":
        return TIME_ON_CPU
    return TIME_BY_ARCHITECTURE.get(accelerator.architecture, TIME_ELSEWHERE)


def interval(value: float, half_width: HalfWidth) -> tuple[float, float]:
    """Return the low and high end.

    >>> interval(100.0, HalfWidth(0.25, ""))
    (75.0, 125.0)
    """
    return value * (1.0 - half_width.value), value * (1.0 + half_width.value)
