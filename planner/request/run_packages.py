"""Packages of the extra ``run``, which the executor needs and the planner does not."""

from __future__ import annotations

import importlib.util
from typing import Final

PACKAGES: Final = ("torch", "transformers")
INSTALL: Final = "pip install 'shardplan[run]'"


def missing_run_package() -> str | None:
    """Return the first package of the extra ``run`` that is not installed, or None."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is None), None)
