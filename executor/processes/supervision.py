"""How the ranks of a run are looked after."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from executor.processes.signals import Relay


@dataclass(frozen=True, slots=True)
class Supervision:
    """What is done about ranks that fail, and which signals ask them to stop."""

    max_restarts: int = 0
    preemption_signal: int = signal.SIGUSR1

    def relay(self, ranks: int) -> Relay:
        """Return what passes signals on to so many ranks of this machine."""
        return Relay([self.preemption_signal], ranks)
