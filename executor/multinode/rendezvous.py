"""Rendezvous of the nodes of a run: members, restarts, and the end.

Node 0 hosts the store (a TCPStore in the process that the user started); if it fails, the run ends.
An attempt begins when every node has announced itself and node 0 has published the start message.
It ends when a node reports so, or has been silent for too long.
"""

from __future__ import annotations

import datetime
import json
import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Final

from executor.multinode.nodes import NodeSettings
from hardware_profiles.errors import InputError, RunError

BEAT_SECONDS: Final = 1.0
SILENCE_SECONDS: Final = 20.0  # after which a node counts as lost
CAUSE_SECONDS: Final = 6.0  # for all nodes to report why their ranks ended
NODE_0_LOST: Final = "node 0 is lost: continue with --resume on the remaining nodes"


class NodeRendezvous:
    """One node's connection to the rendezvous store."""

    def __init__(self, nodes: NodeSettings) -> None:
        import torch.distributed as dist

        self.nodes = nodes
        self.is_lost = False
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
    def is_leader(self) -> bool:
        """Whether this is node 0."""
        return self.nodes.rank == 0

    def publish(self, key: str, value: Any) -> None:
        """Publish a message."""
        self._call(lambda: self.store.set(key, json.dumps(value)))

    def read(self, key: str) -> Any:
        """Return a message, None if it is not published yet."""
        return self._call(
            lambda: json.loads(self.store.get(key)) if self.store.check([key]) else None
        )

    def wait(self, key: str, seconds: float | None = None) -> Any:
        """Return a message as soon as it is published; None after the timeout."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while (value := self.read(key)) is None:
            if deadline is not None and time.monotonic() > deadline:
                return None
            time.sleep(0.1)
        return value

    def gather(self, key: str, ranks: Collection[int], seconds: float) -> dict[int, Any]:
        """Return the messages of all nodes that published one in time."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while len(found) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks:
                if rank not in found and (value := self.read(f"{key}/{rank}")) is not None:
                    found[rank] = value
            time.sleep(0.1)
        return found

    def _call(self, function: Callable[[], Any]) -> Any:
        """Ask the store; a question that the network swallows is never answered."""
        if self.is_leader:
            return function()
        if self.is_lost:
            raise RunError(NODE_0_LOST)
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put((function(),))
            except (RuntimeError, ValueError):
                answers.put(None)

        threading.Thread(target=ask, daemon=True, name="rendezvous").start()
        try:
            answer = answers.get(timeout=SILENCE_SECONDS)
        except queue.Empty:
            self.is_lost, answer = True, None
        if answer is None:
            raise RunError(NODE_0_LOST)
        return answer[0]


class Heartbeat:
    """Publishes heartbeats of this node, and ends an attempt that ended elsewhere."""

    def __init__(
        self,
        rendezvous: NodeRendezvous,
        attempt: int,
        members: Collection[int],
        end: Callable[[], None],
    ) -> None:
        self.rendezvous, self.attempt, self.end = rendezvous, attempt, end
        self.others = [rank for rank in members if rank != rendezvous.nodes.rank]
        self.over: str | None = None  # why the attempt ended elsewhere
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")

    def __enter__(self) -> Heartbeat:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join()

    def _beat(self) -> None:
        rendezvous, rank = self.rendezvous, self.rendezvous.nodes.rank
        last_beats: dict[int, tuple[Any, float]] = {}
        beats = 0
        while not self.stopped.wait(BEAT_SECONDS):
            try:
                beats += 1
                rendezvous.publish(f"{self.attempt}/beat/{rank}", beats)
                reason = rendezvous.read(f"{self.attempt}/over")
                if reason is None and rendezvous.is_leader:
                    reason = self._lost(last_beats) or self._back()
            except RunError as error:
                reason = str(error)
            if reason is not None:
                self.over = reason
                self.end()
                return

    def _lost(self, last_beats: dict[int, tuple[Any, float]]) -> str | None:
        """Return a description of a node that has been silent for too long."""
        now = time.monotonic()
        for rank in self.others:
            beat = self.rendezvous.read(f"{self.attempt}/beat/{rank}")
            if rank not in last_beats or last_beats[rank][0] != beat:
                last_beats[rank] = beat, now
            elif now - last_beats[rank][1] > SILENCE_SECONDS:
                return f"node {rank} does not answer"
        return None

    def _back(self) -> str | None:
        """Return a description of a node that returned."""
        for rank in range(self.rendezvous.nodes.count):
            waiting = self.rendezvous.read(f"back/{rank}")
            if rank not in self.others and rank != 0 and waiting == self.attempt:
                return f"node {rank} is back"
        return None
