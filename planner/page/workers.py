"""Worker processes that answer questions: figures are plain Python, which one process computes.

A worker answers one question at a time and reports its activity meanwhile. A question that nobody
waits for any more, or that takes too long, ends with its process; a new one takes its place.
Answers are kept, so that the same question is answered once.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

from hardware_profiles.errors import InputError, ShardplanError
from hardware_profiles.progress import Activity, TimeLeft, time_words
from hardware_profiles.terminal import say
from planner.page.question import PageQuestion

LONGEST: Final = 300.0  # seconds of one question
LOOK: Final = 0.2  # seconds between two looks whether a question is still wanted
LEFT: Final = 0.05  # seconds between two looks whether a client, whose next change counts, has left
MOST_WAITING: Final = 256  # questions that wait for a worker
KEPT: Final = 512  # answers
LARGEST_KEPT: Final = 100_000  # bytes of a file that is kept
COLLECTED: Final = 50_000  # objects between two collections
WIDTH: Final = "80"  # columns of texts


class BusyError(ShardplanError):
    """Too many questions wait."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of a task, as it comes from a worker."""

    message: str
    ours: bool = False
    lasting: bool = False  # the same question has it again


NOBODY: Final = Failure("nobody waits for this answer")


def _answer_questions(connection: Connection) -> None:
    """Answer the questions of a connection, until it is closed; the body of a worker process."""
    os.environ["COLUMNS"] = WIDTH
    from hardware_profiles.progress import passed_to
    from planner.page.tasks import TASKS

    TASKS["price"](PageQuestion())  # reads the catalogues, which every question needs
    gc.freeze()
    gc.set_threshold(COLLECTED)
    while True:
        try:
            task, question = connection.recv()
        except (EOFError, OSError):
            return
        try:
            with passed_to(lambda now: connection.send(("activity", now))):
                answer = TASKS[task](question)
        except ShardplanError as error:
            answer = Failure(str(error), lasting=True)
        except Exception as error:
            say(traceback.format_exc())
            answer = Failure(f"a bug of ours: {type(error).__name__}", ours=True)
        connection.send(("answer", answer))


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C, as the processes that start meanwhile do for good: the server ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Worker:
    """One process and the connection to it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_answer_questions, args=(theirs,), daemon=True)
        with _without_interrupts():
            self.process.start()
        theirs.close()

    def ask(
        self, question: Any, activity: Callable[[Activity], None], unwanted: threading.Event
    ) -> Any:
        """Return the answer to a task and its question; the process ends if it is unwanted."""
        waited = 0.0
        try:
            self.connection.send(question)
            while waited < LONGEST and not unwanted.is_set():
                if not self.connection.poll(LOOK):
                    waited += LOOK
                    continue
                kind, value = self.connection.recv()
                if kind == "answer":
                    return value
                if kind == "activity":
                    activity(value)
        except (EOFError, OSError):
            return Failure("the process that computed the answer has ended", ours=True)
        self.end()
        if unwanted.is_set():
            return NOBODY
        return Failure(f"no answer after {LONGEST:.0f} s; ask on the command line")

    @property
    def lives(self) -> bool:
        """Whether the process runs."""
        return self.process.is_alive()

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.connection.close()


class Team:
    """Several workers with one queue.

    ``stops``: whether a question under way ends once nobody waits for it. The processes of short
    questions go on, since a new process takes longer than they do.
    """

    def __init__(self, size: int, *, stops: bool) -> None:
        self.size, self.stops = size, stops
        self.workers: list[Worker] = []
        self.idle: asyncio.LifoQueue[Worker | None] = asyncio.LifoQueue()
        self.threads = ThreadPoolExecutor(size, thread_name_prefix="worker")
        self.waiting = 0

    def start(self) -> None:
        """Start the processes."""
        for _ in range(self.size):
            self.idle.put_nowait(self._new())

    def _new(self) -> Worker:
        worker = Worker()
        self.workers.append(worker)
        return worker

    def stop(self) -> None:
        """End the processes."""
        for worker in self.workers:
            if worker.lives:
                worker.end()
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def ask(
        self, question: Any, activity: Callable[[Activity], None], unwanted: threading.Event
    ) -> Any:
        """Return the answer of the next idle worker."""
        if self.waiting >= MOST_WAITING:
            raise BusyError("too many questions wait; try again in a moment")
        self.waiting += 1
        try:
            worker = await self.idle.get()
        finally:
            self.waiting -= 1
        try:
            if unwanted.is_set():
                return NOBODY
            if worker is None or not worker.lives:
                if worker is not None:
                    self.workers.remove(worker)
                worker = self._new()
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self.threads,
                worker.ask,
                question,
                activity,
                unwanted if self.stops else threading.Event(),
            )
        finally:
            self.idle.put_nowait(worker)


class ShownActivity:
    """The last activity of a question, and the time left."""

    def __init__(self) -> None:
        self.text, self.left = "waiting for a free worker", TimeLeft()

    def update(self, activity: Activity) -> None:
        """Take a report of the worker."""
        if activity.text:
            self.text = activity.text
            self.left.update(activity, time.monotonic())

    def to_dict(self) -> dict[str, Any]:
        """Return text, seconds left and the share done (None: unknown) as JSON values."""
        if (left := self.left.seconds(time.monotonic())) is None:
            return {"text": self.text, "share": None, "left": None}
        return {"text": self.text, "share": self.left.share, "left": time_words(left)}


@dataclass(eq=False)
class PendingAnswer:
    """A question under way: its task, who waits, and its last activity."""

    future: asyncio.Task[Any]
    unwanted: threading.Event
    waiting: int = 0
    activity: ShownActivity = field(default_factory=ShownActivity)


class Answers:
    """Answers of all questions: kept ones, those under way, and those of the workers.

    Prices have workers of their own, so that no search keeps a slider waiting.
    """

    def __init__(self, workers: int, searches: int) -> None:
        self.pricing = Team(workers, stops=False)
        self.searching = Team(searches, stops=True)
        self.kept: OrderedDict[tuple[str, PageQuestion], Any] = OrderedDict()
        self.under_way: dict[tuple[str, PageQuestion], PendingAnswer] = {}

    def start(self) -> None:
        """Start the workers."""
        self.pricing.start()
        self.searching.start()

    def stop(self) -> None:
        """End the workers."""
        self.pricing.stop()
        self.searching.stop()

    def begin(self, task: str, question: PageQuestion) -> PendingAnswer:
        """Return a question under way, which begins now unless somebody else asked it."""
        key = (task, question)
        found = self.under_way.get(key)
        if found is None or found.unwanted.is_set():
            unwanted, shown = threading.Event(), ShownActivity()
            team = self.pricing if task == "price" else self.searching

            future = asyncio.ensure_future(team.ask(key, shown.update, unwanted))
            found = PendingAnswer(future, unwanted, activity=shown)
            self.under_way[key] = found
            future.add_done_callback(lambda done: self._keep(key, done))
        return found

    def _keep(self, key: tuple[str, PageQuestion], done: asyncio.Task[Any]) -> None:
        if (asked := self.under_way.get(key)) is not None and asked.future is done:
            del self.under_way[key]
        if done.cancelled() or done.exception() is not None:
            return
        answer = done.result()
        size = len(getattr(answer, "data", b""))
        lasting = not isinstance(answer, Failure) or answer.lasting
        if lasting and size <= LARGEST_KEPT:
            self.kept[key] = answer
            if len(self.kept) > KEPT:
                self.kept.popitem(last=False)

    async def get(
        self, task: str, question: PageQuestion, left: Callable[[], Any] | None = None
    ) -> Any:
        """Return an answer, or raise its error; ``left``: whether the client has left."""
        if (task, question) in self.kept:
            self.kept.move_to_end((task, question))
            answer = self.kept[task, question]
        else:
            answer = await self._wait(self.begin(task, question), left)
        if isinstance(answer, Failure):
            raise (RuntimeError if answer.ours else InputError)(answer.message)
        return answer

    async def _wait(self, pending: PendingAnswer, left: Callable[[], Any] | None) -> Any:
        """Return the answer; the question ends once nobody waits for it."""
        pending.waiting += 1
        try:
            while not pending.future.done():
                await asyncio.wait([pending.future], timeout=LEFT)
                if left is not None and not pending.future.done() and await left():
                    raise InputError("the client has left")
        finally:
            pending.waiting -= 1
            if pending.waiting == 0 and not pending.future.done():
                pending.unwanted.set()
        return pending.future.result()
