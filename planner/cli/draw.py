"""Drawings written by ``fit -o``: an HTML page or an SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hardware_profiles.errors import InputError
from hardware_profiles.fields import write_text_atomically
from planner.answer.answers import FitAnswer
from planner.cli.outputs import refuse_existing

KINDS: Final = (".html", ".svg")


def check_drawing(path: Path, *, force: bool) -> None:
    """Raise an InputError if a drawing cannot be written; called before the work."""
    if path.suffix.lower() not in KINDS:
        raise InputError(f"{path}: the name of a drawing ends in {' or '.join(KINDS)}")
    refuse_existing(path, force=force)


def refuse_drawings(*, explain: bool, output: Path | None) -> None:
    """Raise an InputError for drawings of a training step with ``--inference``."""
    named = ["--explain"] * explain + ["--output"] * (output is not None)
    if named:
        raise InputError(
            f"--inference and {', '.join(named)}: they show a training step; omit one or the other"
        )


def write_drawing(path: Path, answer: FitAnswer, *, force: bool = False) -> None:
    """Write a drawing of the moments of a step; ``force`` overwrites an existing file."""
    check_drawing(path, force=force)
    text = answer.to_svg() if path.suffix.lower() == ".svg" else answer.to_html()
    write_text_atomically(path, text, force=force)
