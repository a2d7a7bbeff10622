"""Names of the targets, for help and completion: without the modules that price plans."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from hardware_profiles.fields import read_toml

FILE: Final = Path(__file__).parents[2] / "cost_models" / "legality" / "capabilities.toml"


@cache
def target_names() -> tuple[str, ...]:
    """Return the names of all targets."""
    tables = read_toml(FILE, "the trainers")
    return tuple(sorted(name for name, one in tables.items() if "checked_by" in one))
