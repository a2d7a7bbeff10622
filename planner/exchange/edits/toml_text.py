"""Changes of one value in the text of a TOML file: tables in brackets, one key a line."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from planner.exchange.edits.changes import REMOVED

_TABLE: Final = re.compile(r"\s*\[(?P<name>[^\[\]]+)\]\s*(?:#.*)?")
_KEY: Final = re.compile(r"(?P<before>\s*(?P<name>[\w.\-\"']+)\s*=\s*)(?P<rest>.*)", re.DOTALL)


def edit_toml(text: str, path: str, value: Any) -> Iterator[str]:
    r"""Yield the text with a value at a path, or without it; comments stay.

    >>> next(edit_toml("[a]\nb = 1  # one\n", "a.b", "x"))
    '[a]\nb = "x"  # one\n'
    >>> next(edit_toml("[a]\nb = 1\n\n[c]\nd = 2\n", "a.e", True))
    '[a]\nb = 1\ne = true\n\n[c]\nd = 2\n'
    """
    lines = text.splitlines(keepends=True)
    if isinstance(value, Mapping):
        for inner, each in value.items():
            text = next(edit_toml(text, f"{path}.{inner}", each), text)
        yield text
        return
    ends: dict[str, int] = {"": 0}  # the line after the last key of each table
    table, at = "", 0
    while at < len(lines):
        if (match := _TABLE.fullmatch(lines[at].rstrip("\n"))) is not None:
            table = match["name"].strip()
            ends[table] = at + 1
            if value is REMOVED and table == path:
                yield "".join([*lines[:at], *lines[_next_table(lines, at) :]])
                return
        elif (found := _KEY.fullmatch(lines[at])) is not None and "#" not in found["before"]:
            end = _value_end(lines, at, found)
            name = found["name"].strip("\"'")
            if (f"{table}.{name}" if table else name) == path:
                changed = [] if value is REMOVED else [_changed(lines, at, end, found, value)]
                yield "".join([*lines[:at], *changed, *lines[end:]])
                return
            at = end - 1
            ends[table] = end
        at += 1
    if value is REMOVED:
        return
    section, _, last = path.rpartition(".")
    if section in ends:
        line = ends[section]
        newline = "" if not line or lines[line - 1].endswith("\n") else "\n"
        added = f"{newline}{_indent(lines, line)}{last} = {_written(value)}\n"
        yield "".join([*lines[:line], added, *lines[line:]])
    else:
        yield f"{text.rstrip()}\n\n[{section}]\n{last} = {_written(value)}\n"


def _next_table(lines: list[str], at: int) -> int:
    after = range(at + 1, len(lines))
    return next((n for n in after if _TABLE.fullmatch(lines[n].rstrip("\n"))), len(lines))


def _value_end(lines: list[str], at: int, found: re.Match[str]) -> int:
    """Return the line after a value, which may have several lines."""
    for end in range(at + 1, len(lines) + 1):
        try:
            tomllib.loads("x = " + found["rest"] + "".join(lines[at + 1 : end]))
        except tomllib.TOMLDecodeError:
            continue
        return end
    return at + 1


def _changed(lines: list[str], at: int, end: int, found: re.Match[str], value: Any) -> str:
    rest = found["rest"] + "".join(lines[at + 1 : end])
    kept = re.search(r"(\s*#[^\"'\]]*)?\s*$", rest.rstrip("\n"))
    comment = kept[1] if kept is not None and kept[1] else ""
    return f"{found['before']}{_written(value)}{comment}\n"


def _indent(lines: list[str], line: int) -> str:
    match = re.match(r"[ \t]*", lines[line - 1]) if line else None
    return match[0] if match else ""


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_written(each)}" for name, each in value.items()) + "}"
    return json.dumps(value)
