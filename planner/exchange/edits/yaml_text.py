"""Changes of one value in the text of a YAML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from planner.exchange.edits.changes import REMOVED, line_around
from planner.exchange.syntax.documents import yaml_value


def edit_yaml(text: str, path: str, value: Any) -> Iterator[str]:
    r"""Yield the text with a value at a path, or without it; comments stay.

    >>> next(edit_yaml("a:\n  b: 1  # one\nc: 2\n", "a.b", 3))
    'a:\n  b: 3  # one\nc: 2\n'
    >>> next(edit_yaml("a:\n  b: 1\nc: 2\n", "a.d", "no"))
    "a:\n  b: 1\n  d: 'no'\nc: 2\n"
    >>> next(edit_yaml("a:\n  b: 1\nc: 2\n", "a", REMOVED))
    'c: 2\n'
    """
    import yaml

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        return
    owner = root
    *levels, last = path.split(".")
    depth = 0
    while depth < len(levels):
        inner = _member(owner, levels[depth])
        if inner is None or not isinstance(inner[1], yaml.MappingNode):
            break
        owner = inner[1]
        depth += 1
    for level in reversed(levels[depth:]):
        value = {last: value}
        last = level
    pair = _member(owner, last)
    if pair is None:
        if value is not REMOVED:
            yield _with(text, owner, last, value)
    elif value is REMOVED:
        yield _without(text, owner, pair)
    else:
        yield _replaced(text, owner, pair, value)


def _member(owner: Any, name: str) -> tuple[Any, Any] | None:
    return next((pair for pair in reversed(owner.value) if pair[0].value == name), None)


def _end(node: Any) -> int:
    """Return the position after a value; a block ends with its last scalar, not its comments."""
    if node.__class__.__name__ == "ScalarNode" or node.flow_style:
        return int(node.end_mark.index)
    last = node.value[-1] if node.value else None
    if last is None:
        return int(node.end_mark.index)
    return _end(last[1] if isinstance(last, tuple) else last)


def _entry(name: str, value: Any, indent: str) -> str:
    """Return the lines of a key, with its newline."""
    if not isinstance(value, Mapping) or not value:
        return f"{indent}{yaml_value(name)}: {yaml_value(value)}\n"
    inner = "".join(_entry(key, each, f"{indent}  ") for key, each in value.items())
    return f"{indent}{yaml_value(name)}:\n{inner}"


def _with(text: str, owner: Any, name: str, value: Any) -> str:
    if owner.flow_style:
        at = int(owner.end_mark.index) - 1
        between = ", " if owner.value else ""
        return text[:at].rstrip() + f"{between}{yaml_value(name)}: {yaml_value(value)}" + text[at:]
    first = owner.value[0][0].start_mark
    at = line_around(text, max(_end(owner.value[-1][1]) - 1, 0))[1]
    newline = "" if text[:at].endswith("\n") else "\n"
    return text[:at] + newline + _entry(name, value, " " * first.column) + text[at:]


def _lines_of(text: str, pair: tuple[Any, Any]) -> tuple[int, int]:
    """Return where the lines of a key and its value begin and end."""
    key, node = pair
    return line_around(text, key.start_mark.index)[0], line_around(text, max(_end(node) - 1, 0))[1]


def _replaced(text: str, owner: Any, pair: tuple[Any, Any], value: Any) -> str:
    key, node = pair
    if isinstance(value, Mapping) and value and not owner.flow_style:
        start, end = _lines_of(text, pair)
        return text[:start] + _entry(key.value, value, " " * key.start_mark.column) + text[end:]
    start, end = int(node.start_mark.index), _end(node)
    after = int(key.end_mark.index)
    if start == end or "\n" in text[after:start]:  # nothing after the colon, or a block below it
        return text[:after] + f": {yaml_value(value)}" + text[max(end, after + 1) :]
    return text[:start] + yaml_value(value) + text[end:]


def _without(text: str, owner: Any, pair: tuple[Any, Any]) -> str:
    key, node = pair
    if not owner.flow_style:
        start, end = _lines_of(text, pair)
        return text[:start] + text[end:]
    at = owner.value.index(pair)
    if at + 1 < len(owner.value):
        return text[: key.start_mark.index] + text[owner.value[at + 1][0].start_mark.index :]
    if at:
        return text[: _end(owner.value[at - 1][1])] + text[_end(node) :]
    return text[: owner.start_mark.index] + "{}" + text[owner.end_mark.index :]
