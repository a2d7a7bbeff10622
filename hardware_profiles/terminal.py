"""Output streams of the command line: escaped control characters, ASCII, and closed pipes.

Every text reaches a stream through :func:`show` or :func:`say`.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import sys
import unicodedata
from collections.abc import Callable, Mapping
from typing import Final

from hardware_profiles.errors import InputError
from hardware_profiles.message import escaped
from hardware_profiles.progress import clear

# characters of answers without a decomposition into ASCII; each has the width of the original
# where tables or bars contain it
ASCII: Final[Mapping[str, str]] = {
    "█": "#",
    "▓": "%",
    "▒": "=",
    "░": "-",
    "▚": "/",
    "▪": "o",
    "▏": "|",
    "│": "|",
    "─": "-",
    "✔": "*",
    "✗": "x",
    "★": "*",
    "·": ".",
    "–": "-",
    "—": "-",
    "−": "-",
    "×": "x",
    "°": " deg",
    "±": "+-",
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "→": "->",
    "µ": "u",
    "“": '"',
    "”": '"',
    "‘": "'",
    "’": "'",
    "\u00a0": " ",
    "Σ": "sum",
    "÷": "/",
    "∝": "~",
    "▶": ">",
}
HANDLER: Final = "shardplan-ascii"


def transliterate(text: str) -> str:
    """Return text in ASCII.

    >>> transliterate("✔ 8 × 3 GiB · 2.5 µs …")
    '* 8 x 3 GiB . 2.5 us ...'
    """
    return "".join(one if one.isascii() else _in_ascii(one) for one in text)


def _in_ascii(character: str) -> str:
    if (known := ASCII.get(character)) is not None:
        return known
    plain = unicodedata.normalize("NFKD", character)
    return plain.encode("ascii", "ignore").decode() or "?"


def _replace(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII for the characters that an encoding lacks: an error handler of codecs."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return transliterate(error.object[error.start : error.end]), error.end


codecs.register_error(HANDLER, _replace)


def prepare_streams() -> None:
    """Print in ASCII what the encoding of an output stream lacks.

    Python prints UTF-8 in the C locale; whoever sets ``LC_ALL=C`` gets ASCII.
    """
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        with contextlib.suppress(OSError, ValueError):  # closed
            if _is_c_locale():
                stream.reconfigure(encoding="ascii", errors=HANDLER)
            else:
                stream.reconfigure(errors=HANDLER)


def _is_c_locale() -> bool:
    chosen = "PYTHONIOENCODING" in os.environ or os.environ.get("PYTHONUTF8") == "1"
    return os.environ.get("LC_ALL") in ("C", "POSIX") and not chosen


def printable(text: str) -> str:
    """Return a text in ASCII if standard output has no more characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return transliterate(text)
    return text


def show(text: object, style: Callable[[str], str] = str) -> None:
    """Print on standard output; a reader that went away (``| head -1``) is no error.

    ``style``: adds colours to the escaped text.
    """
    clear()
    try:
        print(style(escaped(str(text))), flush=True)
    except OSError as error:
        _on_unwritable(error)


def _on_unwritable(error: OSError) -> None:
    """Go on without output where its reader or the terminal went away; else raise."""
    discard_output()
    if error.errno not in (errno.EPIPE, errno.EIO):
        raise InputError(f"standard output: cannot be written: {error.strerror}") from None


def say(text: str) -> None:
    """Print a message on standard error, if it still exists."""
    clear()
    with contextlib.suppress(OSError):
        print(escaped(text), file=sys.stderr, flush=True)


def show_rest() -> None:
    """Print what is still in the buffer, at the end of a command."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        _on_unwritable(error)


def discard_output() -> None:
    """Send everything that is still printed to nobody, so that Python ends without an error."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
