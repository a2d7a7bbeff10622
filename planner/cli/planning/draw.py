"""Drawings that ``fit -o`` writes: one HTML page, or one SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hardware_profiles.errors import InputError
from hardware_profiles.fields import write_text_atomically
from planner.answer.fit_answer import FitAnswer
from planner.cli.outputs import refuse_existing

KINDS: Final = (".html", ".svg")


def check_drawing(path: Path, *, force: bool) -> None:
    """Raise, before any computation, if a drawing could not be written."""
    if path.suffix.lower() not in KINDS:
        raise InputError(f"{path}: the name of a drawing ends in {' or '.join(KINDS)}")
    refuse_existing(path, force=force)


def refuse_drawings(*, explain: bool, output: Path | None) -> None:
    """Raise if a drawing of a training step is requested together with --inference."""
    given = ["--explain"] * explain + ["--output"] * (output is not None)
    if given:
        raise InputError(
            f"--inference and {', '.join(given)}: they show a training step, which a server does "
            "not have; leave out one or the other"
        )


def write_drawing(path: Path, answer: FitAnswer, *, force: bool = False) -> None:
    """Write the moments of a step; an existing file is kept unless ``force``."""
    check_drawing(path, force=force)
    text = answer.to_svg() if path.suffix.lower() == ".svg" else answer.to_html()
    write_text_atomically(path, text, force=force)
