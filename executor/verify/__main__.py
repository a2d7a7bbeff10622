"""``python -m executor.verify --matrix``: see ``prove``, which is imported after the options."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from hardware_profiles.command_line.declarations import command
from hardware_profiles.command_line.usage import parse
from hardware_profiles.errors import InputError, ShardplanError
from hardware_profiles.message import error_text
from hardware_profiles.options import Option
from hardware_profiles.terminal import say

PROGRAM: Final = "python -m executor.verify"
EXAMPLES: Final = (f"{PROGRAM} --matrix --only llama", f"{PROGRAM} --matrix --part 1/4")


class Part(NamedTuple):
    """Every ``every``-th case, from number ``first``."""

    first: int
    every: int


ALL: Final = Part(1, 1)


def read_part(text: str) -> Part:
    """Read K/N.

    >>> read_part("2/3")
    Part(first=2, every=3)
    """
    first, _, every = text.partition("/")
    if not (first.isdecimal() and every.isdecimal() and 1 <= int(first) <= int(every)):
        raise InputError(f"{text!r} (must be K/N with 1 <= K <= N)")
    return Part(int(first), int(every))


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixOptions:
    """Options of ``python -m executor.verify``."""

    matrix: Annotated[bool, Option(help="run the cases (required)")] = False
    part: Annotated[
        Part, Option(metavar="K/N", read=read_part, help="run every N-th case, from the K-th")
    ] = ALL
    only: Annotated[str, Option(metavar="TEXT", help="cases with TEXT in the name")] = ""
    write: Annotated[bool, Option(help="save the verified features")] = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    text = "Compare plans of tiny models with a single process."
    try:
        made = command(MatrixOptions, name=PROGRAM, help=text)
        made.examples = EXAMPLES
        options: MatrixOptions = parse(made, words, PROGRAM)
        if not options.matrix:
            raise InputError(f"--matrix is missing; see {PROGRAM} --help")
        from executor.verify.prove import prove

        return prove(options.part, options.only, write=options.write)
    except ShardplanError as error:
        say(error_text(f"shardplan: {error}"))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
