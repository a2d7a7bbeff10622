"""Summary of a validation: errors of predictions over rows, the quality of rankings, verdicts.

Errors are predicted/measured - 1.

Source: RUNS.csv's own definition of what ``validate`` reports (docs/reference/validate.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import pandas as pd

FEWEST: Final = 5  # rows of a source group that count in the mean over groups; plans of a ranking
SAME_WORK: Final = (
    "source_group",
    "model",
    "gpu",
    "num_gpus",
    "seq_len",
    "global_batch_size",
    "precision",
    "peft",
    "framework",
)
GROUPINGS: Final = ("source_group", "gpu", "model_kind", "method")


def summary_of(rows: pd.DataFrame, quantities: Sequence[str]) -> dict[str, Any]:
    """Return statistics over all rows as plain JSON values."""
    found: dict[str, Any] = {
        "rows": len(rows),
        "priced": int(rows.skipped.isna().sum()),
        "skipped": {
            str(reason): int(count) for reason, count in rows.skipped.value_counts().items()
        },
    }
    for what in quantities:
        found[what] = _figures(rows, what)
    if "time" in quantities:
        compared = _compared(rows, "time")
        found["ranking"] = ranking_figures(compared[compared.left_out.isna()])
    if "memory" in quantities:
        priced = rows[rows.verdict.notna() & rows.tests_memory]
        found["verdicts"] = verdict_figures(priced[priced.outcome.notna()])
    return found


def _compared(rows: pd.DataFrame, what: str, *, partial: bool = False) -> pd.DataFrame:
    return rows[rows[f"{what}_error"].notna() & (rows.partial == partial)]


def _left_out(rows: pd.DataFrame) -> dict[str, str]:
    """Return the sources whose step times stay out of the mean over sources, with the reason."""
    found = rows[rows.left_out.notna()].drop_duplicates("source_group")
    return {str(row.source_group): str(row.left_out) for row in found.itertuples()}


def _figures(rows: pd.DataFrame, what: str) -> dict[str, Any]:
    left_out = _left_out(rows) if what == "time" else {}
    compared, partial = _compared(rows, what), _compared(rows, what, partial=True)
    columns = (f"{what}_error", f"{what}_inside", f"{what}_half_width")
    found: dict[str, Any] = {"n": len(compared), "left_out": left_out}
    if len(compared):
        found["by"] = grouped_figures(compared, what)
        found["over_groups"] = over_groups(found["by"]["source_group"], left_out)
        found["all_rows"] = error_figures(compared, *columns)
    if len(partial):
        by = grouped_figures(partial, what)["source_group"]
        found["partial"] = {"all_rows": error_figures(partial, *columns), "by": by}
    return found


def error_figures(rows: pd.DataFrame, error: str, inside: str, width: str) -> dict[str, Any]:
    """Return n, median and mean absolute error, bias, 90th percentile, coverage, half-width."""
    errors = rows[error].astype(float)
    sizes = errors.abs()
    return {
        "n": len(rows),
        "median_absolute_error": float(sizes.median()),
        "mean_absolute_error": float(sizes.mean()),
        "bias": float(errors.mean()),
        "p90_absolute_error": float(sizes.quantile(0.9)),
        "coverage": float(rows[inside].astype(float).mean()),
        "median_half_width": float(rows[width].median()),
    }


def grouped_figures(rows: pd.DataFrame, what: str) -> dict[str, Any]:
    """Return the figures of every group of every grouping."""
    found: dict[str, Any] = {}
    for column in GROUPINGS:
        found[column] = {
            str(name): error_figures(part, f"{what}_error", f"{what}_inside", f"{what}_half_width")
            for name, part in rows.groupby(column, sort=True)
        }
    return found


def over_groups(by_source: dict[str, Any], left_out: Iterable[str]) -> dict[str, Any]:
    """Return the mean over source groups with at least FEWEST rows of each figure."""
    without = set(left_out)
    counted = {
        name: figures
        for name, figures in by_source.items()
        if figures["n"] >= FEWEST and name not in without
    }
    mean: dict[str, Any] = {"groups": sorted(counted)}
    mean["n"] = sum(figures["n"] for figures in counted.values())
    for key in next(iter(counted.values()), {}):
        if key != "n":
            mean[key] = sum(figures[key] for figures in counted.values()) / len(counted)
    return mean


def ranking_figures(rows: pd.DataFrame) -> dict[str, Any]:
    """Return ranking quality for every source that measured several plans of the same work.

    A group shares all of SAME_WORK and has at least FEWEST different plans. Regret: measured time
    of the plan that is predicted fastest over the best measured, less 1. Error between plans: the
    median over a group of how far predicted/measured is from that ratio's median in the group.
    """
    found: dict[str, list[dict[str, float]]] = {}
    for key, part in rows.groupby(list(SAME_WORK), sort=True, dropna=False):
        if part.plan.nunique() >= FEWEST:
            found.setdefault(str(key[0]), []).append(
                _rank_quality(part.predicted_step_seconds, part.measured_step_seconds)
            )
    return {name: _mean_quality(groups) for name, groups in found.items()}


def _rank_quality(predicted: pd.Series[float], measured: pd.Series[float]) -> dict[str, float]:
    ranks = predicted.rank(), measured.rank()
    varies = all(side.nunique() > 1 for side in ranks)
    right, pairs = 0.0, 0
    forecast, truth = predicted.to_list(), measured.to_list()
    for i in range(len(truth)):
        for j in range(i):
            pairs += 1
            right += (forecast[i] - forecast[j]) * (truth[i] - truth[j]) > 0
    chosen = truth[forecast.index(min(forecast))]
    ratios = predicted / measured
    return {
        "spearman": float(ranks[0].corr(ranks[1])) if varies else 0.0,
        "pairs_in_order": right / pairs,
        "regret": float(chosen / min(truth) - 1.0),
        "error_between_plans": float((ratios / ratios.median() - 1.0).abs().median()),
    }


def _mean_quality(groups: list[dict[str, float]]) -> dict[str, Any]:
    count = len(groups)
    means = {key: sum(group[key] for group in groups) / count for key in groups[0]}
    return {
        "groups": count,
        "spearman": means["spearman"],
        "pairs_in_order": means["pairs_in_order"],
        "mean_regret": means["regret"],
        "worst_regret": max(group["regret"] for group in groups),
        "error_between_plans": means["error_between_plans"],
    }


def verdict_figures(rows: pd.DataFrame) -> dict[str, Any]:
    """Return false fits, false "does not fit" and the share of TIGHT, over all memory rows.

    A run that completed with more than its accelerator has counts as one that ran out of memory.
    """
    out = (rows.outcome == "oom") | rows.exceeds_accelerator
    died, lived = rows[out], rows[~out]
    false_fits = died[died.verdict == "fits"]
    false_nos = lived[lived.verdict == "does_not_fit"]
    return {
        "died": len(died),
        "died_said_to_fit": len(false_fits),
        "died_said_to_fit_rows": false_fits.row_id.to_list(),
        "lived": len(lived),
        "lived_said_not_to_fit": len(false_nos),
        "lived_said_not_to_fit_rows": false_nos.row_id.to_list(),
        "tight": int((rows.verdict == "tight").sum()),
        "tight_share": float((rows.verdict == "tight").mean()) if len(rows) else 0.0,
    }
