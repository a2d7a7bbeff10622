"""Tables of runs that were found after the constants of the formulas were fixed (README.md)."""

from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

import planner
from hardware_profiles.fields import names_in
from planner.validation.answer import ValidateAnswer

UNSEEN: Final = {
    name: Path(__file__).with_name(f"{name}.csv")
    for name in names_in("""
        runs trainers peaks 2026_11 2026_12 2026_11_26_times 2026_11_26_late_times 2026_11_26_peaks
        2026_11_27_peaks 2026_11_27_times 2026_11_27_late_times 2026_11_27_late_peaks
        2026_11_28_times 2026_11_28_peaks 2026_11_29_times 2026_11_29_peaks 2026_11_30_times
        2026_11_30_peaks 2026_12_01_times 2026_12_01_peaks 2026_12_02_times 2026_12_02_peaks
        2026_12_03_times 2026_12_03_peaks 2026_12_04_times 2026_12_04_peaks 2026_12_05_times
        2026_12_05_peaks 2026_12_06_times 2026_12_06_peaks 2026_12_07_times 2026_12_07_peaks
        2026_12_08_times 2026_12_08_peaks 2026_12_09_times 2026_12_09_peaks 2026_12_10_times
        2026_12_10_peaks 2026_12_11_times 2026_12_11_peaks
    """)
}
# by table and run: the seconds and bytes that were predicted before anybody had looked at the run
FIRST_PRICES: Final = Path(__file__).with_name("first_prices.csv")


@cache
def first_prices() -> pd.DataFrame:
    """Return the first predictions, by table and run; empty where the quantity was not measured."""
    return pd.read_csv(FIRST_PRICES).set_index(["table", "row_id"])


def with_first_prices(rows: pd.DataFrame, quantity: str, predicted: str) -> pd.DataFrame:
    """Return runs with the errors of their first prices, which gain nothing from their results.

    ``rows``: with ``table`` and ``error`` (measured / predicted - 1 of the column ``predicted``).
    ``quantity``: of ``first_prices``. A run without a first price keeps the error of today's;
    ``blind`` says which has one.
    """
    runs = pd.MultiIndex.from_frame(rows[["table", "row_id"]])
    first = first_prices()[quantity].reindex(runs).to_numpy()
    blind = np.isfinite(first)
    changes = np.where(blind, rows[predicted].astype(float) / first, 1.0)
    return rows.assign(error=(1.0 + rows.error) * changes - 1.0, blind=blind)


@cache
def validated(name: str) -> ValidateAnswer:
    """Return the validation of ``published`` or of a table in ``UNSEEN``."""
    return planner.validate(UNSEEN.get(name))
