"""The software profile of a user's own that runs teach, as a TOML file."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from hardware_profiles.fields import write_text_atomically
from hardware_profiles.software.profile import LearnedSpread, Unexplained
from hardware_profiles.software.trainer import SoftwareProfile, software_profile
from planner.learning.mechanisms import figure_of


def profile_toml(
    software: SoftwareProfile,
    figures: Mapping[str, Any],
    where: Mapping[str, str],
    *,
    runs: int,
    source: str,
    accelerator: str,
    spreads: Mapping[str, LearnedSpread],
    left: Unexplained | None = None,
) -> str:
    """Return a file that inherits a trainer's profile and changes figures.

    ``software``: of the runs, with figures that words of their cells changed; ``figures``: learned
    values by "group.figure"; ``where``: 90 % ranges of rates; ``source``: file of the runs;
    ``left``: errors of step times that no mechanism explains.
    """
    import tomli_w

    plural = "s" if runs > 1 else ""
    learned = f"learned from {runs} run{plural} in {source} on {datetime.date.today()}"
    document: dict[str, Any] = {
        "inherits": software.name,
        "description": f"{software.name}, {learned}",
        "learned": {
            "runs": runs,
            "accelerator": accelerator,
            **{name: to_builtins(spread) for name, spread in spreads.items()},
            **({} if left is None else {"unexplained": to_builtins(left)}),
        },
    }
    sources = dict.fromkeys(_own(software), "the words of the runs' cells (shardplan validate)")
    values = {name: figure_of(software, name) for name in sources} | dict(figures)
    for name, value in values.items():
        group, _, figure = name.partition(".")
        text = sources.get(name, "")
        if name in figures:
            text = f"{learned}{where.get(name, '')}"
        if isinstance(value, float):
            value = float(f"{value:.4g}")
        entry = {"value": dict(value) if isinstance(value, Mapping) else value, "source": text}
        document.setdefault(group, {})[figure] = entry
    return tomli_w.dumps(document)


def _own(software: SoftwareProfile) -> list[str]:
    """Return the figures in which a trainer of a row differs from the profile of its name."""
    usual = software_profile(software.name)
    return [name for name in usual.sources if figure_of(software, name) != figure_of(usual, name)]


def write_profile(path: Path, text: str, *, force: bool) -> None:
    """Write the file; a profile that was loaded from it is read again."""
    write_text_atomically(path, text, force=force)
    software_profile.cache_clear()
