"""Engines: figures of one subject of a trainer, each with its source, in one TOML file an engine.

A subject is a folder of files in ``engines/``: the wrapper that makes a model data parallel, the
kernels of the optimizer, precision, loss, kernels of layers, kept gradients, stages, traffic that
computation hides, recipes of matmuls in few bits, which plans run. A trainer's profile is a list of
engines and a few figures of its own; ``fsdp2+adamw-fused`` is a trainer without a profile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Final

from msgspec import Struct

from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.fields import convert, read_toml
from hardware_profiles.software.profile import Entry

FOLDER: Final = Path(__file__).parent / "engines"
PLUS: Final = "+"  # between the engines of an expression

Figures = dict[str, dict[str, Entry]]  # by group


class Engine(Struct, frozen=True):
    """Figures of one subject of a trainer."""

    name: str
    description: str
    subject: str  # of the engines of one subject a trainer has one
    figures: Mapping[str, Mapping[str, Entry]]
    capabilities: str | None = None  # of a profile with it; None: its own


@cache
def engine_paths() -> Mapping[str, Path]:
    """Return the files of all engines, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("**/*.toml"))}


def engine_names() -> list[str]:
    """Return the names of all engines, subject by subject."""
    return list(engine_paths())


@cache
def engine(name: str) -> Engine:
    """Load an engine, with the figures of the engines that it is made of."""
    if name not in engine_paths():
        known = f"Known: {', '.join(engine_names())}"
        raise InputError(
            f"engine {name!r} is unknown. {did_you_mean(name, engine_names())} {known}".replace(
                "  ", " "
            )
        )
    path = engine_paths()[name]
    document = dict(read_toml(path, "an engine"))
    parts = convert(document.pop("engines", []), list[str], f"{path}: engines")
    title, description = (str(document.pop(key, "")) for key in ("name", "description"))
    capabilities = document.pop("capabilities", None)
    figures = joined(engine(part).figures for part in parts)
    own = convert(document, Figures, str(path))
    return Engine(title, description, path.parent.name, joined([figures, own]), capabilities)


def engines_together(names: Iterable[str]) -> Figures:
    """Return the figures of several engines of different subjects; later ones override."""
    engines = [engine(name) for name in names]
    for one, other in combinations(engines, 2):
        if one.subject == other.subject:
            raise InputError(
                f"engines {one.name} and {other.name} are both {one.subject} (must be one)"
            )
    return joined(each.figures for each in engines)


def joined(parts: Iterable[Mapping[str, Mapping[str, Entry]]]) -> Figures:
    """Return all figures; those of later parts override."""
    found: Figures = {}
    for part in parts:
        for group, figures in part.items():
            found[group] = {**found.get(group, {}), **figures}
    return found
