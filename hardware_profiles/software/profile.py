"""Profiles of software: figures in groups, each with its source, in one TOML file a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self, TypeVar

from msgspec import Meta, Struct, to_builtins
from msgspec.structs import replace

from hardware_profiles.fields import Positive, convert

Share = Annotated[float, Meta(ge=0.0, le=10.0)]
Count = Annotated[int, Meta(ge=1)]


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


class LearnedRun(Struct, frozen=True, forbid_unknown_fields=True):
    """A run, and its weight in steps of plans like it (cost_models/step_time/unexplained.py)."""

    run: str  # its name
    weight: Annotated[float, Meta(ge=-100.0, le=100.0)]
    num_parameters: Count
    seq_len: Count
    micro_batch_size: Count
    num_microbatches: Count
    data_parallel: Count
    tensor_parallel: Count
    pipeline_parallel: Count
    context_parallel: Count
    expert_parallel: Count
    precision: str
    adapter: str
    attention_kernel: str


class Unexplained(Struct, frozen=True, forbid_unknown_fields=True):
    """Errors of step times that no mechanism explains, and how far they hold for other plans."""

    length: Positive  # doublings
    source: str
    runs: tuple[LearnedRun, ...]


class Learned(Struct, frozen=True, forbid_unknown_fields=True):
    """What a profile of a user's own was learned from (``shardplan learn``)."""

    runs: Count
    accelerator: str
    unexplained: Unexplained | None = None
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
    for group in kind.__struct_fields__[len(Profile.__struct_fields__) :]:
        entries = dict((shared or {}).get(group, {}))
        entries |= convert(values.get(group, {}), dict[str, Entry], f"{where}: {group}")
        sources.update((f"{group}.{name}", entry.source) for name, entry in entries.items())
        own = {name: entry.value for name, entry in entries.items()}
        values[group] = {**parent.get(group, {}), **own}
    return convert({**values, "sources": sources}, kind, where)
