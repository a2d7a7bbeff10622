"""Profiles of software: figures in groups, each with its source, in one TOML file a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self, TypeVar

from msgspec import Meta, Struct, to_builtins
from msgspec.structs import fields, replace

from hardware_profiles.fields import convert

Share = Annotated[float, Meta(ge=0.0, le=10.0)]


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """A figure of a file: ``{ value = ..., source = ... }``."""

    value: Any
    source: str


class ProfileGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of figures; their bounds are in their types."""


class LearnedSpread(Struct, frozen=True, forbid_unknown_fields=True):
    """Relative distance of a measurement below and above its prediction, and the source of both."""

    below: Share
    above: Share
    source: str
    runs: Annotated[int, Meta(ge=0)] = 0  # that measured the quantity; 0: not stated


class Learned(Struct, frozen=True, forbid_unknown_fields=True):
    """What a profile of a user's own was learned from (``shardplan learn``)."""

    runs: Annotated[int, Meta(ge=1)]
    accelerator: str
    time: LearnedSpread | None = None  # None: no run measured it
    memory: LearnedSpread | None = None


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A profile; a subclass adds its groups, each a Struct of figures."""

    name: str
    description: str
    sources: Mapping[str, str]  # by "group.figure"
    inherits: str = ""  # the profile of which a file of a user's own changes figures
    learned: Learned | None = None
    capabilities: str = ""  # what it runs: cost_models/legality/capabilities.toml; empty: all

    def changed(self, figures: Mapping[str, Any]) -> Self:
        """Return the profile with other figures, given by "group.figure"."""
        found = self
        for name, value in figures.items():
            group, _, figure = name.partition(".")
            record = replace(getattr(found, group), **{figure: value})
            found = replace(found, **{group: record})
        return found


P = TypeVar("P", bound=Profile)


def profile_of(
    kind: type[P],
    document: Mapping[str, Any],
    where: str,
    parent_of: Callable[[str], P],
    shared: Mapping[str, Mapping[str, Entry]] | None = None,
) -> P:
    """Read a profile; missing figures are ``shared`` ones, or of the profile it ``inherits``."""
    values = dict(document)
    parent: dict[str, Any] = {}
    if "inherits" in values:
        parent = to_builtins(parent_of(convert(values.pop("inherits"), str, f"{where}: inherits")))
        values.setdefault("capabilities", parent["capabilities"])
    sources: dict[str, str] = dict(parent.get("sources", {}))
    for group in (f.name for f in fields(kind) if f.name not in Profile.__struct_fields__):
        entries = dict((shared or {}).get(group, {}))
        entries |= convert(values.get(group, {}), dict[str, Entry], f"{where}: {group}")
        sources.update((f"{group}.{name}", entry.source) for name, entry in entries.items())
        own = {name: entry.value for name, entry in entries.items()}
        values[group] = {**parent.get(group, {}), **own}
    return convert({**values, "sources": sources}, kind, where)
