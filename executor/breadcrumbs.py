"""What this rank did last: the collectives that it entered, and the pass that it is in.

Kept in memory by one append for each collective (about a microsecond), and read only when a rank
seems to hang: see ``watchdog``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from executor.compat import watching_collectives

BESIDE: Final = "checkpoint"  # the name of a thread whose collectives are not those of a step


class Crumb(NamedTuple):
    """One collective that was entered, or one message that was sent or awaited."""

    group: str  # name of the process group
    kind: str
    peer: int | None  # of a message: the other rank, counted in the group


class Trail:
    """The crumbs of the step that runs and of the two before."""

    def __init__(self) -> None:
        self.step: int | None = None  # counted from 1; None: before the first
        self.action: Any = None  # the pass of the pipeline: kind, stage, microbatch
        self.crumbs: list[Crumb] = []
        self.before: tuple[list[Crumb], list[Crumb]] = ([], [])  # of the last step, and before it
        self.waits = 0  # calls that wait for a collective to end
        self.beats = 0  # signs of life where no collective runs

    def begin(self, step: int) -> None:
        """Start the trail of a step."""
        self.before, self.crumbs = (self.crumbs, self.before[0]), []
        self.step, self.action = step, None

    def mark(self) -> tuple[Any, ...]:
        """Return what changes whenever the rank gets on."""
        return self.step, self.action, len(self.crumbs), self.waits, self.beats

    def beat(self) -> None:
        """Note that this rank gets on with what is no collective: it reads, writes, evaluates.

        While a rank does, none of the others is thought to hang: they may wait for it.
        """
        self.beats += 1

    def enter(self, group: str, kind: str, peer: int | None) -> None:
        """Note that a collective is entered, unless training does not wait for it."""
        if threading.current_thread().name != BESIDE:
            self.crumbs.append(Crumb(group, kind, peer))

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Note every collective of this process meanwhile."""

        def wait(change: int) -> None:
            self.waits += change

        with watching_collectives(self.enter, wait):
            yield


TRAIL = Trail()  # of this process
