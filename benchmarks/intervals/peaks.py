"""Intervals of peaks from sources left out: ``python -m benchmarks.intervals.peaks --write``.

Prices every run whose peak is known, of the published table and of ``benchmarks/unseen/*.csv``,
with the profile of its trainer and as if no profile described it (kind ``unknown``; where that
makes a difference). A run whose trainer no profile describes, priced with a stand-in, is of that
kind, too. Prints the file of intervals (``cost_models/memory_intervals.csv``), then, for
every source, the share of its runs inside the intervals that the other sources give, and the
verdicts that those give. ``--write`` writes the file.

The kind of a run is its trainer, the quantity that was measured (live tensors, reserved, the
device), whether a setting that its source does not state and that a peak hangs on was assumed
(``assumed_settings``), and whether its model is a mixture of experts;
`benchmarks/intervals/shrunk.py` has the method. An unknown trainer is one of the trainers. Verdicts
look as far as the quantile ``VERDICT`` on each side.
"""

from __future__ import annotations

import sys
from itertools import chain
from typing import Final

import numpy as np
import pandas as pd

from benchmarks.accuracy import memory_left_out
from benchmarks.intervals.shrunk import (
    Ends,
    Rule,
    counted,
    coverage_lines,
    quantile,
    shortest,
)
from benchmarks.unseen import UNSEEN, with_first_prices
from cost_models.uncertainty import MEMORY_COLUMNS, MEMORY_INTERVALS, UNKNOWN, memory_kind
from planner.validation.rows.runs_file import PUBLISHED, read_runs
from planner.validation.rows.trainer import is_described
from planner.validation.rows.unstated_plan import assumed_settings

VERDICT: Final = 0.9  # share of the runs that a side of the verdict's interval holds
RULE: Final = Rule(("trainer", "quantity", "assumed", "experts"), (1.0,) * 4)


def all_runs() -> pd.DataFrame:
    """Return the runs with their profiles, and those of unknown trainers (``UNKNOWN``).

    Unknown: no profile describes the trainer, or the price changes without any.
    """
    described = _kinds(memory_left_out.compared_runs(described=True))
    described = with_first_prices(described, "bytes", "predicted_peak_bytes")
    unknown = ~described.row_id.isin(_described_runs())
    without = _kinds(memory_left_out.compared_runs(described=False))
    without = without.assign(trainer=UNKNOWN, blind=False)
    profile = described.set_index("row_id").software
    changed = (without.software != without.row_id.map(profile)).to_numpy()
    described.loc[unknown, "trainer"] = UNKNOWN
    rows = pd.concat([described, without[changed]])
    return RULE.with_cells(rows[rows.error.notna()].reset_index(drop=True))


def is_unknown(rows: pd.DataFrame) -> pd.Series:
    """Say of every run whether its trainer counts as unknown."""
    return rows.trainer == UNKNOWN


def _described_runs() -> set[str]:
    tables = map(read_runs, (PUBLISHED, *UNSEEN.values()))
    return {row.name for row in chain.from_iterable(tables) if is_described(row)}


def _kinds(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(
        trainer=[memory_kind(software) for software in rows.software],
        quantity=rows.memory_kind,
        assumed=rows.defaults.map(assumed_settings) > 0,
        experts=rows.model_kind.fillna("").str.startswith("moe"),
    )


def ends(rows: pd.DataFrame, used: np.ndarray) -> tuple[Ends, Ends]:
    """Return the ends of intervals and of verdicts in expected sizes, from the cells ``used``."""
    cells = RULE.cells_of(rows)
    relative = RULE.relative_errors(rows, cells, used)
    errors, (weights, new) = relative.to_numpy(), counted(rows.loc[relative.index])
    below, above = (quantile(side, weights, VERDICT, new) for side in (-errors, errors))
    return shortest(errors, weights, new), (below, above)


def table_text(rows: pd.DataFrame) -> str:
    """Return the text of the file."""
    return RULE.table(rows, MEMORY_COLUMNS, ends(rows, np.ones(rows.cell.nunique(), dtype=bool)))


def main() -> None:
    """Print file and coverage; with ``--write`` write the file."""
    rows = all_runs()
    text = table_text(rows)
    if "--write" in sys.argv[1:]:
        MEMORY_INTERVALS.write_text(text, encoding="utf-8")
    print(text)
    apart = RULE.left_out(rows)
    for what, part in (("with profiles", ~is_unknown(apart)), ("without", is_unknown(apart))):
        print(f"\n{what}", *coverage_lines(apart[part]), sep="\n")


if __name__ == "__main__":
    main()
