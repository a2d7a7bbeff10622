"""Changes of one value in the text of a JSON file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from planner.exchange.edits.changes import REMOVED

_SPACE: Final = re.compile(r"\s*")
_DECODER: Final = json.JSONDecoder()


@dataclass
class _Value:
    """Where a value stands, and the members of an object."""

    start: int
    end: int = 0
    members: dict[str, tuple[int, _Value]] = field(default_factory=dict)  # start of the name
    is_object: bool = False


def edit_json(text: str, path: str, value: Any) -> Iterator[str]:
    r"""Yield the text with a value at a path, or without it.

    >>> next(edit_json('{"a": {"b": 1, "c": 2}}', "a.b", 3))
    '{"a": {"b": 3, "c": 2}}'
    >>> next(edit_json('{"a": {"b": 1}}', "a.d", True))
    '{"a": {"b": 1, "d": true}}'
    >>> next(edit_json('{\n  "a": 1,\n  "c": 2\n}', "c", REMOVED))
    '{\n  "a": 1\n}'
    """
    owner = _scan(text, _after_space(text, 0))
    *levels, last = path.split(".")
    depth = 0
    while depth < len(levels) and levels[depth] in owner.members:
        owner = owner.members[levels[depth]][1]
        depth += 1
    for level in reversed(levels[depth:]):
        value = {last: value}
        last = level
    if last in owner.members:
        start, found = owner.members[last]
        if value is REMOVED:
            yield _without(text, owner, last)
        else:
            yield text[: found.start] + _written(value, text, start) + text[found.end :]
    elif value is not REMOVED and owner.is_object:
        yield _with(text, owner, last, value)


def _scan(text: str, at: int) -> _Value:
    found = _Value(at)
    if text[at] != "{":
        _, found.end = _DECODER.raw_decode(text, at)
        return found
    found.is_object = True
    at = _after_space(text, at + 1)
    while text[at] != "}":
        start = at
        name, at = _DECODER.raw_decode(text, at)
        at = _after_space(text, _after_space(text, at) + 1)  # the colon
        inner = _scan(text, at)
        found.members[name] = (start, inner)
        at = _after_space(text, inner.end)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    found.end = at + 1
    return found


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _indent(text: str, at: int) -> str | None:
    """Return the white space before a position; None where it is not the first of its line."""
    start = text.rfind("\n", 0, at) + 1
    return text[start:at] if not text[start:at].strip() and start else None


def _step(text: str) -> int:
    """Return the width of one level."""
    match = re.search(r"\n( +)\S", text)
    return len(match[1]) if match else 2


def _written(value: Any, text: str, at: int) -> str:
    indent = _indent(text, at)
    if not isinstance(value, (Mapping, list)) or indent is None:
        return json.dumps(value)
    return json.dumps(value, indent=_step(text)).replace("\n", f"\n{indent}")


def _with(text: str, owner: _Value, name: str, value: Any) -> str:
    if not owner.members:
        return text[: owner.start] + json.dumps({name: value}) + text[owner.end :]
    start, last = list(owner.members.values())[-1]
    indent = _indent(text, start)
    between = ", " if indent is None else f",\n{indent}"
    added = f"{between}{json.dumps(name)}: {_written(value, text, start)}"
    return text[: last.end] + added + text[last.end :]


def _without(text: str, owner: _Value, name: str) -> str:
    names = list(owner.members)
    at = names.index(name)
    start, found = owner.members[name]
    if at + 1 < len(names):
        return text[:start] + text[owner.members[names[at + 1]][0] :]
    if at:
        return text[: owner.members[names[at - 1]][1].end] + text[found.end :]
    return text[: owner.start] + "{}" + text[owner.end :]
