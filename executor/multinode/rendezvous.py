"""Where the nodes of a run agree: who takes part, when to begin again, and how it ended.

Node 0 keeps the words (a TCPStore in the process that the user started); if it goes, the run ends.
An attempt begins when every node has announced itself and node 0 has said what to start. It is over
when a node says so, or has not been heard of for a while.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Final

from executor.multinode.nodes import Nodes
from hardware_profiles.errors import InputError, RunError

BEAT_SECONDS: Final = 1.0
SILENCE_SECONDS: Final = 20.0  # after which a node counts as lost
CAUSE_SECONDS: Final = 2.0  # for the node with the cause to speak after those that saw its effect
GONE: Final = "node 0 is gone: go on with --resume on the nodes that are left"


class Meeting:
    """One node's side."""

    def __init__(self, nodes: Nodes) -> None:
        import torch.distributed as dist

        self.nodes = nodes
        try:
            self.store = dist.TCPStore(
                nodes.host,
                nodes.port,
                is_master=nodes.rank == 0,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=nodes.timeout),
            )
        except Exception as error:  # torch's own network errors differ between its versions
            what = "cannot be opened" if nodes.rank == 0 else "node 0 does not answer there"
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"--rendezvous {nodes.place}: {what}: {reason}") from None

    @property
    def leads(self) -> bool:
        """Whether this is node 0."""
        return self.nodes.rank == 0

    def say(self, key: str, value: Any) -> None:
        """Leave a word for the others."""
        self._call(lambda: self.store.set(key, json.dumps(value)))

    def hear(self, key: str) -> Any:
        """Return a word, None if nobody has left it yet."""
        return self._call(
            lambda: json.loads(self.store.get(key)) if self.store.check([key]) else None
        )

    def wait(self, key: str, seconds: float | None = None) -> Any:
        """Return a word as soon as it is there; None if it did not come in time."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while (value := self.hear(key)) is None:
            if deadline is not None and time.monotonic() > deadline:
                return None
            time.sleep(0.1)
        return value

    def gather(self, key: str, ranks: Collection[int], seconds: float) -> dict[int, Any]:
        """Return the words of all nodes that left one in time."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while len(found) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks:
                if rank not in found and (value := self.hear(f"{key}/{rank}")) is not None:
                    found[rank] = value
            time.sleep(0.1)
        return found

    def _call(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except (RuntimeError, ValueError):
            raise RunError(GONE) from None


class Pulse:
    """Tells the others that this node lives, and ends an attempt that is over elsewhere."""

    def __init__(
        self, meeting: Meeting, attempt: int, members: Collection[int], end: Callable[[], None]
    ) -> None:
        self.meeting, self.attempt, self.end = meeting, attempt, end
        self.others = [rank for rank in members if rank != meeting.nodes.rank]
        self.over: str | None = None  # why the attempt ended elsewhere
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._beat, daemon=True, name="pulse")

    def __enter__(self) -> Pulse:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join()

    def _beat(self) -> None:
        meeting, rank = self.meeting, self.meeting.nodes.rank
        heard: dict[int, tuple[Any, float]] = {}
        beats = 0
        while not self.stopped.wait(BEAT_SECONDS):
            try:
                beats += 1
                meeting.say(f"{self.attempt}/beat/{rank}", beats)
                reason = meeting.hear(f"{self.attempt}/over")
                if reason is None and meeting.leads:
                    reason = self._lost(heard) or self._back()
            except RunError as error:
                reason = str(error)
            if reason is not None:
                self.over = reason
                self.end()
                return

    def _lost(self, heard: dict[int, tuple[Any, float]]) -> str | None:
        """Return which node has not been heard of for too long."""
        now = time.monotonic()
        for rank in self.others:
            beat = self.meeting.hear(f"{self.attempt}/beat/{rank}")
            if rank not in heard or heard[rank][0] != beat:
                heard[rank] = beat, now
            elif now - heard[rank][1] > SILENCE_SECONDS:
                return f"node {rank} does not answer"
        return None

    def _back(self) -> str | None:
        """Return which node wants to take part again."""
        for rank in range(self.meeting.nodes.count):
            waiting = self.meeting.hear(f"back/{rank}")
            if rank not in self.others and rank != 0 and waiting == self.attempt:
                return f"node {rank} is back"
        return None
