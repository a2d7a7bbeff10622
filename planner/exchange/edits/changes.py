"""Changes of a document by path, and the text that has them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from hardware_profiles.errors import InputError
from planner.exchange.keys import MISSING, leaves_of, lookup

REMOVED: Final = object()
Changes = Mapping[str, Any]  # by path: a value, a mapping of values, or REMOVED
Editor = Callable[[str, str, Any], Iterator[str]]  # text, path, value: texts to try
Parse = Callable[[str], Mapping[str, Any]]


def applied(document: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Return a document with changes; mappings that become empty go with their last key.

    >>> applied({"a": {"b": 1}, "c": 2}, {"a.b": REMOVED, "d.e": 3})
    {'c': 2, 'd': {'e': 3}}
    """
    found = copy.deepcopy(dict(document))
    for path, value in changes.items():
        *levels, last = path.split(".")
        owners: list[tuple[dict[str, Any], str]] = []
        inner = found
        for level in levels:
            if not isinstance(inner.get(level), dict):
                if value is REMOVED:
                    break
                inner[level] = {}
            owners.append((inner, level))
            inner = inner[level]
        else:
            if value is not REMOVED:
                inner[last] = copy.deepcopy(value)
                continue
            inner.pop(last, None)
            for owner, level in reversed(owners):
                if not owner[level]:
                    del owner[level]
    return found


def whole_changes(document: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Return the same changes, one for each part that appears or disappears as a whole.

    >>> whole_changes({"a": {"b": 1}, "s": "x"}, {"a.b": 2, "s.t": 1, "s.u": 2})
    {'a.b': 2, 's': {'t': 1, 'u': 2}}
    """
    wanted = applied(document, changes)
    found: dict[str, Any] = {}
    for path in changes:
        levels = path.split(".")
        for end in range(1, len(levels) + 1):
            part = ".".join(levels[:end])
            before, after = lookup(document, part), lookup(wanted, part)
            if isinstance(before, dict) and isinstance(after, dict):
                continue
            if before is not after and before != after:
                found[part] = REMOVED if after is MISSING else after
            break
    return found


def line_around(text: str, at: int) -> tuple[int, int]:
    """Return the start of the line of a position, and the position after its newline."""
    end = text.find("\n", at)
    return text.rfind("\n", 0, at) + 1, len(text) if end < 0 else end + 1


def edited(text: str, changes: Changes, editor: Editor, parse: Parse) -> str:
    """Return a text with changes, or raise with the first one that the editor cannot make."""
    document = parse(text)
    left = whole_changes(document, changes)
    for path, value in list(left.items()):
        del left[path]
        found = _edited(text, document, (path, value), left, editor, parse)
        if found is None:
            verb = "be removed" if value is REMOVED else f"be set to {value}"
            raise InputError(f"{path} cannot {verb} in the text of the file")
        text, document = found
    return text


def _edited(
    text: str,
    document: Mapping[str, Any],
    change: tuple[str, Any],
    left: Changes,
    editor: Editor,
    parse: Parse,
) -> tuple[str, Mapping[str, Any]] | None:
    """Return a text with one change and its document; ``left``: changes that are still to come."""
    path, value = change
    wanted = _leaves(applied(document, {path: value}), left)
    if wanted == _leaves(document, left):
        return text, document  # an earlier change had it as a consequence
    for candidate in editor(text, path, value):
        try:
            found = parse(candidate)
        except InputError:
            continue
        if _leaves(found, left) == wanted:
            return candidate, found
    parts = lookup(document, path) if value is REMOVED else value
    if not isinstance(parts, Mapping):
        return None
    for below, each in list(leaves_of(parts, f"{path}.")):  # one by one
        one = (below, REMOVED if value is REMOVED else each)
        done = _edited(text, document, one, left, editor, parse)
        if done is None:
            return None
        text, document = done
    return text, document


def _leaves(document: Mapping[str, Any], but: Changes) -> dict[str, Any]:
    """Return the values by path, without those that are still to be changed."""
    before = tuple(f"{path}." for path in but)
    return {
        path: value
        for path, value in leaves_of(document)
        if path not in but and not path.startswith(before)
    }
