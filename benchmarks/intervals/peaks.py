"""Intervals of peaks from sources left out: ``python -m benchmarks.intervals.peaks --write``.

Prices every run whose peak is known, of the published table and of ``benchmarks/unseen/*.csv``,
with the profile of its trainer and as if no profile described it (kind ``unknown``; where that
makes a difference). A run whose trainer no profile describes, priced with a stand-in, is of that
kind, too. Prints the file of intervals (``cost_models/memory_intervals.csv``), then, for
every source, the share of its runs inside the intervals that the other sources give, and the
verdicts that those give. ``--write`` writes the file.

The kind of a run is its trainer, the quantity that was measured (live tensors, reserved, the
device), whether a setting that its source does not state was assumed, and whether its model is a
mixture of experts; `benchmarks/intervals/shrunk.py` has the method. Runs of unknown trainers are
apart: their errors are twice as large, and more of them lie far below the prediction. Verdicts look
as far as the quantile ``VERDICT`` on each side.
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
    coverage_lines,
    quantile,
    shortest,
    source_weights,
)
from benchmarks.unseen import UNSEEN, with_first_prices
from cost_models.uncertainty import MEMORY_COLUMNS, MEMORY_INTERVALS, UNKNOWN, memory_kind
from planner.validation.rows.runs_file import PUBLISHED, read_runs
from planner.validation.rows.trainer import is_described

VERDICT: Final = 0.9  # share of the runs that a side of the verdict's interval holds
RULE: Final = Rule(("trainer", "quantity", "assumed", "experts"), (1.0,) * 4)


def all_runs() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the runs with their profiles, and those of unknown trainers.

    Unknown: no profile describes the trainer, or the price changes without any.
    """
    described = _kinds(memory_left_out.compared_runs(described=True))
    described = with_first_prices(described, "bytes", "predicted_peak_bytes")
    unknown = ~described.row_id.isin(_described_runs())
    without = _kinds(memory_left_out.compared_runs(described=False))
    without = without.assign(trainer=UNKNOWN, blind=False)
    profile = described.set_index("row_id").software
    changed = (without.software != without.row_id.map(profile)).to_numpy()
    others = [described[unknown].assign(trainer=UNKNOWN), without[changed]]
    parts = described[~unknown], pd.concat(others, ignore_index=True)
    known, rest = (part[part.error.notna()].reset_index(drop=True) for part in parts)
    return RULE.with_cells(known), RULE.with_cells(rest)


def _described_runs() -> set[str]:
    tables = map(read_runs, (PUBLISHED, *UNSEEN.values()))
    return {row.name for row in chain.from_iterable(tables) if is_described(row)}


def _kinds(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(
        log_error=np.log1p(rows.error),
        trainer=[memory_kind(software) for software in rows.software],
        quantity=rows.memory_kind,
        assumed=rows.defaults.map(len) > 0,
        experts=rows.model_kind.fillna("").str.startswith("moe"),
    )


def ends(rows: pd.DataFrame, used: np.ndarray) -> tuple[Ends, Ends]:
    """Return the ends of intervals and of verdicts in expected sizes, from the cells ``used``."""
    cells = RULE.cells_of(rows)
    relative = RULE.relative_errors(rows, cells, used)
    weights, errors = source_weights(rows.loc[relative.index]), relative.to_numpy()
    sides = -quantile(-errors, weights, VERDICT), quantile(errors, weights, VERDICT)
    return shortest(errors, weights), (-sides[0], sides[1])


def table_text(described: pd.DataFrame, unknown: pd.DataFrame) -> str:
    """Return the text of the file: rows about all trainers are about those with a profile."""
    first, second = (
        RULE.table(rows, MEMORY_COLUMNS, ends(rows, np.ones(rows.cell.nunique(), dtype=bool)))
        for rows in (described, unknown)
    )
    lines = second.splitlines(keepends=True)
    return first + "".join(line for line in lines if line.startswith(f"{UNKNOWN},"))


def main() -> None:
    """Print file and coverage; with ``--write`` write the file."""
    described, unknown = all_runs()
    text = table_text(described, unknown)
    if "--write" in sys.argv[1:]:
        MEMORY_INTERVALS.write_text(text, encoding="utf-8")
    print(text)
    for what, rows in (("with profiles", described), ("without", unknown)):
        print(f"\n{what}", *coverage_lines(RULE.left_out(rows)), sep="\n")


if __name__ == "__main__":
    main()
