"""Progress display on stderr: a bar on a terminal, otherwise occasional lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Column

from cost_models.units import format_rate
from hardware_profiles.message import escaped
from hardware_profiles.terminal import say

MAX_LINES: Final = 20
MAX_SILENCE: Final = 30.0  # maximum seconds between lines
WIDE: Final = 70  # columns of a terminal beyond which half of the width is the bar's
MIN_BAR, MAX_BAR = 8, 40
# positions of loss, time left, speed, gradient norm and learning rate among the values
IMPORTANCE: Final = (0, 4, 3, 1, 2)


class ProgressDisplay:
    """Shows the records of steps; a context manager that restores the terminal."""

    def __init__(self, steps: int, *, quiet: bool = False) -> None:
        self.steps, self.quiet = steps, quiet
        self.every = max(1, -(-steps // MAX_LINES))
        self.last_line = 0.0
        self.first: tuple[int, float] | None = None  # the first step shown, and its time
        self.bar: Bar | None = None
        if sys.stderr.isatty() and not quiet:
            self._add_bar(Console(stderr=True))

    def _add_bar(self, console: Console) -> None:
        """Show a bar; its length leaves room for the values in narrow terminals."""
        self.length = min(MAX_BAR, max(MIN_BAR, (console.width - WIDE) // 2))
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=self.length),
            TimeElapsedColumn(),
        )
        self.bar = Bar(
            *columns,
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="crop")),
            console=console,
        )
        self.task = self.bar.add_task("starting", total=self.steps)

    def __enter__(self) -> ProgressDisplay:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            with contextlib.suppress(OSError):  # of a terminal that was closed
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
        parts = [*_values(event), self._left(event["step"], now)]
        values = "  ".join(part for part in parts if part)
        if self.bar is not None:
            shown = fitting(parts, self._room(self.bar.console.width))
            with contextlib.suppress(OSError):
                self.bar.update(self.task, completed=event["step"], description=shown)
        elif self._is_due(event["step"], now):
            self.last_line = now
            width = len(str(self.steps))
            self._say(f"step {event['step']:>{width}}/{self.steps}  {values}")

    def _room(self, width: int) -> int:
        """Return the columns next to number, bar and elapsed time, with the spaces between them."""
        number = len(f"{self.steps}/{self.steps}")
        return width - len("step") - number - self.length - len("0:00:00") - 5

    def _say(self, text: str) -> None:
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.console.print(escaped(text), markup=False, highlight=False, soft_wrap=True)
        else:
            say(text)

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


def fitting(parts: Sequence[str], room: int) -> str:
    """Return the most important of the parts that fit, in their order.

    >>> parts = ["loss 1.5", "gradient norm 2.0", "lr 1e-03", "90 tokens/s", "00:20 left"]
    >>> fitting(parts, 35), fitting(parts, 20)
    ('loss 1.5  90 tokens/s  00:20 left', 'loss 1.5  00:20 left')
    """
    chosen: list[int] = []
    for position in IMPORTANCE:
        wanted = sorted([*chosen, position])
        if parts[position] and len("  ".join(parts[p] for p in wanted)) <= room:
            chosen = wanted
    return "  ".join(parts[position] for position in chosen)


def _values(event: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return loss, gradient norm, learning rate and speed."""
    loss, norm = (
        "not finite" if event[key] is None else f"{event[key]:.4f}"
        for key in ("loss", "gradient_norm")
    )
    return (
        f"loss {loss}",
        f"gradient norm {norm}",
        f"lr {event['learning_rate']:.2e}",
        format_rate(event["tokens_per_second"]),
    )


def _evaluation(event: Mapping[str, Any]) -> str:
    loss, perplexity = event["loss"], event["perplexity"]
    words = "not finite" if loss is None else f"{loss:.4f}"
    words += "" if perplexity is None else f"  perplexity {perplexity:,.2f}"
    return f"evaluation after step {event['step']}: loss {words}"
