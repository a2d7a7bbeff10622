"""Progress display on stderr: a bar on a terminal, otherwise occasional lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from cost_models.units import format_rate

MAX_LINES: Final = 20
MAX_SILENCE: Final = 30.0  # maximum seconds between lines


class ProgressDisplay:
    """Shows the records of steps; a context manager that restores the terminal."""

    def __init__(self, steps: int, *, quiet: bool = False) -> None:
        self.steps, self.quiet = steps, quiet
        self.every = max(1, -(-steps // MAX_LINES))
        self.last_line = 0.0
        self.first: tuple[int, float] | None = None  # the first step shown, and its time
        self.bar: Bar | None = None
        if sys.stderr.isatty() and not quiet:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn())
            console = Console(stderr=True)
            self.bar = Bar(*columns, TextColumn("{task.description}"), console=console)
            self.task = self.bar.add_task("", total=steps)

    def __enter__(self) -> ProgressDisplay:
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
        """Show one step, an evaluation, or a note."""
        if self.quiet:
            return
        if "text" in event:
            self._say(f"note: {event['text']}")
            return
        if event.get("kind") == "evaluation":
            self._say(_evaluation(event))
            return
        now = time.monotonic()
        values = f"{_values(event)}  {self._left(event['step'], now)}".rstrip()
        if self.bar is not None:
            self.bar.update(self.task, completed=event["step"], description=values)
        elif self._is_due(event["step"], now):
            self.last_line = now
            width = len(str(self.steps))
            self._say(f"step {event['step']:>{width}}/{self.steps}  {values}")

    def _say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def _left(self, step: int, now: float) -> str:
        """Return the remaining time, extrapolated from the steps shown after the first."""
        if self.first is None:
            self.first = (step, now)
        seen, since = step - self.first[0], now - self.first[1]
        if seen < 1 or step >= self.steps:
            return ""
        minutes, seconds = divmod(round(since / seen * (self.steps - step)), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{minutes:02}:{seconds:02}"
        return f"{hours}:{clock} left" if hours else f"{clock} left"

    def _is_due(self, step: int, now: float) -> bool:
        due = step in (1, self.steps) or step % self.every == 0
        return due or now - self.last_line > MAX_SILENCE


def _values(event: Mapping[str, Any]) -> str:
    loss, norm = (
        "not finite" if event[key] is None else f"{event[key]:.4f}"
        for key in ("loss", "gradient_norm")
    )
    return (
        f"loss {loss}  gradient norm {norm}  lr {event['learning_rate']:.2e}  "
        f"{format_rate(event['tokens_per_second'])}"
    )


def _evaluation(event: Mapping[str, Any]) -> str:
    loss, perplexity = event["loss"], event["perplexity"]
    words = "not finite" if loss is None else f"{loss:.4f}"
    words += "" if perplexity is None else f"  perplexity {perplexity:,.2f}"
    return f"evaluation after step {event['step']}: loss {words}"
