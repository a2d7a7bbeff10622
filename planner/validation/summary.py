"""Summary of a validation: errors by group and over groups, ranking, verdicts, skipped rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


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
        from planner.validation.statistics import ranking_figures

        compared = _compared(rows, "time")
        found["ranking"] = ranking_figures(compared[compared.left_out.isna()])
    if "memory" in quantities:
        from planner.validation.statistics import verdict_figures

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
    from planner.validation.statistics import error_figures, grouped_figures, over_groups

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
