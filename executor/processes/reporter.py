"""How a rank talks to whoever started it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from executor.processes.signals import StopSignals
from hardware_profiles.errors import RunError


@dataclass(frozen=True, slots=True)
class Reporter:
    """What a rank is given to tell its events, and to hear that it shall stop."""

    emit: Callable[[dict[str, Any]], None]
    fail: Callable[[RunError], Any]  # for a thread that is about to end the process
    stop: StopSignals | None = None

    def __call__(self, event: dict[str, Any]) -> None:
        """Tell an event."""
        self.emit(event)
