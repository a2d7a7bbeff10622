"""Signals that request a clean stop: SIGTERM, the scheduler's pre-emption signal, a lost terminal.

The first one is recorded: the rank stops after the current step, together with all others. A later
one ends the process at once. Both work while the rank waits inside a collective, where Python's own
handlers would not run: a thread reads the signals from a pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from hardware_profiles.errors import InputError

REPEAT_SECONDS: Final = 2.0  # torchrun repeats signals that the scheduler sent to every process
ALLOWED: Final = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU")


def signal_number(name: str) -> int:
    """Return the number of a signal such as USR1 or SIGUSR1.

    >>> signal_number("usr1") == signal.SIGUSR1
    True
    """
    full = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
    if full not in ALLOWED:
        raise InputError(f"{name!r} (must be one of {', '.join(ALLOWED)})")
    return int(signal.Signals[full])


def stop_numbers(*numbers: int) -> frozenset[int]:
    """Return the signals that request a stop: these, SIGTERM, SIGHUP (a lost terminal) and SIGQUIT.

    Without the last two where this process was started to ignore them, as by nohup.
    """
    terminal = (signal.SIGHUP, signal.SIGQUIT)
    heard = [int(number) for number in terminal if signal.getsignal(number) != signal.SIG_IGN]
    return frozenset((*numbers, int(signal.SIGTERM), *heard))


class StopSignals:
    """Signal handlers of this process; created in its main thread."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = frozenset(numbers)
        self.received: int | None = None
        self.received_at = 0.0
        self.callback: Callable[[], None] = lambda: None  # called once, in a thread
        ours, kernels = socket.socketpair()
        kernels.setblocking(False)
        self.ends = ours, kernels
        signal.set_wakeup_fd(kernels.fileno(), warn_on_full_buffer=False)
        for number in self.numbers:
            signal.signal(number, _noted)
        threading.Thread(target=self._listen, args=(ours,), daemon=True, name="signals").start()

    def on_signal(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at the first signal, or now if one was received."""
        self.callback = callback
        if self.received is not None:
            callback()

    def _listen(self, ours: socket.socket) -> None:
        while received := ours.recv(1):
            if received[0] in self.numbers:
                self._on_number(received[0])

    def _on_number(self, number: int) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self.received_at = number, now
            self.callback()
        elif now - self.received_at > REPEAT_SECONDS:
            os._exit(128 + number)


class Relay:
    """Forwards signals of the process that started the ranks to them.

    While some ranks are missing, and at a later signal, it interrupts this process instead.
    """

    def __init__(self, numbers: Iterable[int], ranks: int) -> None:
        self.numbers = frozenset(numbers)
        self.ranks = ranks
        self.processes: dict[int, int] = {}  # by rank
        self.received: int | None = None
        self.received_at = 0.0
        self.own = os.getpid()

    def __enter__(self) -> Relay:
        self.before = {n: signal.signal(n, self._on_number) for n in self.numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def add(self, rank: int, process: int) -> None:
        """Register a rank that handles signals, possibly a restarted one."""
        self.processes[rank] = process
        if self.received is not None:
            _send(process, self.received)

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self.processes.values():
            _send(process, signal.SIGKILL)

    def _on_number(self, number: int, _: object) -> None:
        if os.getpid() != self.own:  # a rank that was just forked
            return
        now = time.monotonic()
        if self.received is None and len(self.processes) == self.ranks:
            self.received, self.received_at = number, now
            for process in self.processes.values():
                _send(process, number)
        elif self.received is None or now - self.received_at > REPEAT_SECONDS:
            raise KeyboardInterrupt


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _noted(*_: object) -> None:
    """Do nothing: the signal's number is already in the pipe."""
