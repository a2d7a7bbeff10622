"""Step times and memory peaks of a run in this process."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any, Final

from planner.observation.run_row import Measured

WARM_UP: Final = 3  # steps before the first one that counts: compilation, allocator, caches


class StepRecorder:
    """Times between the ends of optimizer steps; the median of those after the warm-up.

    A step that an evaluation or a checkpoint follows is left out (``pause``). Kernels run
    behind the host, but no further than a step or so, which the median of many steps hides.
    """

    def __init__(self, warm_up: int = WARM_UP) -> None:
        self.warm_up, self.count = warm_up, 0
        self.intervals: list[float] = []
        self._last: float | None = None

    def start(self) -> None:
        """Begin the first step."""
        self._last = time.perf_counter()
        cuda = _cuda()
        if cuda is not None:
            cuda.reset_peak_memory_stats()

    def step(self) -> None:
        """End an optimizer step, and begin the next one."""
        now = time.perf_counter()
        self.count += 1
        if self._last is not None and self.count > self.warm_up:
            self.intervals.append(now - self._last)
        self._last = now

    def pause(self) -> None:
        """Leave out the time until the end of the next step."""
        self._last = None

    def measured(self, *, out_of_memory: bool = False) -> Measured:
        """Return the measurements so far."""
        step = statistics.median(self.intervals) if self.intervals else None
        allocated = reserved = used = None
        cuda = _cuda()
        if cuda is not None:
            allocated, reserved = cuda.max_memory_allocated(), cuda.max_memory_reserved()
            free, total = cuda.mem_get_info()
            used = total - free
        return Measured(step, len(self.intervals), allocated, reserved, used, out_of_memory)


def _cuda() -> Any:
    """Return torch.cuda where this process computes on it."""
    torch = sys.modules.get("torch")
    cuda = None if torch is None else torch.cuda
    return cuda if cuda is not None and cuda.is_available() and cuda.is_initialized() else None


def versions(*packages: str) -> str:
    """Return the versions of those packages that are installed: "transformers 5.23.0, torch 2.13".

    >>> versions("no-such-package", "numpy").startswith("numpy ")
    True
    """
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in packages:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
