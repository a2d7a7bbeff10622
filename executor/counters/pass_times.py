"""Begin and end of every pass that a rank runs in one step, for a trace of the measured step.

A pass lasts from its own begin to that of the next one on the same rank, its waits for messages
included. On a GPU events on the compute stream are timed, on a CPU the clock of the process.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable
from typing import Any, Final

import torch

from cost_models.partition.schedules import Action

MOST: Final = 2000  # passes of a rank that are kept, and its longest waits


def time_mark(device: torch.device) -> Any:
    """Return a mark of now: of the host's clock, or a CUDA event."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two completed marks."""
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1e3


class PassTimes:
    """Times of one step's passes, from its making on; ``begin`` is called before every pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: list[tuple[Action | None, Any]] = []
        self._origin = time_mark(device)

    def begin(self, action: Action | None) -> None:
        """Record that a pass begins; None: that the last one has ended."""
        if len(self._began) <= MOST:
            self._began.append((action, time_mark(self._device)))

    def _seconds(self, when: Any) -> float:
        """Return the seconds from the begin of the step; on a GPU after a synchronisation."""
        return seconds_between(self._origin, when)

    def passes(self) -> list[dict[str, Any]]:
        """Return kind, stage, micro-batch, begin and end of each pass, in order."""
        ends = [when for _, when in self._began[1:]]
        return [
            {**action._asdict(), "begin": self._seconds(begin), "end": self._seconds(end)}
            for (action, begin), end in zip(self._began, ends, strict=False)
            if action is not None
        ]

    def waits(self, found: Iterable[tuple[str, Any, Any]]) -> list[dict[str, Any]]:
        """Return operation, begin and end of waits, the longest ones, in order of time."""
        waits: list[dict[str, Any]] = [
            {"operation": operation, "begin": self._seconds(begin), "end": self._seconds(end)}
            for operation, begin, end in found
        ]
        longest = heapq.nlargest(MOST, waits, key=lambda wait: wait["end"] - wait["begin"])
        return sorted(longest, key=lambda wait: wait["begin"])
