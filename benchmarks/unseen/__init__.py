"""Tables of runs that were found after the constants of the formulas were fixed (README.md)."""

from functools import cache
from pathlib import Path
from typing import Final

import planner
from planner.validation.answer import ValidateAnswer

UNSEEN: Final = {
    name: Path(__file__).with_name(f"{name}.csv")
    for name in (
        "runs",
        "trainers",
        "peaks",
        "2026_11",
        "2026_12",
        "2026_11_26_times",
        "2026_11_26_late_times",
        "2026_11_26_peaks",
        "2026_11_27_peaks",
        "2026_11_27_times",
        "2026_11_27_late_times",
        "2026_11_27_late_peaks",
        "2026_11_28_times",
        "2026_11_28_peaks",
        "2026_11_29_times",
        "2026_11_29_peaks",
        "2026_11_30_times",
        "2026_11_30_peaks",
        "2026_12_01_times",
        "2026_12_01_peaks",
        "2026_12_02_times",
        "2026_12_02_peaks",
        "2026_12_03_times",
        "2026_12_03_peaks",
        "2026_12_04_times",
        "2026_12_04_peaks",
    )
}


@cache
def validated(name: str) -> ValidateAnswer:
    """Return the validation of ``published`` or of a table in ``UNSEEN``."""
    return planner.validate(UNSEEN.get(name))
