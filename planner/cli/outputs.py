"""Messages and files that commands write besides their answer."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, Final

import click

from hardware_profiles.errors import InputError
from hardware_profiles.terminal import show

COLOURS: Final = {
    "FITS": "green",
    "FITS with another plan": "green",
    "TIGHT": "yellow",
    "DOES NOT FIT": "red",
}
VERDICT: Final = re.compile(r"^( *)(DOES NOT FIT|TIGHT|FITS with another plan|FITS)\b", re.M)


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raise, before any computation, if its result could not be written."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file to write")
    if path.exists() and not force:
        raise InputError(f"{path}: exists already; choose another name or add --force")
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist")


def print_answer(answer: Any, *, json: bool, verbose: bool = False) -> None:
    """Print the text of an answer, or its JSON document."""
    from planner.text.answer import json_text

    if json:
        show(json_text(answer.to_dict()))
        return
    text = answer.text(verbose=True) if verbose else str(answer)
    show(text, coloured if shows_colours() else str)


def shows_colours() -> bool:
    """Whether stdout is a terminal that shows colours (https://no-color.org)."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wanted and sys.stdout.isatty()


def coloured(text: str) -> str:
    r"""Return a text with its verdicts in colour.

    >>> coloured("FITS       peak 3 of 4 GiB")
    '\x1b[32m\x1b[1mFITS\x1b[0m       peak 3 of 4 GiB'
    """
    return VERDICT.sub(
        lambda found: found[1] + click.style(found[2], fg=COLOURS[found[2]], bold=True), text
    )
