"""Readings of a log, in the units of RUNS.csv, before model and cluster are known."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from planner.observation.run_row import Measured

COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(slots=True)
class Readings:
    """Readings of one log; sizes in bytes."""

    trainer: str
    step_seconds: list[float] = field(default_factory=list)
    tokens_per_second_per_gpu: list[float] = field(default_factory=list)
    samples_per_second: list[float] = field(default_factory=list)
    allocated: float | None = None
    reserved: float | None = None
    cells: dict[str, Any] = field(default_factory=dict)  # of RUNS.csv that the log states
    out_of_memory: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured."""
        rates = self.step_seconds or self.tokens_per_second_per_gpu or self.samples_per_second
        return not (rates or self.reserved or self.allocated or self.out_of_memory)

    def measured(self, warm_up: int, tokens_each: float | None, batch: int | None) -> Measured:
        """Return the medians after the warm-up.

        ``tokens_each``: of a step, on one accelerator; ``batch``: sequences of a step. One of them
        turns rates into step times.
        """
        times = self.step_seconds
        if not times and tokens_each:
            times = [tokens_each / rate for rate in self.tokens_per_second_per_gpu if rate]
        if not times and batch:
            times = [batch / rate for rate in self.samples_per_second if rate]
        kept = times[warm_up:] if len(times) > warm_up else times[-1:]
        step = statistics.median(kept) if kept else None
        return Measured(
            step, len(kept), self.allocated, self.reserved, None, self.out_of_memory and not kept
        )


def plain_lines(text: str) -> list[str]:
    """Return the lines of a log without colours; progress bars have one line an update."""
    return COLOURS.sub("", text).replace("\r", "\n").splitlines()


def numbers(pattern: str, lines: Sequence[str]) -> list[float]:
    """Return the number behind a pattern in every line that has it."""
    found = (re.search(pattern, line) for line in lines)
    read = (_number(one[1]) for one in found if one is not None)
    return [value for value in read if math.isfinite(value)]


def _number(text: str) -> float:
    """Return the number of a text such as 1,024.5; NaN for another text."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return math.nan


def largest(pattern: str, lines: Sequence[str], unit: float) -> float | None:
    """Return the largest number behind a pattern in bytes; None without one."""
    values = numbers(pattern, lines)
    return max(values) * unit if values else None
