"""How well plans are ranked: ``python -m benchmarks.accuracy.ranking``.

A sweep is one model on one cluster with one trainer, precision and sequence length, measured under
``FEWEST`` and more plans by one source of published runs; their batches may differ, so that seconds
a token are compared. For each sweep: Spearman's and Kendall's rank correlation of predicted and
measured seconds, and the regret, the measured seconds of the plan that is predicted fastest over
the fewest measured, less 1. ``by chance``: the mean regret of a plan taken at random.

Constants are fitted again without the source of the sweep, and a trainer's profile that was fitted
on it gives way to the bundled executor's, as in ``benchmarks.accuracy.cross_validate``; takes
minutes. ``--as-is`` prices with the constants of the code alone. Sources that are in no mean over
sources are listed apart.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pandas as pd

from benchmarks.accuracy.cross_validate import (
    CONSTANTS,
    Work,
    best_value,
    in_its_place,
    losses,
    published,
)
from cost_models.plan.plan import Plan

FEWEST: Final = 3  # plans of a sweep
Sweep = list[Work]  # of one batch each


@dataclass(frozen=True, slots=True)
class Ranking:
    """Rank correlations of predicted and measured steps, and the regret."""

    spearman: float
    kendall: float
    regret: float


def ranking(predicted: Sequence[float], measured: Sequence[float]) -> Ranking:
    """Compare two orders of plans; ties in the prediction take the mean of their measured steps.

    >>> ranking([1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 3.0, 4.0])
    Ranking(spearman=0.8, kendall=0.67, regret=1.0)
    """
    ours, theirs = np.asarray(predicted), np.asarray(measured)
    chosen = float(theirs[ours == ours.min()].mean())
    spearman = kendall = 0.0
    if np.ptp(ours) > 0.0 and np.ptp(theirs) > 0.0:
        spearman = float(np.corrcoef([pd.Series(one).rank() for one in (ours, theirs)])[0, 1])
        one, other = (np.sign(np.subtract.outer(steps, steps)) for steps in (ours, theirs))
        kendall = float(np.sum(one * other) / np.sqrt(np.sum(one**2) * np.sum(other**2)))
    return Ranking(round(spearman, 2), round(kendall, 2), chosen / float(theirs.min()) - 1.0)


def sweeps(works: Sequence[Work]) -> list[Sweep]:
    """Return work of the same source, model, cluster and trainer under several plans."""
    alike: dict[object, Sweep] = defaultdict(list)
    for work in works:
        scenario = work.scenario
        workload = replace(scenario.workload, global_batch_size=1)
        names = work.source, scenario.model.name, scenario.cluster.name, scenario.software.name
        alike[*names, workload].append(work)
    return [sweep for sweep in alike.values() if len(set().union(*map(plans_of, sweep))) >= FEWEST]


def plans_of(work: Work) -> list[Plan]:
    """Return the plan of each run, whatever its batch."""
    table = replace(work.table, num_microbatches=np.ones_like(work.table.num_microbatches))
    return [table.plan(row) for row in range(len(table))]


def seconds_a_token(sweep: Sweep, ratios: Sequence[np.ndarray]) -> tuple[list[float], list[float]]:
    """Return predicted and measured seconds of each plan and batch, its runs averaged.

    ``ratios``: predicted over measured seconds of each run.
    """
    found: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for work, ratio in zip(sweep, ratios, strict=True):
        workload = work.scenario.workload
        for plan, share, seconds in zip(plans_of(work), ratio, work.measured, strict=True):
            each = float(seconds) / workload.tokens_per_step
            found[plan, workload.global_batch_size].append((float(share) * each, each))
    pairs = [np.mean(runs, axis=0) for runs in found.values()]
    return [float(pair[0]) for pair in pairs], [float(pair[1]) for pair in pairs]


def without_source(works: Sequence[Work]) -> Callable[[Work], np.ndarray]:
    """Return the prices over measured seconds, by constants fitted without a run's source."""
    tables = {c.name: losses(works, c) for c in CONSTANTS if c.touches is not None}

    def ratio(work: Work) -> np.ndarray:
        found = {name: best_value(table, work.source) for name, table in tables.items()}
        changed = {name: value for name, value in found.items() if value is not None}
        return in_its_place(work).errors(changed)

    return ratio


def table_of(some: Sequence[Sweep], ratio: Callable[[Work], np.ndarray]) -> pd.DataFrame:
    """Return one row for each sweep; ``ratio``: predicted over measured seconds of runs."""
    rows = []
    for sweep in some:
        predicted, measured = seconds_a_token(sweep, [ratio(work) for work in sweep])
        scenario, found = sweep[0].scenario, ranking(predicted, measured)
        rows.append(
            {
                "source": sweep[0].source,
                "model": scenario.model.name,
                "cluster": scenario.cluster.name,
                "runs": len(measured),
                "slowest": max(measured) / min(measured),
                "spearman": found.spearman,
                "kendall": found.kendall,
                "regret": found.regret,
                "by chance": float(np.mean(measured)) / min(measured) - 1.0,
            }
        )
    return pd.DataFrame(rows).sort_values(["source", "model", "cluster"], ignore_index=True)


def by_source(table: pd.DataFrame) -> pd.DataFrame:
    """Return the means of the sweeps of every source, of all sources, and the worst regret."""
    names = ["spearman", "kendall", "regret", "by chance"]
    groups = table.groupby("source")
    found = groups[names].mean()
    found.insert(0, "sweeps", groups.size())
    found["worst"] = groups.regret.max()
    mean = found.mean().to_frame("mean over sources").T
    mean["sweeps"], mean["worst"] = found["sweeps"].sum(), found["worst"].max()
    return pd.concat([found, mean]).astype({"sweeps": int}).rename_axis("source").reset_index()


def main() -> None:
    """Print every sweep, then the means over the sweeps of every source."""
    counted = published()
    known = {work.source for work in counted}
    every = sweeps(published(every=True))
    as_is = "--as-is" in sys.argv[1:]
    ratio = (lambda work: work.as_is) if as_is else without_source(counted)
    percent = dict.fromkeys(("regret", "by chance", "worst"), lambda v: f"{100.0 * v:.1f} %")
    shown = {**percent, "slowest": lambda v: f"{v:.2f}x"}
    for title, some in (
        ("sources that count in means", [one for one in every if one[0].source in known]),
        ("other sources", [one for one in every if one[0].source not in known]),
    ):
        table = table_of(some, ratio)
        print(f"{title}: {len(table)} sweeps\n")
        print(table.to_string(index=False, formatters=shown), "\n")
        means = by_source(table)
        print(means.to_string(index=False, formatters=shown, float_format="{:.2f}".format), "\n")


if __name__ == "__main__":
    main()
