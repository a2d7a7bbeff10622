"""Well-known architectures by name, as TOML files in ``presets/``.

Every preset has the keys of the published config.json, where they are from, and the published
number of parameters, which a test compares with ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.reading import Fields, read_toml

FOLDER: Final = Path(__file__).parent / "presets"


@dataclass(frozen=True, slots=True)
class Preset:
    """One well-known architecture."""

    name: str
    aliases: tuple[str, ...]
    source: str
    published_parameters: int
    config: Mapping[str, Any]
    stored: str = ""  # format of the published weights where it is not one of 16 or 32 bits


@cache
def _presets() -> dict[str, Preset]:
    """Read every preset file; the keys are the names, in the order of the files."""
    found: dict[str, Preset] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        for name, values in read_toml(path, "presets").items():
            fields = Fields(values, f"{path}: {name}")
            found[name] = Preset(
                name=name,
                aliases=tuple(fields.items("aliases", ())),
                source=fields.text("source"),
                published_parameters=fields.integer("parameters", low=1, high=10**14),
                config=_config(fields),
                stored=fields.text("stored", ""),
            )
    return found


def _config(fields: Fields) -> Mapping[str, Any]:
    """Return the keys of config.json; TOML has no null, so those that are null stand in a list."""
    nulls = {str(key): None for key in fields.items("null", ())}
    return {**fields.sub("config").values, **nulls}


@cache
def _names() -> dict[str, str]:
    """Return the name of a preset for each name and alias in lower case."""
    presets = _presets().values()
    aliases = {alias.lower(): p.name for p in presets for alias in p.aliases}
    return aliases | {p.name.lower(): p.name for p in presets}


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, without their aliases."""
    return tuple(_presets())


def is_preset(name: str) -> bool:
    """Whether ``name`` is a preset or an alias of one; case does not matter."""
    return name.lower() in _names()


def similar_presets(name: str) -> str:
    """Return a hint such as ``Did you mean llama-3-8b?``, or an empty string."""
    return did_you_mean(name, preset_names())


def load_preset(name: str) -> Preset:
    """Return a preset by its name or an alias; case does not matter.

    >>> load_preset("Meta-Llama-3-8B").name
    'llama-3-8b'
    """
    if not is_preset(name):
        hint = similar_presets(name) or f"Known: {', '.join(preset_names())}"
        raise InputError(f"no preset is named {name!r}. {hint}")
    return _presets()[_names()[name.lower()]]
