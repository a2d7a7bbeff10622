"""Text of messages: control characters escaped, errors wrapped to the width of the terminal."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from typing import Final

NARROWEST, WIDEST = 60, 100
INDENT: Final = "  "  # of the second and following lines of a paragraph

# what a terminal obeys instead of showing it, and what changes the order of the letters around it
_CONTROL: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069]"
)


def escaped(text: str) -> str:
    r"""Return a text without control characters, which names in files may contain.

    Line breaks and tabs stay. The escapes are those of JSON, so that a document stays valid.

    >>> escaped("a\x1b[31mred\n")
    'a\\u001b[31mred\n'
    """
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def on_one_line(text: str) -> str:
    r"""Return a name as a line that other words may follow: escaped, its line breaks too.

    >>> on_one_line("a\nb")
    'a\\nb'
    """
    return escaped(text.replace("\n", "\\n"))


def error_text(text: str) -> str:
    """Return an error as stderr shows it: wrapped in a terminal, as it is in a file or a pipe."""
    return wrapped(text, stderr_width())


def wrapped(text: str, width: int | None) -> str:
    r"""Return a message with its long lines wrapped; unchanged where ``width`` is None.

    Every line is a paragraph of its own: a list keeps its items. Words such as options and paths
    are not broken.

    >>> wrapped("shardplan: a message of several words", 24)
    'shardplan: a message of\n  several words'
    """
    if width is None:
        return text
    return "\n".join(
        part for line in text.split("\n") for part in (_wrapped_line(line, width) or [""])
    )


def _wrapped_line(line: str, width: int) -> list[str]:
    own = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=own + INDENT,
        break_on_hyphens=False,
        break_long_words=False,
        expand_tabs=False,
        replace_whitespace=False,
    )


def stderr_width() -> int | None:
    """Return the columns of a message: of the terminal, or of ``COLUMNS``; None for a file."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        width = int(columns)
    elif sys.stderr is not None and sys.stderr.isatty():
        try:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
        except OSError:
            return None
    else:
        return None
    return min(max(width, NARROWEST), WIDEST)
