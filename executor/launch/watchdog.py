"""Watchdog: ends a run that hangs, and names the missing rank and its collective.

A thread in every rank checks periodically whether the rank made progress. After the allowed time
without progress, all ranks write their last activity (``activity``) to the rendezvous store, the
first rank that still answers reads it (``hang_report``), and every rank ends with that line. The
training thread only records the collectives that it enters.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from executor.activity import ACTIVITY, ActivityLog, CollectiveCall
from executor.compat import default_store, ranks_of_group, set_timeout
from executor.launch.hang_report import HANG, HangReport, explain_hang
from executor.parallel.mesh import UNLIMITED, connect, local_device
from executor.processes.reporter import Reporter
from executor.training.trainer import Trainer
from hardware_profiles.errors import RunError

MAX_POLL_SECONDS: Final = 10.0
PROJECT_ROOT: Final = Path(__file__).parents[2]
CALLED: Final = "watchdog/called"
VERDICT: Final = "watchdog/verdict"
BEATS: Final = "watchdog/beats"
POLL_SECONDS: Final = 0.1  # between two reads of the store

Fail = Callable[[RunError], Any]


class StallTimer:
    """Time without progress: neither on this rank, nor heartbeats of another one."""

    def __init__(self, poll: float, mark: Any, now: float) -> None:
        self.poll, self.progress, self.looked = poll, mark, now
        self.beats = 0  # of all ranks
        self.still = 0.0

    def update(self, now: float, mark: Any, beats: int | None = None) -> float:
        """Return the seconds; ``beats`` None: unknown at the moment.

        A gap longer than two polls means that this process was stopped or its machine slept: it is
        not counted.
        """
        self.still += min(now - self.looked, 2 * self.poll)
        self.looked = now
        if mark != self.progress or beats not in (None, self.beats):
            self.still = 0.0
        self.progress, self.beats = mark, self.beats if beats is None else beats
        return self.still


class Watchdog:
    """Watches this rank; needs the default process group."""

    def __init__(self, activity: ActivityLog, seconds: float, fail: Fail) -> None:
        self.activity, self.seconds, self.fail = activity, seconds, fail
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.poll = min(MAX_POLL_SECONDS, seconds / 5)
        self.grace = 2 * self.poll + 2.0  # for the other ranks to notice and to answer
        self.main = threading.get_ident()
        self.axes: dict[tuple[int, ...], str] = {}  # by ranks of the process group
        self.store = default_store()
        self.store.set(f"watchdog/process/{self.rank}", f"process {os.getpid()}, {platform.node()}")
        self.ended = threading.Event()
        self.talks = ThreadPoolExecutor(1)  # the store itself may hang
        self.thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def add_axes(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """Add the names of the axes; of two axes that span the same ranks the first is used."""
        for axis, group in groups.items():
            self.axes.setdefault(tuple(dist.get_process_group_ranks(group)), axis)

    def start(self) -> None:
        """Start watching."""
        self.thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self.ended.set()
        self.thread.join()
        self.talks.shutdown(wait=False)

    def _watch(self) -> None:
        stillness = StallTimer(self.poll, self.activity.progress(), time.monotonic())
        reported = self.activity.beats
        request: Future[tuple[bool, int]] | None = None
        while not self.ended.wait(self.poll):
            called, beats = False, None
            answered = request is None or request.done()
            if request is not None and request.done() and request.exception() is None:
                called, beats = request.result()
            still = stillness.update(time.monotonic(), self.activity.progress(), beats)
            if answered:
                reported, new = self.activity.beats, self.activity.beats - reported
                request = self.talks.submit(self._exchange_beats, new)
            if called or still > self.seconds:
                self._end(still)

    def _exchange_beats(self, beats: int) -> tuple[bool, int]:
        """Add this rank's heartbeats.

        Return whether a rank reported a hang, and all ranks' heartbeats.
        """
        if beats:
            self.store.add(BEATS, beats)
        of_all = int(self.store.get(BEATS)) if self.store.check([BEATS]) else 0
        return self.store.check([CALLED]), of_all

    def _end(self, still: float) -> None:
        """Determine the cause with the other ranks, report it and end this process."""
        try:
            words = self.talks.submit(self._determine_cause, still).result(timeout=4 * self.grace)
        except NoAnswer:
            words = (
                f"{HANG}rank {self.rank} waited for {still:.0f} s in "
                f"{self.report().collective}, and the process of the rendezvous store (rank 0, "
                "or torchrun) does not answer: stopped, or its machine is down"
            )
        except Exception as error:  # connection lost: another rank has already ended
            if self.ended.wait(self.grace):
                return
            words = (
                f"{HANG}rank {self.rank} waited for {still:.0f} s in {self.report().collective}; "
                f"the other ranks cannot be queried: {error}"
            )
        self.fail(RunError(words))
        os._exit(RunError.exit_code)

    def _determine_cause(self, still: float) -> str:
        """Exchange reports with the other ranks; return the message."""
        self.store.set(CALLED, "1")
        own = json.dumps({**self.report().to_dict(), "still": still})
        self.store.set(f"watchdog/report/{self.rank}", own)
        reports = self._collected()
        if self.rank == min(reports):
            processes = [
                self.store.get(f"watchdog/process/{rank}").decode()
                for rank in range(self.world_size)
            ]
            longest = max(report.pop("still") for report in reports.values())
            found = [HangReport(**report) for report in reports.values()]
            self.store.set(VERDICT, explain_hang(found, processes, longest))
        for _ in self._polls():
            if self.store.check([VERDICT]):
                words: str = self.store.get(VERDICT).decode()
                return words
        return f"{HANG}rank {min(reports)} ended while the ranks looked for the reason"

    def _collected(self) -> dict[int, dict[str, Any]]:
        """Return the reports of all ranks that answer in time."""
        reports: dict[int, dict[str, Any]] = {}
        for _ in self._polls():
            for rank in range(self.world_size):
                key = f"watchdog/report/{rank}"
                if rank not in reports and self.store.check([key]):
                    reports[rank] = json.loads(self.store.get(key))
            if len(reports) == self.world_size:
                break
        return reports

    def _polls(self) -> Iterator[None]:
        """Yield repeatedly for ``grace`` seconds in which this process runs."""
        for _ in range(round(self.grace / POLL_SECONDS)):
            yield
            time.sleep(POLL_SECONDS)

    def report(self) -> HangReport:
        """Return the last activity of this rank."""
        activity = self.activity
        calls = list(activity.calls)
        entered = Counter(self._axis(c) for c in calls if c.peer is None)
        members = {self._axis(c): _members(c) for c in {c.group: c for c in calls}.values()}
        last = calls[-1] if calls else None
        action = activity.action
        where, waits = _place(self.main)
        left_out, ago = self._left_out(calls, *activity.previous)
        return HangReport(
            rank=self.rank,
            step=activity.step or 0,
            doing=None if action is None else f"{action.kind} of micro-batch {action.microbatch}",
            where=where,
            waits=waits or activity.waits > 0,
            last=None if last is None else self._axis(last),
            last_kind=None if last is None else last.kind,
            entered=dict(entered),
            members={axis: members[axis] for axis in entered},
            sent=self._messages(calls, "send"),
            awaited=self._messages(calls, "recv"),
            left_out=left_out,
            left_out_of=(activity.step or 0) - ago,
        )

    def _axis(self, call: CollectiveCall) -> str:
        return self.axes.get(tuple(_members(call)), call.group)

    def _messages(self, calls: list[CollectiveCall], kind: str) -> dict[str, int]:
        """Count messages by the other end's global rank."""
        messages = [c for c in calls if c.kind == kind and c.peer is not None]
        return dict(Counter(str(_members(c)[c.peer or 0]) for c in messages))

    def _left_out(
        self,
        calls: list[CollectiveCall],
        last_step: list[CollectiveCall],
        step_before: list[CollectiveCall],
    ) -> tuple[dict[str, int], int]:
        """Return the calls of an earlier step missing in a later one, and how many steps ago."""
        if calls and last_step:
            last = (calls[-1].group, calls[-1].kind)
            nth = sum((c.group, c.kind) == last for c in calls)
            same = [i for i, c in enumerate(last_step) if (c.group, c.kind) == last]
            if len(same) >= nth:
                found = self._fewer(calls, last_step[: same[nth - 1] + 1])
                if found:
                    return found, 0
        return self._fewer(last_step, step_before), 1

    def _fewer(self, calls: list[CollectiveCall], before: list[CollectiveCall]) -> dict[str, int]:
        missing = Counter(self._axis(c) for c in before if c.peer is None)
        missing.subtract(Counter(self._axis(c) for c in calls if c.peer is None))
        return {axis: count for axis, count in missing.items() if count > 0}


def _members(call: CollectiveCall) -> list[int]:
    """Return the global ranks of a call's process group."""
    return ranks_of_group(call.group)


def _place(thread: int) -> tuple[str, bool]:
    """Return a thread's current line in this project, and whether it waits for a GPU."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
    waits = bool(stack) and stack[-1].name == "synchronize"
    for entry in reversed(stack):
        path = Path(entry.filename)
        if path.is_relative_to(PROJECT_ROOT):
            return f"{path.relative_to(PROJECT_ROOT)}:{entry.lineno} ({entry.name})", waits
    return "code outside this project", waits


@contextmanager
def watched(activity: ActivityLog, seconds: float, fail: Fail) -> Iterator[Watchdog | None]:
    """Watch this rank inside the context; ``seconds`` = 0: do not."""
    if seconds == 0:
        yield None
        return
    dog = Watchdog(activity, seconds, fail)
    with activity.recording():
        dog.start()
        try:
            yield dog
        finally:
            dog.stop()


@contextmanager
def supervised(
    reporter: Reporter, seconds: float, rank_order: Sequence[int] | None = None
) -> Iterator[Callable[[Trainer], None]]:
    """Join the other ranks and watch this one; yield a function that receives the trainer.

    From then on, stop signals reach the trainer.
    """
    connect(local_device(), rank_order)
    set_timeout(UNLIMITED)
    with watched(ACTIVITY, seconds, reporter.fail) as watchdog:

        def ready(trainer: Trainer) -> None:
            if watchdog is not None:
                watchdog.add_axes(trainer.grid.groups())
            if reporter.stop is not None:
                reporter.stop.on_signal(trainer.request_stop)

        yield ready
