"""Keys of a target's file: each carries options of ``fit``, in both directions.

A path names the levels of a nested document with dots: ``zero_optimization.stage``. A last ``*``
stands for all keys below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from hardware_profiles.errors import InputError
from hardware_profiles.fields import names_in
from planner.exchange.job import Job

OMIT: Final = object()  # written by no key
MISSING: Final = object()
MAX_LEAVES: Final = 20_000
Settings = dict[str, Any]  # options of ``fit``


@dataclass(frozen=True)
class Source:
    """A document that is read, and where its neighbours lie."""

    document: Mapping[str, Any]
    folder: Path | None = None  # of files that it names

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at a path, or the default."""
        found = lookup(self.document, path)
        return default if found is MISSING or found is None else found


def reads_nothing(value: Any, source: Source) -> Settings:
    """Return what a key without a meaning states."""
    return {}


def omitted(job: Job) -> Any:
    """Return what writes no key."""
    return OMIT


@dataclass(frozen=True)
class Key:
    """One key of a file.

    ``write``: the value for a job, or OMIT. ``read``: the options that a value states.
    ``absent``: the options that a file without the key states. ``carries``: names of the options,
    which the written file mentions where its syntax has comments.
    """

    path: str
    carries: tuple[str, ...] = ()
    write: Callable[[Job], Any] = omitted
    read: Callable[[Any, Source], Mapping[str, Any]] = reads_nothing
    absent: Mapping[str, Any] = field(default_factory=dict)


def same(path: str, name: str, *, unless: Any = OMIT, absent: Any = MISSING) -> Key:
    """Return a key whose value is an option's; ``unless``: a value that is not written."""

    def write(job: Job) -> Any:
        value = job.settings.get(name, OMIT)
        return OMIT if value is OMIT or (value == unless) else value

    stated = {} if absent is MISSING else {name: absent}
    return Key(path, (name,), write, lambda value, source: {name: value}, stated)


def words(
    path: str,
    name: str,
    theirs: Mapping[Any, Any],
    *,
    also: Mapping[Any, Any] | None = None,
    unless: Any = OMIT,
    absent: Any = MISSING,
) -> Key:
    """Return a key whose words are translated.

    ``theirs``: from our value to theirs; ``also``: further words of theirs, to our values.
    """
    ours = {**{word: value for value, word in theirs.items()}, **(also or {})}

    def write(job: Job) -> Any:
        value = job.settings.get(name, OMIT)
        return OMIT if value == unless or value not in theirs else theirs[value]

    def read(value: Any, source: Source) -> Settings:
        word = value.lower() if isinstance(value, str) and value not in ours else value
        found = {str(k).lower(): v for k, v in ours.items()} if isinstance(word, str) else ours
        try:
            known = word in found
        except TypeError:  # a list or a mapping
            known = False
        if not known:
            allowed = ", ".join(str(each) for each in ours)
            raise UnknownWord(f"{path} = {str(value)[:60]!r} (known: {allowed})")
        return {name: found[word]}

    stated = {} if absent is MISSING else {name: absent}
    return Key(path, (name,), write, read, stated)


def integer(name: str) -> Callable[[Any, Source], Settings]:
    """Return the reader of an option that is a whole number."""
    return lambda value, source: {name: int(value)}


def constant(path: str, value: Any) -> Key:
    """Return a key that is always written so, and means nothing where it is read."""
    return Key(path, write=lambda job: value)


def without_effect(paths: str | Iterable[str], *, section: str = "") -> tuple[Key, ...]:
    """Return keys of a section that a file may have and a price does not depend on."""
    found = names_in(paths) if isinstance(paths, str) else paths
    return tuple(Key(section + path) for path in found)


def not_priced(*paths: str, advice: str = "") -> tuple[Key, ...]:
    """Return switches that change the memory or the time of a step, and are priced as off."""

    def read(path: str, value: Any, source: Source) -> Settings:
        if value in (False, 0, "", "none") or str(value).lower() == "false":
            return {}
        raise UnknownWord(f"{path} = {str(value)[:60]} is not priced{advice}")

    return tuple(Key(path, read=partial(read, path)) for path in paths)


class UnknownWord(InputError):
    """A value of a key that has no counterpart here; the file is read without it."""


def lookup(document: Any, path: str) -> Any:
    """Return the value at a path; MISSING where it does not exist.

    >>> lookup({"a": {"b": 1}}, "a.b"), lookup({"a": 1}, "a.b") is MISSING
    (1, True)
    """
    for name in path.split("."):
        if not isinstance(document, Mapping) or name not in document:
            return MISSING
        document = document[name]
    return document


def placed(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested document of values by path.

    >>> placed({"a.b": 1, "a.c": 2, "d": 3})
    {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    document: dict[str, Any] = {}
    for path, value in leaves.items():
        *levels, last = path.split(".")
        inner = document
        for level in levels:
            inner = inner.setdefault(level, {})
        inner[last] = value
    return document


def leaves_of(document: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the paths and values of a document whose values are no mappings.

    >>> list(leaves_of({"a": {"b": 1}, "d": []}))
    [('a.b', 1), ('d', [])]
    """
    for name, value in document.items():
        path = f"{before}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, f"{path}.")
        else:
            yield path, value


def unknown_paths(keys: Sequence[Key], document: Mapping[str, Any]) -> list[str]:
    """Return the paths of a document that no key names."""
    exact = {key.path for key in keys if not key.path.endswith("*")}
    below = tuple(key.path[:-1] for key in keys if key.path.endswith("*"))
    found = []
    sections = {path[:end] for path in exact for end, sign in enumerate(path) if sign == "."}
    for number, (path, value) in enumerate(leaves_of(document)):
        if number > MAX_LEAVES:
            raise InputError(f"more than {MAX_LEAVES:,} values: no configuration of a trainer")
        if value in (None, {}) and (path in sections or f"{path}." in below):
            continue  # an empty section
        if not (path in exact or path.startswith(below) or _within(path, exact)):
            found.append(path)
    return found


def _within(path: str, exact: set[str]) -> bool:
    """Whether a key takes a whole mapping in which a path lies."""
    levels = path.split(".")
    return any(".".join(levels[:end]) in exact for end in range(1, len(levels)))
