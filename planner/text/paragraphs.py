"""Labelled paragraphs as wide as the terminal, and names of moments that several answers share."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import Final

NARROWEST, USUAL, WIDEST = 60, 80, 100  # columns
INDENT: Final = 11
LINES: Final = 15  # of an answer without its details
CONTINUED: Final = " \\"  # at the end of a line of a command that goes on
TOGETHER: Final = "\u00a0"  # a space at which no line breaks
_BEFORE_UNIT: Final = re.compile(
    r"(?<=\d) (?=%|[TKMG]iB\b|[TG]B/s|TFLOP/s|m?s\b|h\b|min\b|slower\b|faster\b|tokens\b)"
    r"|(?<=\bof) (?=\d)"
)
_OPTION: Final = re.compile(r"(?<=\s)(--?[a-z][\w-]*) (?=[^\s-])")
MOMENT_WORDS: Final = {
    "loss_forward": "at the loss, forward",
    "loss_backward": "at the loss, backward",
    "head": "while the head's gradient is reduced",
    "backward": "early in the backward pass",
    "later_backward": "in the second backward pass",
    "last_layer": "at the end of the backward pass",
    "embedding": "while the embedding's gradient is reduced",
    "optimizer": "in the optimizer step",
}


def width() -> int:
    """Return the columns of a text: those of the terminal, 80 where there is none, 60 to 100."""
    columns = shutil.get_terminal_size((USUAL, 24)).columns
    return max(NARROWEST, min(WIDEST, columns))


def labelled(label: str, text: str) -> list[str]:
    """Return a paragraph with a label in the margin."""
    return _wrapped(text, f"{label:<{INDENT}}", " " * INDENT)


def next_command(command: str, before: str = "") -> list[str]:
    """Return the paragraph of the next command, which a shell reads over several lines.

    ``before``: the words in front of it.
    """
    lines = _wrapped(
        f"{before}{command}", f"{'Next':<{INDENT}}", " " * INDENT, spare=len(CONTINUED)
    )
    first = next((at for at, line in enumerate(lines) if command.split()[0] in line), 0)
    last = len(lines) - 1
    return [line + CONTINUED if first <= at < last else line for at, line in enumerate(lines)]


def indented(text: str) -> list[str]:
    """Return an indented paragraph below a label; continuation lines are indented further."""
    return _wrapped(text, " " * INDENT, " " * (INDENT + 4))


def hanging(label: str, text: str) -> list[str]:
    """Return a paragraph below the end of its label, however long that is."""
    return _wrapped(text, label, " " * len(label))


def plain(text: str, indent: str = "") -> list[str]:
    """Return a paragraph without a label."""
    return _wrapped(text, indent, indent)


def labelled_line(label: str, parts: Sequence[str], last: str = "", between: str = ", ") -> str:
    """Return one labelled line with as many of the parts, the first ones, as have room.

    At least one part is shown; ``last`` is always added.
    """
    room = width() - INDENT - len(last)
    text = parts[0]
    for part in parts[1:]:
        if len(text) + len(between) + len(part) > room:
            break
        text += between + part
    return f"{label:<{INDENT}}{text}{last}"


def _wrapped(text: str, first: str, others: str, spare: int = 0) -> list[str]:
    """Return lines of at most ``width()``; a number and its unit, an option and its value together.

    ``spare``: columns that are left free.

    >>> _wrapped(97 * "x" + " 16 %", "", "")[1]
    '16 %'
    """
    kept = _BEFORE_UNIT.sub(TOGETHER, _OPTION.sub(rf"\1{TOGETHER}", text))
    lines = textwrap.wrap(
        kept,
        width() - spare,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(TOGETHER, " ") for line in lines]
