"""Measures while nobody else computes: on a shared machine wall-clock times say little.

The operating system counts how long its cores were busy; what our own processes did not use, others
did. A measurement that others disturbed is taken again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hardware_profiles.cluster.measurement import available_cores

T = TypeVar("T")
STAT = Path("/proc/stat")
QUIET = 0.06  # share of all cores that others may use
ATTEMPTS = 5
PATIENCE = 120.0  # seconds that an attempt waits for idle cores
WINDOW = 0.5  # seconds over which the cores are watched


def undisturbed(call: Callable[[], T], attempts: int = ATTEMPTS) -> tuple[T, float]:
    """Return what a call gives and which share of the cores others used during it.

    It is called again while others use more than ``QUIET``; the least disturbed attempt counts.
    """
    best: tuple[T, float] | None = None
    for _ in range(attempts):
        wait_for_quiet()
        begin, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds()
        result = call()
        elapsed = time.perf_counter() - begin
        others = max(0.0, (_busy_seconds() - busy) - (_own_seconds() - own))
        share = others / elapsed / available_cores()
        if best is None or share < best[1]:
            best = result, share
        if share <= QUIET:
            break
    assert best is not None
    return best


def wait_for_quiet() -> None:
    """Return once the cores idle, or when patience is over."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        busy = _busy_seconds()
        time.sleep(WINDOW)
        if (_busy_seconds() - busy) / WINDOW / available_cores() <= QUIET:
            return


def _busy_seconds() -> float:
    """Return the seconds that all cores worked for anybody; 0 where the system does not say."""
    try:
        _, *ticks = STAT.read_text(encoding="ascii").splitlines()[0].split()
        user, nice, system, _, _, irq, soft, steal, *_ = map(int, ticks)
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Return the seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])
