"""The rooms of ``cost_models``, in the order of their import-linter contract, and their titles."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = "cost_models"
# what each room's page answers
TITLES: Final[Mapping[str, str]] = {
    "model": "Parameters",
    "partition": "Partition: what each rank holds",
    "communication": "Communication",
    "activations": "Activations",
    "compute": "Computation",
    "memory": "Memory",
    "serving": "Serving",
    "step_time": "Step time",
    "techniques": "Techniques that are compared",
    "pricing": "Pricing a step",
    "traced": "Traced modules",
}


def rooms() -> list[str]:
    """Return the subpackages and top-level modules, lowest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for contract in project["tool"]["importlinter"]["contracts"]:
        if contract.get("containers") == [PACKAGE] and contract["type"] == "layers":
            return [room for layer in reversed(contract["layers"]) for room in layer.split(" | ")]
    raise SystemExit(f"pyproject.toml has no layers contract of {PACKAGE}")
