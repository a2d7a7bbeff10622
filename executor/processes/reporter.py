"""Interface of a rank to the process that started it, and supervision options."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Meta

from executor.processes.signals import Relay, StopSignals, signal_number, stop_numbers
from hardware_profiles.errors import RunError
from hardware_profiles.options import Option

FAILURES: Final = "failures"  # title of the options in the help


@dataclass(frozen=True, slots=True)
class Reporter:
    """Channels of a rank: events, failures, and stop signals."""

    emit: Callable[[dict[str, Any]], None]
    fail: Callable[[RunError], Any]  # for a thread that is about to end the process
    stop: StopSignals | None = None

    def __call__(self, event: dict[str, Any]) -> None:
        """Emit an event."""
        self.emit(event)


@dataclass(frozen=True, slots=True)
class Supervision:
    """Treatment of failed ranks, and the signal that requests a stop."""

    max_restarts: Annotated[
        int,
        Meta(ge=0, le=2**31),
        Option(
            metavar="N",
            group=FAILURES,
            help="restart failed ranks at most N times, from the last checkpoint (default: "
            "{default})",
        ),
    ] = 0
    preemption_signal: Annotated[
        int,
        Option(
            metavar="NAME",
            group=FAILURES,
            read=signal_number,
            help="stop in good order at this signal, as at SIGTERM (default: SIGUSR1)",
        ),
    ] = int(signal.SIGUSR1)

    def relay(self, ranks: int) -> Relay:
        """Return the signal relay for the ranks of this machine."""
        return Relay(self.stop_numbers(), ranks)

    def stop_numbers(self) -> frozenset[int]:
        """Return the signals that request a stop."""
        return stop_numbers(self.preemption_signal)
