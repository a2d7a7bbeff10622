"""Values on a command line: checked as they are declared, and proposed by a shell."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from hardware_profiles.errors import InputError
from hardware_profiles.options import Declared, check_value, possible_values, read_count

FILES: Final = ("PATH", "DIR", "FOLDER", "FILE", "SOURCE")  # of a word for a value


class Value(click.ParamType[Any]):
    """A value that is checked against the declared bounds, choices or reader."""

    def __init__(self, one: Declared) -> None:
        self.one = one
        self.name = "|".join(one.choices) or getattr(one.type, "__name__", "text")

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the choices, or the type."""
        return f"[{self.name}]" if self.one.choices else self.name.upper()

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> Any:
        """Return the value of the declared type, or fail with its bounds."""
        one = self.one
        try:
            if one.option and one.option.read and isinstance(value, str):
                return one.option.read(value)
            if one.type in (int, float) and not one.choices:
                value = _number(one, value)
            return check_value(one, value, shown=False)
        except InputError as error:
            self.fail(str(error), param, ctx)


def _number(one: Declared, value: Any) -> Any:
    """Return a number of the declared type; NaN, which is in no range, for other text."""
    try:
        return read_count(value) if one.type is int and isinstance(value, str) else one.type(value)
    except (ValueError, OverflowError):
        return value


class Count(click.ParamType[int]):
    """A whole number, with ``k`` and ``M`` as in 8k tokens; its bounds are checked elsewhere."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> int:
        """Return the number."""
        try:
            return read_count(value) if isinstance(value, str) else int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number such as 4096 or 8k", param, ctx)


def proposals(one: Declared, start: str) -> list[CompletionItem]:
    """Return the words that a shell proposes for the value of an option.

    Values may be joined by commas; where none begins as typed, files are proposed for paths.
    """
    option = one.option
    if option is not None and option.complete is not None:
        words = list(option.complete(start))
    else:
        before, comma, last = start.rpartition(",")
        values = one.values or possible_values(one)
        words = [before + comma + value for value in values if value.startswith(last)]
    if not words and (_names_a_file(one) or start[:1] in (".", "/", "~") or "/" in start):
        return [CompletionItem(start, type="file")]
    return [CompletionItem(word) for word in words]


def _names_a_file(one: Declared) -> bool:
    option = one.option
    shown = "" if option is None else option.metavar or "".join(option.flags[:1])
    return one.type is Path or any(word in shown for word in FILES)
