"""Shows the steps of a run on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

MOST_LINES: Final = 20
LONGEST_SILENCE: Final = 30.0  # seconds without a line


class Progress:
    """Takes the events of rank 0; a context manager, so that the terminal is left in order."""

    def __init__(self, steps: int, *, quiet: bool = False) -> None:
        self.steps, self.quiet = steps, quiet
        self.every = max(1, -(-steps // MOST_LINES))
        self.last_line = 0.0
        self.bar: Bar | None = None
        if sys.stderr.isatty() and not quiet:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn())
            console = Console(stderr=True)
            self.bar = Bar(*columns, TextColumn("{task.description}"), console=console)
            self.task = self.bar.add_task("", total=steps)

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show one step, or a note."""
        if self.quiet:
            return
        if "text" in event:
            self._say(f"note: {event['text']}")
            return
        if self.bar is not None:
            self.bar.update(self.task, completed=event["step"], description=_values(event))
        elif self._is_due(event["step"]):
            self.last_line = time.monotonic()
            width = len(str(self.steps))
            step = f"step {event['step']:>{width}}/{self.steps}"
            print(f"{step}  {_values(event)}", file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def _is_due(self, step: int) -> bool:
        silent = time.monotonic() - self.last_line
        due = step in (1, self.steps) or step % self.every == 0
        return due or silent > LONGEST_SILENCE


def _values(event: Mapping[str, Any]) -> str:
    loss, norm = (
        "not finite" if event[key] is None else f"{event[key]:.4f}"
        for key in ("loss", "gradient_norm")
    )
    return f"loss {loss}  gradient norm {norm}  {event['tokens_per_second']:,.0f} tokens/s"
