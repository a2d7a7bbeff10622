"""Intervals of step times from sources left out: ``python -m benchmarks.intervals.times --write``.

Prices the published runs and the tables of runs that were found later (``benchmarks/unseen/*.csv``)
and prints, for every kind (software profile, architecture, mixture of experts or not): runs, the
interval of ``cost_models/time_intervals.csv``, the share of the runs inside it, and the shortest
interval that holds 90 % of them. Then, for every source, the share of its runs inside the intervals
that the other sources give. ``--write`` writes the file.

`benchmarks/intervals/shrunk.py` has the method.
"""

from __future__ import annotations

import csv
import io
import sys
from typing import Final

import numpy as np
import pandas as pd

from benchmarks.intervals.shrunk import Rule, coverage_lines, shortest
from benchmarks.unseen import UNSEEN, validated, with_first_prices
from cost_models.uncertainty import TIME_COLUMNS, TIME_INTERVALS, Spread, compared_kind
from planner.validation.rows.cluster import accelerator_of
from planner.validation.rows.reading import Reading
from planner.validation.rows.runs_file import PUBLISHED, read_runs

# the prior of a kind: the mean of its trainer's and its accelerator's, and what experts add. One
# run is half a source: of 1, 4 and 10 the intervals of sources left out are narrowest at 1
RULE: Final = Rule(("kind", "architecture", "experts"), (0.5, 0.5, 1.0), few=1.0)


def compared_runs() -> pd.DataFrame:
    """Return the published runs whose time is compared, with ``error`` as in ``shortest``."""
    answer = validated("published")
    rows = answer.rows
    counted = rows.source_group.isin(answer.summary["time"]["over_groups"]["groups"])
    return _described(rows[rows.time_error.notna() & ~rows.partial & counted], "published")


def _described(rows: pd.DataFrame, table: str) -> pd.DataFrame:
    named = {row.name: row for row in read_runs(UNSEEN.get(table, PUBLISHED))}
    cards = [accelerator_of(Reading(named[name])) for name in rows.row_id]
    errors = 1.0 / (1.0 + rows.time_error.astype(float)) - 1.0
    rows = rows.assign(error=errors, table=table)
    return with_first_prices(rows, "seconds", "predicted_step_seconds").assign(
        experts=rows.model_kind.fillna("").str.startswith("moe"),
        card=cards,
        architecture=[card.architecture for card in cards],
        kind=[compared_kind(software) for software in rows.software],
        found_later=table in UNSEEN,
    )


def all_runs() -> pd.DataFrame:
    """Return published runs and those found later, without those that stay out of the mean."""
    tables = []
    for table in ("published", *UNSEEN):
        rows = validated(table).rows
        counts = rows.time_error.notna() & ~rows.partial & rows.left_out.isna()
        tables.append(_described(rows[counts], table))
    return RULE.with_cells(pd.concat(tables, ignore_index=True))


def table_text(rows: pd.DataFrame) -> str:
    """Return the text of the file."""
    cells = RULE.cells_of(rows)
    ends = RULE.ends_of(rows, cells, np.ones(len(cells), dtype=bool))
    return RULE.table(rows, TIME_COLUMNS, (ends,))


def main() -> None:
    """Print both tables; with ``--write`` write the file."""
    rows = all_runs()
    text = table_text(rows)
    if "--write" in sys.argv[1:]:
        TIME_INTERVALS.write_text(text, encoding="utf-8")
    print(f"{'':<46} runs   stated             inside   shortest")
    for one in csv.DictReader(io.StringIO(text)):
        spread = Spread(float(one["below"]), float(one["above"]), one["sources"])
        trainer, architecture = one["software"], one["architecture"]
        experts = {"1": ", experts", "0": ", dense"}.get(one["experts"], "")
        of_kind = (rows.kind == trainer) & (rows.architecture == architecture)
        errors = rows[of_kind & (rows.experts == (one["experts"] == "1"))].error.to_numpy()
        name = f"{trainer}, {architecture}{experts}"
        if one["sources"]:
            print(f"{name:<46} {interval_line(spread, errors)}")
        else:
            print(f"{name:<46}        -{100 * spread.below:4.1f} % +{100 * spread.above:5.1f} %")
    print(*coverage_lines(RULE.left_out(rows)), sep="\n")


def interval_line(spread: Spread, errors: np.ndarray) -> str:
    """Return a line: runs, the stated interval, how many are inside, the shortest interval."""
    inside = float(np.mean((errors >= -spread.below) & (errors <= spread.above)))
    below, above = shortest(errors)
    return (
        f"{len(errors):4d}   -{100 * spread.below:4.1f} % +{100 * spread.above:5.1f} %  "
        f"{100 * inside:5.1f} %   -{100 * below:4.1f} % +{100 * above:5.1f} %"
    )


if __name__ == "__main__":
    main()
