"""Labelled paragraphs and names of moments that several answers share."""

from __future__ import annotations

import re
import textwrap
from typing import Final

WIDTH: Final = 100
INDENT: Final = 11
TOGETHER: Final = "\u00a0"  # a space at which no line breaks
_BEFORE_UNIT: Final = re.compile(r"(?<=\d) (?=%|[KMG]iB\b|m?s\b)")
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


def labelled(label: str, text: str) -> list[str]:
    """Return a paragraph with a label in the margin."""
    return _wrapped(text, f"{label:<{INDENT}}", " " * INDENT)


def indented(text: str) -> list[str]:
    """Return an indented paragraph below a label; continuation lines are indented further."""
    return _wrapped(text, " " * INDENT, " " * (INDENT + 4))


def _wrapped(text: str, first: str, others: str) -> list[str]:
    """Return lines of at most WIDTH; a number and its unit stay together.

    >>> _wrapped(97 * "x" + " 16 %", "", "")[1]
    '16 %'
    """
    lines = textwrap.wrap(
        _BEFORE_UNIT.sub(TOGETHER, text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(TOGETHER, " ") for line in lines]
