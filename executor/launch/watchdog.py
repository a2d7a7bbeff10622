"""Ends a run that hangs, and says which rank is missing in which collective.

A thread in every rank looks now and then whether the rank got on. When one did not for the time
allowed, all ranks write down what they noted last (``breadcrumbs``) where they first met, the first
of them that still answers reads it (``hang``), and every rank ends with that line. A hang costs no
time before it happens: the training thread only notes what it enters.
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

from executor.breadcrumbs import TRAIL, Crumb, Trail
from executor.compat import ranks_of_group, set_timeout, store_of_the_world
from executor.launch.hang_report import HANG, Report, explain
from executor.parallel.mesh import NO_LIMIT, connect, local_device
from executor.processes.reporter import Reporter
from executor.training.trainer import Trainer
from hardware_profiles.errors import RunError

LONGEST_POLL: Final = 10.0
OUR_ROOT: Final = Path(__file__).parents[2]
CALLED: Final = "watchdog/called"
VERDICT: Final = "watchdog/verdict"
BEATS: Final = "watchdog/beats"
LOOK_SECONDS: Final = 0.1  # between two looks at what the others said

Fail = Callable[[RunError], Any]


class Stillness:
    """For how long nothing moved: neither this rank, nor what another one has to do alone."""

    def __init__(self, poll: float, mark: Any, now: float) -> None:
        self.poll, self.mark, self.looked = poll, mark, now
        self.beats = 0  # of all ranks
        self.still = 0.0

    def look(self, now: float, mark: Any, beats: int | None = None) -> float:
        """Return the seconds; ``beats`` None: not known at the moment.

        Where more time went by than between two looks, this process was stopped itself, or its
        machine slept: that is no waiting.
        """
        self.still += min(now - self.looked, 2 * self.poll)
        self.looked = now
        if mark != self.mark or beats not in (None, self.beats):
            self.still = 0.0
        self.mark, self.beats = mark, self.beats if beats is None else beats
        return self.still


class Watchdog:
    """Watches this rank; needs the default process group."""

    def __init__(self, trail: Trail, seconds: float, fail: Fail) -> None:
        self.trail, self.seconds, self.fail = trail, seconds, fail
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.poll = min(LONGEST_POLL, seconds / 5)
        self.grace = 2 * self.poll + 2.0  # for the other ranks to hear of it and to answer
        self.main = threading.get_ident()
        self.axes: dict[tuple[int, ...], str] = {}  # by ranks of the process group
        self.store = store_of_the_world()
        self.store.set(f"watchdog/process/{self.rank}", f"process {os.getpid()}, {platform.node()}")
        self.ended = threading.Event()
        self.talks = ThreadPoolExecutor(1)  # the store itself may hang
        self.thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def know(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """Learn the names of the axes; of two that span the same ranks the first counts."""
        for axis, group in groups.items():
            self.axes.setdefault(tuple(dist.get_process_group_ranks(group)), axis)

    def start(self) -> None:
        """Begin to watch."""
        self.thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        self.ended.set()
        self.thread.join()
        self.talks.shutdown(wait=False)

    def _watch(self) -> None:
        stillness = Stillness(self.poll, self.trail.mark(), time.monotonic())
        told = self.trail.beats
        asked: Future[tuple[bool, int]] | None = None
        while not self.ended.wait(self.poll):
            called, beats = False, None
            answered = asked is None or asked.done()
            if asked is not None and asked.done() and asked.exception() is None:
                called, beats = asked.result()
            still = stillness.look(time.monotonic(), self.trail.mark(), beats)
            if answered:
                told, new = self.trail.beats, self.trail.beats - told
                asked = self.talks.submit(self._ask, new)
            if called or still > self.seconds:
                self._end(still)

    def _ask(self, beats: int) -> tuple[bool, int]:
        """Tell of this rank's beats; return whether a rank calls, and the beats of all ranks."""
        if beats:
            self.store.add(BEATS, beats)
        of_all = int(self.store.get(BEATS)) if self.store.check([BEATS]) else 0
        return self.store.check([CALLED]), of_all

    def _end(self, still: float) -> None:
        """Find out with the others what happened, tell it and end this process."""
        try:
            words = self.talks.submit(self._settle, still).result(timeout=4 * self.grace)
        except NoAnswer:
            words = (
                f"{HANG}rank {self.rank} waited for {still:.0f} s in "
                f"{self.report().collective}, and the process where the ranks first met (rank 0, "
                "or torchrun) does not answer: stopped, or its machine is gone"
            )
        except Exception as error:  # the connection broke: another rank has ended already
            if self.ended.wait(self.grace):
                return
            words = (
                f"{HANG}rank {self.rank} waited for {still:.0f} s in {self.report().collective}; "
                f"the other ranks cannot be asked: {error}"
            )
        self.fail(RunError(words))
        os._exit(RunError.exit_code)

    def _settle(self, still: float) -> str:
        """Exchange reports with the other ranks; return what to say."""
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
            found = [Report(**report) for report in reports.values()]
            self.store.set(VERDICT, explain(found, processes, longest))
        for _ in self._looks():
            if self.store.check([VERDICT]):
                words: str = self.store.get(VERDICT).decode()
                return words
        return f"{HANG}rank {min(reports)} ended while the ranks looked for the reason"

    def _collected(self) -> dict[int, dict[str, Any]]:
        """Return the reports of all ranks that answer in time."""
        reports: dict[int, dict[str, Any]] = {}
        for _ in self._looks():
            for rank in range(self.world_size):
                key = f"watchdog/report/{rank}"
                if rank not in reports and self.store.check([key]):
                    reports[rank] = json.loads(self.store.get(key))
            if len(reports) == self.world_size:
                break
        return reports

    def _looks(self) -> Iterator[None]:
        """Look again and again, for ``grace`` seconds in which this process runs."""
        for _ in range(round(self.grace / LOOK_SECONDS)):
            yield
            time.sleep(LOOK_SECONDS)

    def report(self) -> Report:
        """Return what this rank did last."""
        trail = self.trail
        crumbs = list(trail.crumbs)
        entered = Counter(self._axis(c) for c in crumbs if c.peer is None)
        members = {self._axis(c): _members(c) for c in {c.group: c for c in crumbs}.values()}
        last = crumbs[-1] if crumbs else None
        action = trail.action
        where, waits = _place(self.main)
        left_out, ago = self._left_out(crumbs, *trail.before)
        return Report(
            rank=self.rank,
            step=trail.step or 0,
            doing=None if action is None else f"{action.kind} of micro-batch {action.microbatch}",
            where=where,
            waits=waits or trail.waits > 0,
            last=None if last is None else self._axis(last),
            last_kind=None if last is None else last.kind,
            entered=dict(entered),
            members={axis: members[axis] for axis in entered},
            sent=self._messages(crumbs, "send"),
            awaited=self._messages(crumbs, "recv"),
            left_out=left_out,
            left_out_of=(trail.step or 0) - ago,
        )

    def _axis(self, crumb: Crumb) -> str:
        return self.axes.get(tuple(_members(crumb)), crumb.group)

    def _messages(self, crumbs: list[Crumb], kind: str) -> dict[str, int]:
        """Count messages by the other end's global rank."""
        messages = [c for c in crumbs if c.kind == kind and c.peer is not None]
        return dict(Counter(str(_members(c)[c.peer or 0]) for c in messages))

    def _left_out(
        self, crumbs: list[Crumb], last_step: list[Crumb], step_before: list[Crumb]
    ) -> tuple[dict[str, int], int]:
        """Return what an earlier step had and a later one did not, and how many steps ago."""
        if crumbs and last_step:
            last = (crumbs[-1].group, crumbs[-1].kind)
            nth = sum((c.group, c.kind) == last for c in crumbs)
            same = [i for i, c in enumerate(last_step) if (c.group, c.kind) == last]
            if len(same) >= nth:
                found = self._fewer(crumbs, last_step[: same[nth - 1] + 1])
                if found:
                    return found, 0
        return self._fewer(last_step, step_before), 1

    def _fewer(self, crumbs: list[Crumb], before: list[Crumb]) -> dict[str, int]:
        missing = Counter(self._axis(c) for c in before if c.peer is None)
        missing.subtract(Counter(self._axis(c) for c in crumbs if c.peer is None))
        return {axis: count for axis, count in missing.items() if count > 0}


def _members(crumb: Crumb) -> list[int]:
    """Return the global ranks of the process group of a crumb."""
    return ranks_of_group(crumb.group)


def _place(thread: int) -> tuple[str, bool]:
    """Return in which of our lines a thread is, and whether it waits for a GPU."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
    waits = bool(stack) and stack[-1].name == "synchronize"
    for entry in reversed(stack):
        path = Path(entry.filename)
        if path.is_relative_to(OUR_ROOT):
            return f"{path.relative_to(OUR_ROOT)}:{entry.lineno} ({entry.name})", waits
    return "no code of ours", waits


@contextmanager
def watched(trail: Trail, seconds: float, fail: Fail) -> Iterator[Watchdog | None]:
    """Watch this rank meanwhile; ``seconds`` = 0: do not."""
    if seconds == 0:
        yield None
        return
    dog = Watchdog(trail, seconds, fail)
    with trail.recorded():
        dog.start()
        try:
            yield dog
        finally:
            dog.stop()


@contextmanager
def supervised(
    tell: Reporter, seconds: float, rank_order: Sequence[int] | None = None
) -> Iterator[Callable[[Trainer], None]]:
    """Join the other ranks and watch this one; what is yielded takes the trainer once it is made.

    From then on the trainer hears the signals that ask it to stop.
    """
    connect(local_device(), rank_order)
    set_timeout(NO_LIMIT)
    with watched(TRAIL, seconds, tell.fail) as watchdog:

        def ready(trainer: Trainer) -> None:
            if watchdog is not None:
                watchdog.know(trainer.grid.groups())
            if tell.stop is not None:
                tell.stop.when_heard(trainer.request_stop)

        yield ready
