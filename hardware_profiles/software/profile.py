"""Profiles of software: figures in groups, each with its source, in one TOML file a profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self, TypeVar

from msgspec import Struct
from msgspec.structs import fields, replace

from hardware_profiles.fields import Fields

WORDS: Final = ("name", "description")


class Profile(Struct, frozen=True, kw_only=True):
    """A profile; a subclass adds its groups, each a Struct of figures."""

    name: str
    description: str
    sources: Mapping[str, str]  # by "group.figure"

    def changed(self, figures: Mapping[str, Any]) -> Self:
        """Return the profile with other figures, given by "group.figure"."""
        found = self
        for name, value in figures.items():
            group, _, figure = name.partition(".")
            record = replace(getattr(found, group), **{figure: value})
            found = replace(found, **{group: record})
        return found


P = TypeVar("P", bound=Profile)


def profile_from_fields(kind: type[P], source: Fields, parent: P | None = None) -> P:
    """Read a profile; a figure that it leaves out is the ``parent``'s."""
    groups = {f.name: f.type for f in fields(kind) if f.name not in (*WORDS, "sources")}
    source.refuse_unknown([*WORDS, "inherits", *groups])
    values: dict[str, Any] = {key: source.text(key) for key in WORDS}
    sources: dict[str, str] = {}
    for group, record in groups.items():
        table = source.sub(group, {})
        table.refuse_unknown(record.__struct_fields__)
        figures = {}
        for name in record.__struct_fields__:
            if parent is not None and name not in table:
                figures[name] = getattr(getattr(parent, group), name)
                sources[f"{group}.{name}"] = parent.sources[f"{group}.{name}"]
            else:
                entry = table.sub(name)
                figures[name] = _value(entry)
                sources[f"{group}.{name}"] = entry.text("source")
        values[group] = record(**figures)
    return kind(**values, sources=sources)


def _value(entry: Fields) -> Any:
    entry.refuse_unknown(("value", "source"))
    raw = entry.values.get("value")
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, Mapping):
        table = entry.sub("value")
        return {key: table.number(key) for key in raw}
    return entry.number("value")
