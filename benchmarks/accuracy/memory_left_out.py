"""Peaks of trainers that no profile describes.

    python -m benchmarks.accuracy.cross_validate --memory [--write]

``--write`` keeps the errors in ``memory_left_out.csv`` and the counts of verdicts in
``memory_verdicts.csv``.

Prices every run of ``planner validate`` and of ``benchmarks/unseen/*.csv`` whose peak is known,
twice: with its trainer's profile, and as if no profile described its trainer. For the second price
only the entries ``unnamed`` of ``planner/validation/rows/words.toml`` count, and the engines that a
row's words name: compiled or not, Liger's kernels, FSDP, DDP, DeepSpeed's stages, autocast.

For both, prints the errors of every source and the share of its runs inside the shortest interval
that holds 90 % of the runs of all other sources (each source counts the same).
`benchmarks/intervals/peaks.py` makes the intervals that predictions state of both.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

import planner
from benchmarks.intervals.shrunk import shortest
from benchmarks.unseen import UNSEEN, validated
from planner.validation.rows.words import without_trainers
from planner.validation.statistics import verdict_figures

WRITTEN: Final = Path(__file__).with_suffix(".csv")
VERDICTS: Final = WRITTEN.with_name("memory_verdicts.csv")


def compared_runs(*, described: bool) -> pd.DataFrame:
    """Return the runs of all tables; ``error`` is measured / predicted - 1.

    ``described``: whether profiles of trainers count.
    """
    if described:
        tables = [validated("published").rows, *map(_peaks, UNSEEN.values())]
    else:
        with without_trainers():
            tables = [_peaks(path) for path in (None, *UNSEEN.values())]
    names = np.repeat(["published", *UNSEEN], list(map(len, tables)))
    rows = pd.concat(tables, ignore_index=True).assign(
        table=names, found_later=names != "published"
    )
    rows = rows[rows.tests_memory & ~rows.partial.astype(bool) & rows.verdict.notna()]
    known = rows.memory_is_stated  # otherwise nobody knows what the peak is a peak of
    rows = rows.assign(memory_error=rows.memory_error.where(known))
    return rows.assign(error=1.0 / (1.0 + rows.memory_error.astype(float)) - 1.0)


def _peaks(path: Path | None) -> pd.DataFrame:
    return planner.validate(path, what="memory").rows


def interval_of(rows: pd.DataFrame) -> tuple[float, float]:
    """Return how far below and above the shortest interval reaches; sources count the same."""
    share = 1.0 / rows.groupby("source_group").error.transform("size")
    return shortest(rows.error.to_numpy(), share.to_numpy())


def by_source(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the errors of every source, and the share inside the interval of all others."""
    found = []
    for source, own in rows.groupby("source_group"):
        below, above = interval_of(rows[rows.source_group != source])
        size = own.memory_error.astype(float)
        found.append(
            {
                "source": source,
                "runs": len(own),
                "median": size.abs().median(),
                "p90": size.abs().quantile(0.9),
                "bias": size.mean(),
                "inside": np.mean((own.error >= -below) & (own.error <= above)),
            }
        )
    return pd.DataFrame(found)


def main() -> None:
    """Print both tables."""
    tables, counts = [], []
    for described in (True, False):
        rows = compared_runs(described=described)
        verdicts = verdict_figures(rows)
        rows = rows[rows.error.notna()]
        table = by_source(rows)
        size = rows.memory_error.astype(float)
        inside = float((table.inside * table.runs).sum() / table.runs.sum())
        sources = table["median"].mean()
        all_runs = ("all", len(rows), size.abs().median(), size.abs().quantile(0.9), size.mean())
        table.loc[len(table)] = [*all_runs, inside]
        percent = dict.fromkeys(list(table)[2:], "{:+.1%}".format)
        print(
            f"{'With the profile of each trainer' if described else 'As an undescribed trainer'}\n"
        )
        print(table.to_string(index=False, formatters=percent))
        below, above = interval_of(rows)
        print(
            f"\nMedian over sources {sources:.1%}. 90 % of the runs: measured {-below:+.1%} to "
            f"{above:+.1%} off.\nOf {verdicts['died']} runs that ran out of memory, "
            f"{verdicts['died_said_to_fit']} are said to fit; of {verdicts['lived']} that did not, "
            f"{verdicts['lived_said_not_to_fit']} are said not to fit.\n"
        )
        tables.append(table)
        prices = "with the profile of each trainer" if described else "as an undescribed trainer"
        counts.append({"prices": prices, **verdicts})
    if "--write" in sys.argv[1:]:
        both = tables[0].merge(
            tables[1].drop(columns="runs"), on="source", suffixes=("", "_undescribed")
        )
        both.to_csv(WRITTEN, index=False, float_format="%.4f", lineterminator="\n")
        columns = [name for name in counts[0] if not name.endswith("_rows")]
        pd.DataFrame(counts, columns=columns).to_csv(
            VERDICTS, index=False, float_format="%.4f", lineterminator="\n"
        )
