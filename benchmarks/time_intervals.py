"""Intervals of published step times, stated and shortest: ``python -m benchmarks.time_intervals``.

For every software profile and architecture, mixtures of experts apart: how many published runs
there are, the share of them inside the interval of ``cost_models/uncertainty.py``, and the shortest
interval around the prediction that holds 90 % of them, either end at least 2 %. Only runs that are
in the mean over sources.
"""

from __future__ import annotations

import pandas as pd

from benchmarks.accuracy import answer
from benchmarks.memory_intervals import beside
from cost_models.uncertainty import time_spread
from planner.validation.cluster_of_row import accelerator_of
from planner.validation.reading import Reading
from planner.validation.runs_file import PUBLISHED, read_runs


def compared_runs() -> pd.DataFrame:
    """Return the published runs whose time is compared, with ``error`` as in ``shortest``."""
    validated = answer("published")
    rows = validated.rows
    counted = rows.source_group.isin(validated.summary["time"]["over_groups"]["groups"])
    rows = rows[rows.time_error.notna() & ~rows.partial & counted]
    named = {row.name: row for row in read_runs(PUBLISHED)}
    cards = [accelerator_of(Reading(named[name])) for name in rows.row_id]
    return rows.assign(
        error=1.0 / (1.0 + rows.time_error.astype(float)) - 1.0,
        experts=rows.model_kind.str.startswith("moe"),
        card=cards,
        architecture=[card.architecture for card in cards],
    )


def main() -> None:
    """Print the table."""
    print(f"{'':<46} runs   stated             inside   shortest")
    kinds = compared_runs().groupby(["software", "architecture", "experts"])
    for (software, architecture, experts), rows in kinds:
        errors = rows.error.to_numpy()
        spread = time_spread(software, rows.card.iloc[0], experts=experts)
        kind = f"{software}, {architecture}{', experts' if experts else ''}"
        print(f"{kind:<46} {beside(spread, errors)}")


if __name__ == "__main__":
    main()
