"""Status line of the command line: a long computation reports its current activity.

Computations call :func:`report`; nothing happens unless a command line displays a
:class:`StatusLine`.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, TextIO

PATIENCE: Final = 0.5  # seconds without output before the line appears
REDRAW: Final = 0.1  # seconds between two states of the line
ELAPSED_FROM: Final = 3.0  # seconds from which the elapsed time is shown
ERASE: Final = "\r\x1b[K"


class Display(Protocol):
    """Something that shows the current activity."""

    def update(self, text: str) -> None:
        """Show another activity; an empty one erases it."""


_shown: list[Display] = []  # the one in use, if any


def report(activity: str) -> None:
    """Name the current activity, such as ``searching 19,152 plans``."""
    if _shown:
        _shown[-1].update(activity)


@dataclass(frozen=True)
class _Passed:
    """Activities that are passed on."""

    update: Callable[[str], None]


@contextmanager
def passed_to(update: Callable[[str], None]) -> Iterator[None]:
    """Pass reported activities to a function, such as one that sends them to another process."""
    display = _Passed(update)
    _shown.append(display)
    try:
        yield
    finally:
        _shown.remove(display)


def clear() -> None:
    """Erase the line before other output; the next report shows it again."""
    if _shown:
        _shown[-1].update("")


class StatusLine:
    """A context manager that shows reported activities on a terminal, and erases them at the end.

    The line appears once a command has been silent for half a second.
    """

    def __init__(self, stream: TextIO, first: str = "") -> None:
        self.stream, self.text = stream, first
        self.since = time.monotonic()  # of silence
        self.drawn = ""
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._draw, daemon=True, name="status line")

    def __enter__(self) -> StatusLine:
        _shown.append(self)
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _shown.remove(self)
        self.ended.set()
        self.update("")
        self.thread.join()

    def update(self, text: str) -> None:
        """Show another activity; an empty one erases the line at once."""
        if text and self.text:
            self.text = text
            return
        with self.lock:
            self.text, self.since = text, time.monotonic()
            if self.drawn and not text:
                self.stream.write(ERASE)
                self.stream.flush()
                self.drawn = ""

    def _draw(self) -> None:
        while not self.ended.wait(REDRAW):
            with self.lock:
                silent = time.monotonic() - self.since
                if not self.text or silent < PATIENCE:
                    continue
                elapsed = f"  {silent:.0f} s" if silent >= ELAPSED_FROM else ""
                room = shutil.get_terminal_size().columns - len(elapsed) - 5
                line = f"{self.text[:room]} ...{elapsed}"
                if line != self.drawn:
                    self.stream.write(f"{ERASE}{line}")
                    self.stream.flush()
                    self.drawn = line


def status_line(first: str) -> AbstractContextManager[object]:
    """Return a status line on stderr for the rank that reports; nothing without a terminal."""
    if os.environ.get("RANK", "0") != "0" or not wants_status_line([]):
        return nullcontext()
    return StatusLine(sys.stderr, first)


def wants_status_line(words: list[str]) -> bool:
    """Whether a command shows a status line: on a terminal, unless JSON goes to another program."""
    if "--json" in words and not (sys.stdout and sys.stdout.isatty()):
        return False
    if "_SHARDPLAN_COMPLETE" in os.environ or os.environ.get("TERM") == "dumb":
        return False
    return bool(sys.stderr and sys.stderr.isatty())
