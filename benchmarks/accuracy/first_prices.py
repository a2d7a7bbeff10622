"""Step times as they were priced first, round by round.

    python -m benchmarks.accuracy.first_prices

``benchmarks/unseen/first_prices.csv`` has the prices that runs of ``benchmarks/unseen/*.csv`` got
before anybody had looked at them, with the code of that day (``blind_rounds.csv`` names the
commits). Later prices of these runs gain from what was learned from them; only first ones show how
far off the next unseen run may be. Prints errors and bias of every round, and of the runs that are
priced as a trainer without a profile today: as they were, and with ``rate_share`` fitted on the
rounds before.

A price with another ``rate_share`` is the first one times what it changes in today's price. The fit
is that of ``benchmarks.accuracy.cross_validate``: the value with the smallest mean over sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import pandas as pd

from benchmarks.accuracy.cross_validate import MOST
from benchmarks.accuracy.timed_cases import timed_cases
from benchmarks.intervals.shrunk import quantile, source_weights
from benchmarks.unseen import UNSEEN, first_prices
from cost_models.plan.plan import PlanTable
from cost_models.pricing.table import table_steps
from hardware_profiles.software.engine import PLUS
from hardware_profiles.software.trainer import UNKNOWN
from planner.validation.rows.case import Case
from planner.validation.rows.runs_file import read_runs

# tables of a round, which were priced with the same code or on the same day
ROUNDS: Final = (
    ("trainers", "peaks"),
    ("2026_11",),
    ("2026_12",),
    ("2026_11_26_times",),
    ("2026_11_26_late_times", "2026_11_26_peaks"),
    ("2026_11_27_times", "2026_11_27_peaks"),
    ("2026_11_27_late_times", "2026_11_27_late_peaks"),
    ("2026_11_28_times",),
    ("2026_11_29_times",),
    ("2026_11_30_times",),
    ("2026_12_01_times",),
    ("2026_12_02_times",),
    ("2026_12_03_times",),
    ("2026_12_04_times",),
    ("2026_12_05_times",),
    ("2026_12_06_times",),
    ("2026_12_07_times",),
    ("2026_12_08_times",),
    ("2026_12_09_times",),
    ("2026_12_10_times",),
    ("2026_12_11_times",),
)
ADOPTED: Final = (8, 0.9)  # the first round that was priced with a share, and the share
SHARES: Final = tuple(round(0.8 + 0.02 * n, 2) for n in range(13))  # of the rates
OWN: Final = ["round", "source_group", "measured", "first"]  # one run in two tables of a round


def compared_prices() -> pd.DataFrame:
    """Return a row for each run: round, source, measured and first price, what shares change.

    Columns 0.8 to 1.04: logarithm of the price at this ``rate_share`` over that at the round's own;
    empty under trainers with a profile.
    """
    first = first_prices().seconds.dropna()
    numbers = {table: number for number, tables in enumerate(ROUNDS, 1) for table in tables}
    rows = []
    for table, number in numbers.items():
        priced = (row for row in read_runs(UNSEEN[table]) if (table, row.name) in first.index)
        for case, measured in timed_cases(priced):
            price = float(first[table, case.row.name])
            own = dict(zip(OWN, (number, case.row.group, measured, price), strict=True))
            rows.append(own | changes(case, ADOPTED[1] if number >= ADOPTED[0] else 1.0))
    return pd.DataFrame(rows).drop_duplicates(OWN, ignore_index=True)


def changes(case: Case, own: float) -> dict[float, float]:
    """Return log(price / price at ``own``) by ``rate_share``; empty where a profile is known."""
    software = case.scenario.software
    if software.name.partition(PLUS)[0] != UNKNOWN:
        return {}
    table = PlanTable.from_plans([case.plan])

    def steps(share: float) -> float:
        other = software.changed({"kernels.rate_share": share})
        return float(table_steps(replace(case.scenario, software=other), table)[0])

    first = steps(own)
    return {share: float(np.log(steps(share) / first)) for share in SHARES}


def fitted(rows: pd.DataFrame) -> float:
    """Return the share with the smallest mean over sources of |log(price / measured)|."""
    logs = np.log(rows["first"] / rows.measured)

    def loss(share: float) -> float:
        sizes = np.minimum(np.abs(logs + rows[share]), MOST)
        return float(sizes.groupby(rows.source_group).mean().mean())

    return min(SHARES, key=loss)


def figures(rows: pd.DataFrame, logs: pd.Series) -> str:
    """Return median, 90th percentile and bias; a source counts as at most ten runs."""
    errors, weights = np.expm1(logs.to_numpy()), source_weights(rows)
    median, p90 = (100.0 * quantile(np.abs(errors), weights, share) for share in (0.5, 0.9))
    bias = 100.0 * np.average(errors, weights=weights)
    return f"{median:6.1f} {p90:6.1f} {bias:+6.1f}"


def lines(rows: pd.DataFrame) -> Iterator[str]:
    """Yield the table of all rounds, those of trainers without a profile, and what is fitted."""
    logs = pd.Series(np.log(rows["first"] / rows.measured))
    yield "first prices, a source as at most ten runs: runs, sources, median, 90th, bias in %"
    for number, part in rows.groupby("round"):
        count = f"{len(part):4d} {part.source_group.nunique():4d}"
        yield f"round {number} {count} {figures(part, logs[part.index])}"
    yield "\ntrainers without a profile, first prices -> with rate_share of the rounds before"
    loops, judged = rows[rows[1.0].notna()], []
    for number, part in loops.groupby("round"):
        before = loops[loops["round"] < number]
        if before.empty:
            continue
        share, own = fitted(before), logs[part.index]
        both = pd.DataFrame({"first": own, "fitted": own + part[share]})
        judged.append(both)
        yield f"round {number} {share:9.2f} {compared(part, both)}"
    both = pd.concat(judged)
    part = loops.loc[both.index]
    yield f"all rounds        {compared(part, both)}"
    sizes = both.abs().groupby([part["round"], part.source_group]).median()
    yield f"nearer in {int((sizes.fitted < sizes['first']).sum())} of {len(sizes)} sources"
    later = rows[rows["round"] > 1]
    own = logs[later.index]
    both = pd.DataFrame({"first": own, "fitted": both.fitted.combine_first(own)})
    yield f"with all trainers {compared(later, both)}"
    yield f"fitted on all rounds: {fitted(loops):.2f}"


def compared(rows: pd.DataFrame, logs: pd.DataFrame) -> str:
    """Return the figures of first prices and of fitted ones."""
    return f"{figures(rows, logs['first'])}  -> {figures(rows, logs.fitted)}"


def main() -> None:
    """Print the tables."""
    print(*lines(compared_prices()), sep="\n")


if __name__ == "__main__":
    main()
