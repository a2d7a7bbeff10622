"""Names of the targets, for help and completion: without the modules that price plans."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hardware_profiles.fields import read_toml

FILE: Final = Path(__file__).parent / "capabilities.toml"


def target_names() -> list[str]:
    """Return the names of all targets."""
    return sorted(read_toml(FILE, "the targets"))
