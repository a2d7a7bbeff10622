"""Status line of the command line: a long computation reports its activity and the share done.

Computations call :func:`report`, and :func:`tracked` or :func:`advance` where they know the share
that is done; nothing happens unless a command line displays a :class:`StatusLine`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Final, NamedTuple, Protocol, TextIO, TypeVar

from msgspec import Struct

from hardware_profiles.message import escaped

T = TypeVar("T")

PATIENCE: Final = 0.5  # seconds without output before the line appears
REDRAW: Final = 0.1  # seconds between two states of the line
SELDOM: Final = 30.0  # seconds of work before a line, and between two, without a terminal
ELAPSED_FROM: Final = 1.0  # seconds from which the elapsed time is shown
ERASE: Final = "\r\x1b[K"
EVIDENCE: Final = 0.5  # seconds of work from which the time left is extrapolated
LEAST: Final = 0.02  # share of the work from which it is extrapolated
GROWTH: Final = 2.0  # of a time left in a second, at most
SHORTEST: Final = 0.1  # seconds left of work that has not ended
OVERDUE: Final = 3.0  # seconds without a report after which an estimate that ended is unknown
CHANNEL: Final = "SHARDPLAN_PROGRESS"  # of the environment: the pipe to which a process reports


class Activity(NamedTuple):
    """The current activity."""

    text: str
    share: float | None = None  # of the phase that is done; None: unknown
    phase: int = 0  # the share of one phase never falls
    divisible: bool = True  # whether what is reported meanwhile tells its share


class Display(Protocol):
    """Something that shows the current activity."""

    def update(self, activity: Activity) -> None:
        """Show another activity; one without text erases it."""


class _LoopItem(NamedTuple):
    """The item of a tracked loop that is under way."""

    label: str
    begin: float  # as shares of the loop
    size: float
    divisible: bool


_shown: list[Display] = []  # the one in use, if any
_parts: list[_LoopItem] = []  # nested loops, the outermost first
_last: list[Activity] = [Activity("")]


def report(text: str, *, divisible: bool = True) -> None:
    """Name the current activity, such as ``searching 19,152 plans``.

    Outside :func:`tracked` it begins a phase, of which nothing is done yet. Not ``divisible``: the
    share that is done stays unknown, whatever parts of it tell.
    """
    if not _shown:
        return
    phase = _last[0].phase + (not _parts)
    share = _share_of_loops(0.0) if _parts else None
    labels = [part.label for part in _parts if part.label]
    _update(Activity(", ".join([*labels, text]), share, phase, divisible))


def advance(share: float) -> None:
    """Tell which share of the current activity is done."""
    if _shown and _last[0].text and _last[0].divisible and all(part.divisible for part in _parts):
        _update(_last[0]._replace(share=_share_of_loops(share)))


def tracked(
    items: Sequence[T],
    label: str = "",
    *,
    size: Callable[[T], float] = lambda _: 1.0,
    divisible: bool = True,
) -> Generator[T, None, None]:
    """Yield the items of a loop, and tell which share of them is done.

    ``label``: a format of ``number`` (from 1) and ``total``; ``size``: of an item, by which its
    share of the loop is taken; not ``divisible``: what is reported during an item tells nothing
    about the share of it that is done. Loops nest.
    """
    if not _shown or len(items) < 2:
        yield from items
        return
    sizes = [size(item) for item in items]
    whole, done, depth = math.fsum(sizes) or 1.0, 0.0, len(_parts)
    if not depth:
        _last[0] = Activity("" if label else _last[0].text, None, _last[0].phase + 1)
    for number, (item, own) in enumerate(zip(items, sizes, strict=True), 1):
        words = label.format(number=f"{number:,}", total=f"{len(items):,}")
        _parts.append(_LoopItem(words, done / whole, own / whole, divisible))
        try:
            text = ", ".join(part.label for part in _parts if part.label) or _last[0].text
            if text:
                _update(Activity(text, _share_of_loops(0.0), _last[0].phase))
            yield item
        finally:
            del _parts[depth:]
        done += own
    if depth:
        advance(1.0)


@contextmanager
def stages(*sizes: float, joint: bool = False) -> Iterator[Callable[..., None]]:
    """Yield a function that begins the next of several activities, of these relative sizes.

    They are parts of one activity, which has one share: of a loop's item or, if they are ``joint``,
    of a phase. Otherwise each is a phase of its own. Without text an activity keeps its name.
    """
    if not _parts and not joint:
        yield report
        return
    each = tracked(sizes, size=float)

    def begin(text: str = "") -> None:
        next(each, None)
        if text:
            report(text)

    nested = bool(_parts)
    try:
        yield begin
    finally:
        each.close()
    if nested:
        advance(1.0)


def _share_of_loops(share: float) -> float:
    for part in reversed(_parts):
        share = part.begin + part.size * min(share, 1.0) * part.divisible
    return share


def _update(activity: Activity) -> None:
    _last[0] = activity
    _shown[-1].update(activity)


def is_shown() -> bool:
    """Whether somebody sees what is reported."""
    return bool(_shown)


class TimeLeft:
    """Seconds that are left, extrapolated from the share that is done.

    A larger figure is approached: it grows by ``GROWTH`` a second, at most. Between two reports
    the figure falls with the clock, ever more slowly, so that it never ends before the work. It is
    unknown where hardly anything is done, and long after it should have ended.
    """

    def __init__(self) -> None:
        self.phase: int | None = None
        self.share = self.since = self.at = math.nan
        self.left: float | None = None  # at the time ``at``

    def update(self, activity: Activity, now: float) -> None:
        """Take a report; ``now``: seconds of any clock."""
        share = activity.share
        if activity.phase != self.phase:
            self.phase, self.since, self.share, self.left = activity.phase, now, 0.0, None
        if share is None or share <= self.share:
            return
        self.share = share
        if (left := self._extrapolated(now)) is None:
            return
        if (shown := self.seconds(now)) is not None and self.left is not None:
            silent = now - self.at
            most = shown * GROWTH if silent >= 1.0 else self.left * GROWTH**silent
            left = min(left, max(1.0, most))
        self.left, self.at = left, now

    def _extrapolated(self, now: float) -> float | None:
        worked = now - self.since
        if not (self.share >= LEAST and worked >= EVIDENCE):
            return None
        return max(SHORTEST, worked * (1.0 - self.share) / self.share)

    def seconds(self, now: float) -> float | None:
        """Return the seconds left; None: unknown."""
        if self.left is None and self.share < 1.0:
            self.left, self.at = self._extrapolated(now), now
        if self.left is None or now - self.at > self.left + OVERDUE:
            return None
        return self.left * math.exp(-(now - self.at) / self.left)


def time_words(seconds: float) -> str:
    """Return a time left in words.

    >>> time_words(0.2), time_words(59.5), time_words(200), time_words(4000)
    ('1 s', '60 s', '3 min', '1 h 7 min')
    """
    if seconds <= 90:
        return f"{math.ceil(seconds)} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


class _Passed(Struct, frozen=True):
    """Activities that are passed on."""

    update: Callable[[Activity], None]


@contextmanager
def passed_to(update: Callable[[Activity], None]) -> Iterator[None]:
    """Pass reported activities to a function, such as one that sends them to another process."""
    display = _Passed(update)
    _shown.append(display)
    try:
        yield
    finally:
        _hide(display)


def _hide(display: Display) -> None:
    _shown.remove(display)
    if not _shown:
        _parts.clear()  # of loops that an error ended


def clear() -> None:
    """Erase the line before other output; the next report shows it again."""
    if _shown:
        _shown[-1].update(Activity(""))


@contextmanager
def reports_of_process() -> Iterator[Mapping[str, Any]]:
    """Yield arguments for ``subprocess`` with which a process of ours reports to this one."""
    if not _shown:
        yield {"env": dict(os.environ)}
        return
    reading, writing = os.pipe()

    def listen() -> None:
        with os.fdopen(reading, encoding="utf-8") as lines:
            for line in lines:
                text, share = json.loads(line)
                if text:
                    display.update(Activity(text, share, phase))

    display, phase = _shown[-1], _last[0].phase + 1
    _last[0] = _last[0]._replace(phase=phase)
    thread = threading.Thread(target=listen, daemon=True, name="reports of a process")
    thread.start()
    try:
        yield {"env": {**os.environ, CHANNEL: str(writing)}, "pass_fds": (writing,)}
    finally:
        os.close(writing)
        thread.join(1.0)


def _to_parent(activity: Activity) -> None:
    line = json.dumps([activity.text, activity.share]) + "\n"
    try:
        os.write(int(os.environ[CHANNEL]), line.encode())
    except (OSError, ValueError):
        os.environ.pop(CHANNEL, None)


class StatusLine:
    """A context manager that shows reported activities on a terminal, and erases them at the end.

    The line appears once a command has been silent for half a second. ``lasting``: without a
    terminal; a line every SELDOM seconds, which stays.
    """

    def __init__(self, stream: TextIO, first: str = "", *, lasting: bool = False) -> None:
        self.stream, self.text = stream, first
        self.patience = SELDOM if lasting else PATIENCE
        self.wait = SELDOM if lasting else REDRAW
        self.erase, self.newline = ("", "\n") if lasting else (ERASE, "")
        self.left = TimeLeft()
        self.since = time.monotonic()  # of silence
        self.drawn = ""
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._draw, daemon=True, name="status line")

    def __enter__(self) -> StatusLine:
        _last[0] = Activity(self.text, None, _last[0].phase + 1, divisible=False)
        _shown.append(self)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        _hide(self)
        self.ended.set()
        self.update(Activity(""))
        self.thread.join()

    def update(self, activity: Activity) -> None:
        """Show another activity; one without text erases the line at once."""
        text = activity.text
        with self.lock:
            self.left.update(activity, time.monotonic())
            if text and self.text:
                self.text = text
                return
            self.text, self.since = text, time.monotonic()
            if self.drawn and not text:
                self._write(self.erase)
                self.drawn = ""

    def _draw(self) -> None:
        while not self.ended.wait(self.wait):
            with self.lock:
                silent = time.monotonic() - self.since
                if not self.text or silent < self.patience:
                    continue
                end = self._end(silent)
                room = shutil.get_terminal_size().columns - len(end) - 5
                line = f"{escaped(self.text)[:room]} ...{end}"
                if line != self.drawn:
                    self._write(f"{self.erase}{line}{self.newline}")
                    self.drawn = line

    def _write(self, text: str) -> None:
        with suppress(OSError):  # of a terminal that was closed
            self.stream.write(text)
            self.stream.flush()

    def _end(self, silent: float) -> str:
        """Return the share done and the time left; the elapsed time where these are unknown."""
        left = self.left.seconds(time.monotonic())
        if left is not None:
            return f"  {100 * self.left.share:.0f} %, {time_words(left)} left"
        return f"  {silent:.0f} s" if silent >= ELAPSED_FROM else ""


def status_line(first: str) -> AbstractContextManager[object]:
    """Return a status line on stderr for the rank that reports; nothing without a terminal.

    A process that another one of ours started reports to that one.
    """
    if CHANNEL in os.environ:
        return passed_to(_to_parent)
    if os.environ.get("RANK", "0") != "0" or not wants_status_line([]):
        return nullcontext()
    return StatusLine(sys.stderr, first)


def wants_status_line(words: list[str]) -> bool:
    """Whether a command shows a status line: on a terminal, unless JSON goes to another program."""
    if os.environ.get("TERM") == "dumb":
        return False
    return _may_report(words) and bool(sys.stderr and sys.stderr.isatty())


def line_of_command(words: list[str]) -> AbstractContextManager[object]:
    """Return the display of a command: a status line, or lasting lines without a terminal."""
    if wants_status_line(words):
        return StatusLine(sys.stderr, "loading")
    if not _may_report(words) or sys.stderr is None:
        return nullcontext()
    return StatusLine(sys.stderr, "loading", lasting=True)


def _may_report(words: list[str]) -> bool:
    if "--json" in words and not (sys.stdout and sys.stdout.isatty()):
        return False
    return "_SHARDPLAN_COMPLETE" not in os.environ
