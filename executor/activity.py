"""Activity log of this rank: the collectives it entered, and its current pass.

Kept in memory with one append per collective (about a microsecond), and read only when a rank seems
to hang: see ``watchdog``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from executor.compat import observing_collectives

BACKGROUND_THREAD: Final = "checkpoint"  # thread whose collectives are not part of a step


class CollectiveCall(NamedTuple):
    """One collective that was entered, or one message that was sent or awaited."""

    group: str  # name of the process group
    kind: str
    peer: int | None  # of a message: the other rank in the group


class ActivityLog:
    """Collectives of the current step and of the two before."""

    def __init__(self) -> None:
        self.step: int | None = None  # counted from 1; None: before the first
        self.action: Any = None  # the pass of the pipeline: kind, stage, microbatch
        self.calls: list[CollectiveCall] = []
        self.previous: tuple[list[CollectiveCall], list[CollectiveCall]] = (
            [],
            [],
        )  # of the last two steps
        self.waits = 0  # calls that are waiting for a collective
        self.beats = 0  # heartbeats where no collective runs

    def begin(self, step: int) -> None:
        """Start the log of a step."""
        self.previous, self.calls = (self.calls, self.previous[0]), []
        self.step, self.action = step, None

    def progress(self) -> tuple[Any, ...]:
        """Return a value that changes whenever the rank makes progress."""
        return self.step, self.action, len(self.calls), self.waits, self.beats

    def beat(self) -> None:
        """Record progress outside collectives: reading, writing, evaluating.

        Meanwhile no other rank counts as hanging: it may be waiting for this one.
        """
        self.beats += 1

    def record(self, group: str, kind: str, peer: int | None) -> None:
        """Record that a collective is entered, unless training does not wait for it."""
        if threading.current_thread().name != BACKGROUND_THREAD:
            self.calls.append(CollectiveCall(group, kind, peer))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record every collective of this process inside the context."""

        def wait(change: int) -> None:
            self.waits += change

        with observing_collectives(self.record, wait):
            yield


ACTIVITY = ActivityLog()  # of this process
