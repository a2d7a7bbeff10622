"""Help of a command: two columns, options by group, examples as they are typed."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

import click

from hardware_profiles.terminal import printable

HELP: Final = {"help_option_names": ["-h", "--help"]}
# titles of the first and of the last group of options
COMMON: Final = "common"
OUTPUT: Final = "output"
TOGETHER: Final = "\u00a0"  # a space at which no line breaks
CONTINUED: Final = " \\"  # at the end of a line of a command that goes on
_OPTION_VALUE: Final = re.compile(r"(?<=\s)(--?[a-z][\w-]*) (?=[^\s-])")


class HelpFormatter(click.HelpFormatter):
    """Help whose words, such as ``hf-trainer-early``, are not broken at their hyphens."""

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 28, col_spacing: int = 2
    ) -> None:
        """Write two columns; a longer first cell has a line of its own."""
        cells = list(rows)
        first = min(max((len(term) for term, _ in cells), default=0), col_max) + col_spacing
        width = max(self.width - first - self.current_indent, 10)
        for term, text in cells:
            lines = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
            if len(term) + col_spacing > first:
                lines = ["", *lines]
            left = f"{'':>{self.current_indent}}{term}"
            for number, line in enumerate(lines or [""]):
                start = left if number == 0 else ""
                self.write(f"{start:<{first + self.current_indent}}{line}".rstrip() + "\n")


class HelpContext(click.Context):
    """Context of a command that formats its help with :class:`HelpFormatter`."""

    formatter_class = HelpFormatter

    def get_help(self) -> str:
        """Return the help with characters that standard output can print."""
        return printable(super().get_help())


def help_option(option: click.Option | None) -> click.Option | None:
    """Return the option ``--help`` in our words."""
    if option is not None:
        option.help = "show this help"
    return option


def write_examples(formatter: click.HelpFormatter, examples: Sequence[str]) -> None:
    """Write commands as they are typed; a long one goes on in the next line, behind a backslash."""
    indent = " " * formatter.current_indent
    for example in examples:
        kept = _OPTION_VALUE.sub(rf"\1{TOGETHER}", example)
        lines = textwrap.wrap(
            kept,
            formatter.width - len(CONTINUED),
            initial_indent=indent,
            subsequent_indent=2 * indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
        formatter.write(f"{CONTINUED}\n".join(lines).replace(TOGETHER, " ") + "\n")
