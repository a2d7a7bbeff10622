"""Intervals judged round by round: ``python -m benchmarks.intervals.rounds``.

For every round of runs that were found later (tables of ``benchmarks/unseen`` of a day): intervals
from the published runs and the rounds before, and the share of the round's first predictions whose
interval holds what was measured. It is what the next round may expect. A source counts as at most
ten runs; the last lines are about all rounds from ``FROM`` on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pandas as pd

from benchmarks.intervals import peaks, times
from benchmarks.intervals.shrunk import Rule, source_weights
from benchmarks.unseen import UNSEEN

ROUND_OF: Final = {name: name.removesuffix("_times").removesuffix("_peaks") for name in UNSEEN}
ROUNDS: Final = tuple(dict.fromkeys(ROUND_OF.values()))
FROM: Final = 4  # rounds before any is judged


def in_rounds(rows: pd.DataFrame) -> pd.DataFrame:
    """Return runs with the number of their round (0: published); a source of two counts as two."""
    names = rows.table.map(ROUND_OF).fillna("published")
    numbers = names.map({name: number for number, name in enumerate(("published", *ROUNDS))})
    return rows.assign(number=numbers, source_group=rows.source_group + ", " + names)


def judged(rows: pd.DataFrame, rule: Rule) -> pd.DataFrame:
    """Return the blind runs of all rounds, with their interval and whether they are inside."""
    rows = rule.with_cells(rows.reset_index(drop=True))
    cells = rule.cells_of(rows)
    number = rows.groupby("cell").number.first().to_numpy()
    parts = []
    for one in sorted(set(rows.number[rows.blind & (rows.number >= FROM)])):
        below, above = rule.intervals(rows, cells, number < one)
        inside = (rows.error >= -below) & (rows.error <= above)
        every = rows.assign(below=below, above=above, inside=inside)
        parts.append(every[rows.blind & (rows.number == one)])
    return pd.concat(parts, ignore_index=True)


def lines(rows: pd.DataFrame) -> Iterator[str]:
    """Yield the share inside of every round and of all, of judged runs."""
    for number, part in rows.groupby("number"):
        yield f"{ROUNDS[int(number) - 1]:<20} {len(part):4d} {_share(part)}"
    yield f"{'all':<20} {len(rows):4d} {_share(rows)}"


def _share(part: pd.DataFrame) -> str:
    weights = source_weights(part)
    inside, below, above = (
        100.0 * np.average(part[name], weights=weights) for name in ("inside", "below", "above")
    )
    return f"{inside:6.1f} % (-{below:.0f} % +{above:.0f} %)"


def main() -> None:
    """Print the three tables."""
    of_peaks = judged(in_rounds(peaks.all_runs()), peaks.RULE)
    unknown = peaks.is_unknown(of_peaks)
    for what, rows in (
        ("step time", judged(in_rounds(times.all_runs()), times.RULE)),
        ("peaks, trainers with a profile", of_peaks[~unknown]),
        ("peaks, other trainers", of_peaks[unknown]),
    ):
        print(f"\n{what}: runs, inside", *lines(rows), sep="\n")


if __name__ == "__main__":
    main()
