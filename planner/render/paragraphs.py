"""Words and lines that several answers share."""

from __future__ import annotations

import textwrap
from typing import Final

WIDTH: Final = 100
INDENT: Final = 11
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
    """A paragraph with a label in the margin."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{label:<{INDENT}}",
        subsequent_indent=" " * INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def indented(text: str) -> list[str]:
    """A line below a label; what does not fit into it is further in."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * INDENT,
        subsequent_indent=" " * (INDENT + 4),
        break_long_words=False,
        break_on_hyphens=False,
    )
