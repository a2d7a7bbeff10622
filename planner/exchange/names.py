"""Names of the targets, for help and completion: without the modules that price plans."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hardware_profiles.fields import read_toml

FILE: Final = Path(__file__).parents[2] / "cost_models" / "legality" / "capabilities.toml"


def target_names() -> list[str]:
    """Return the names of all targets."""
    return sorted(
        name for name, one in read_toml(FILE, "the trainers").items() if "checked_by" in one
    )
