"""An answer of ``learn``: its JSON and text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from msgspec.structs import asdict

from cost_models.uncertainty import Spread
from cost_models.units import format_gib, format_seconds
from planner.learning.conclusions import (
    ComparedRun,
    Conclusion,
)
from planner.learning.mechanisms import published_prior
from planner.learning.next_run import NextRun
from planner.text.answer import SCHEMA_VERSION, Answer
from planner.text.paragraphs import hanging, plain, width
from planner.text.tables import narrowed
from planner.validation.rows.runs_file import BadCell

TITLES: Final = {"concluded": "Concluded", "leaning": "More likely", "unknown": "Could not tell"}
WORTH: Final = 0.1  # nats: a run that is expected to tell less tells almost nothing
FAR: Final = 1.3  # nine learned runs in ten of published sources are nearer after learning
MOST: Final = 3  # next runs


@dataclass(frozen=True, slots=True, repr=False)
class LearnAnswer(Answer):
    """Conclusions from runs, and the profile that was written."""

    path: Path
    source: str
    trainer: str
    accelerator: str
    runs: tuple[ComparedRun, ...]
    conclusions: tuple[Conclusion, ...]
    next_runs: tuple[NextRun, ...]
    spreads: dict[str, Spread]  # 90 % intervals of predictions with the file, on this accelerator
    profile: str  # contents of the file
    skipped: dict[str, str]  # by run: why it, or one of its measurements, is left out
    bad_cells: tuple[BadCell, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        from dataclasses import asdict as fields_of

        return {
            "schema_version": SCHEMA_VERSION,
            "written": str(self.path),
            "software": self.trainer,
            "accelerator": self.accelerator,
            "runs": [fields_of(run) for run in self.runs],
            "conclusions": [fields_of(conclusion) for conclusion in self.conclusions],
            "next_runs": [fields_of(run) for run in self.next_runs],
            "intervals": {name: asdict(spread) for name, spread in self.spreads.items()},
            "skipped": self.skipped,
        }

    def notebook_parts(self) -> Iterator[str]:
        """Yield the runs before and after, and the conclusions."""
        from planner.text.html_page import note, table
        from planner.text.notebook import headline

        yield headline(f"{self.trainer} on {self.accelerator}", f"learned from {self.source}.")
        head, *rows = run_rows(self.runs)
        yield table(rows, head)
        shown = [
            (TITLES[one.verdict], one.mechanism, one.value, one.words) for one in self.conclusions
        ]
        yield table(shown, ("", "mechanism", "value", "evidence"))
        words = f"wrote {self.path}; next: planner.fit(model, cluster, software={str(self.path)!r})"
        yield note(words)

    def __str__(self) -> str:
        return learned_text(self)


def learned_text(answer: LearnAnswer) -> str:
    """Return runs, conclusions, what is open, the next run and the intervals."""
    runs = answer.runs
    number = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    lines = [
        f"{number} of {answer.trainer} on {answer.accelerator}",
        "",
        *narrowed(run_rows(runs), ("before", "error"), ("run", "")),
    ]
    for verdict, title in TITLES.items():
        found = [one for one in answer.conclusions if one.verdict == verdict]
        if not found:
            continue
        lines.append("")
        if verdict == "unknown":
            names = ", ".join(one.mechanism for one in found)
            lines += textwrap.wrap(f"{title}: {names}", width(), break_on_hyphens=False)
            continue
        lines.append(title)
        for one in found:
            lines += _wrapped(f"{one.mechanism:<30}{one.value}", one.words)
    if wrong := [run.run for run in runs if _is_unexplained(run)]:
        words = (
            f"Not explained: {', '.join(wrong)}. Their cells are wrong, or a setting that no cell "
            "states differs: correct them, or leave them out; they distort the others."
        )
        lines += ["", *textwrap.wrap(words, width(), break_on_hyphens=False)]
    lines += ["", *_left(runs), *_next(answer.next_runs)]
    for name, spread in answer.spreads.items():
        what = "Step time" if name == "time" else "Peak memory"
        lines += hanging(
            f"{what:<12}",
            f"{-100 * spread.below:+.1f} to {100 * spread.above:+.1f} % around predictions on this "
            "accelerator (90 %)",
        )
    if answer.skipped:
        name, reason = next(iter(answer.skipped.items()))
        more = f", and {len(answer.skipped) - 1} more" if len(answer.skipped) > 1 else ""
        lines += textwrap.wrap(f"Left out: {name}: {reason}{more}", width())
    path = answer.path
    lines += plain(f"wrote {path}; next: shardplan fit MODEL CLUSTER --software {path}")
    return "\n".join(lines)


def run_rows(runs: Sequence[ComparedRun]) -> list[list[str]]:
    """Return the cells of a table of the runs before and after, its head first."""
    rows = [["run", "", "measured", "before", "error", "after", "error"]]
    for run in runs:
        quantities = (
            ("step", run.step, run.step_before, run.step_after, format_seconds),
            ("peak, GiB", run.peak, run.peak_before, run.peak_after, format_gib),
        )
        name = run.run[:24]
        for what, measured, before, after, words in quantities:
            if measured is None:
                continue
            errors = [f"{100 * (value / measured - 1):+z.1f} %" for value in (before, after)]
            rows.append(
                [name, what, words(measured), words(before), errors[0], words(after), errors[1]]
            )
            name = ""
    return rows


def _is_unexplained(run: ComparedRun) -> bool:
    """Whether mechanisms leave an error of more than ``FAR``."""
    pairs = ((run.step, run.step_explained), (run.peak, run.peak_after))
    return any(
        measured is not None and not 1.0 / FAR < after / measured < FAR for measured, after in pairs
    )


def _left(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """Yield the errors of step times that mechanisms leave, and where the file corrects them."""
    errors = [
        (run.run, 100.0 * (run.step / run.step_explained - 1.0))
        for run in runs
        if run.step is not None
    ]
    if errors:
        shown = [f"{run} {error:+z.1f} %" for run, error in errors]
        each = [error for _, error in errors]
        listed = (
            ", ".join(shown) if len(shown) <= MOST else f"{min(each):+.1f} to {max(each):+z.1f} %"
        )
        half = math.log(2.0) * published_prior().likeness.length
        words = (
            f"{listed} of the step times. The profile adds it to the steps of similar plans, and "
            f"half of it where batch, sequence, model and ranks differ by {half:.1g} doublings "
            "together"
        )
        yield from hanging(f"{'Unexplained':<12}", words)
    if len(runs) == 1:
        words = "its peculiarities are taken as the trainer's: add a run of another plan"
        yield from hanging(f"{'One run':<12}", words)


def _wrapped(first: str, words: str) -> list[str]:
    """Return a conclusion and its words, the words on a line of their own where need be."""
    line = f"  {first} ({words})"
    if len(line) <= width():
        return [line]
    indent = " " * 32
    return [
        f"  {first}",
        *textwrap.wrap(words, width(), initial_indent=indent, subsequent_indent=indent),
    ]


def _next(runs: Sequence[NextRun]) -> Iterator[str]:
    """Yield the next runs that tell most, in bits."""
    worth = [run for run in runs if run.nats >= WORTH][:MOST]
    if not worth:
        yield "Next run: none of those tried would tell much more"
        return
    for number, run in enumerate(worth):
        head = "Next run" if number == 0 else ""
        words = f"{run.words} (adds {run.nats / math.log(2.0):.1f} bits of information)"
        yield from hanging(f"{head:<12}", words)
