"""A validation as text: errors by group and over groups, ranking, verdicts, skipped rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

HEADS: Final = ("n", "median", "mean", "bias", "90th", "inside", "width")
KEYS: Final = (
    "median_absolute_error",
    "mean_absolute_error",
    "bias",
    "p90_absolute_error",
    "coverage",
    "median_half_width",
)
TITLES: Final = {
    "source_group": "by source",
    "gpu": "by accelerator",
    "model_kind": "by kind of model",
    "method": "by method",
}
WHAT: Final = {"time": "Step time", "memory": "Peak memory"}
MOST_REASONS: Final = 12
NAME: Final = 34


def validation_text(summary: Mapping[str, Any], what: Sequence[str]) -> str:
    """Return the summary as lines, at most 100 columns wide."""
    lines = [f"{summary['rows']:,} rows, {summary['priced']:,} priced"]
    for one in what:
        lines += ["", *_errors(WHAT[one], summary[one])]
    if summary.get("ranking"):
        lines += ["", *_ranking(summary["ranking"])]
    if "verdicts" in summary and summary["verdicts"]["died"] + summary["verdicts"]["lived"]:
        lines += ["", *_verdicts(summary["verdicts"])]
    if summary["skipped"]:
        lines += ["", *_skipped(summary["skipped"])]
    return "\n".join(lines)


def _errors(title: str, figures: Mapping[str, Any]) -> list[str]:
    if not figures["n"] and "partial" not in figures:
        return [f"{title}: nothing to compare"]
    lines = [f"{title}: predicted / measured - 1, absolute unless bias"]
    lines.append(f"{'':<{NAME}}" + "".join(f"{head:>9}" for head in HEADS))
    for grouping, groups in figures.get("by", {}).items():
        lines.append(TITLES[grouping])
        lines += [_line(f"  {name}", group) for name, group in groups.items()]
    if "partial" in figures:
        lines.append("rows with incomplete sources, separately")
        lines += [_line(f"  {name}", group) for name, group in figures["partial"]["by"].items()]
    if figures["n"]:
        lines += ["", _line("all rows", figures["all_rows"])]
        mean = figures["over_groups"]
        if mean["groups"]:
            lines.append(_line(f"mean over {len(mean['groups'])} sources (n >= 5)", mean))
    lines += [
        f"left out of that mean: {name} ({reason})"
        for name, reason in figures["left_out"].items()
        if name in figures.get("by", {}).get("source_group", {})
    ]
    return lines


def _line(name: str, figures: Mapping[str, Any]) -> str:
    cells = [f"{100.0 * figures[key]:.1f} %" for key in KEYS]
    cells[2] = f"{100.0 * figures['bias']:+.1f} %"
    shown = name if len(name) <= NAME else name[: NAME - 1] + "…"
    return f"{shown:<{NAME}}{figures['n']:>9,}" + "".join(f"{cell:>9}" for cell in cells)


def _ranking(ranking: Mapping[str, Any]) -> list[str]:
    lines = [
        "Ranking of plans that share model, accelerators and batch",
        f"{'':<{NAME}}{'groups':>9}{'spearman':>10}{'pairs':>9}{'regret':>9}{'worst':>9}",
    ]
    for name, figures in ranking.items():
        lines.append(
            f"  {name:<{NAME - 2}}{figures['groups']:>9}{figures['spearman']:>10.3f}"
            f"{100.0 * figures['pairs_in_order']:>7.1f} %{100.0 * figures['mean_regret']:>7.2f} %"
            f"{100.0 * figures['worst_regret']:>7.1f} %"
        )
    return lines


def _verdicts(figures: Mapping[str, Any]) -> list[str]:
    lines = [
        "Verdicts",
        f"  {figures['died']} runs out of memory: {figures['died_said_to_fit']} of them predicted "
        "to fit",
        f"  {figures['lived']} runs completed: {figures['lived_said_not_to_fit']} of them "
        "predicted not to fit",
        f"  {figures['tight']} of all predicted TIGHT ({100.0 * figures['tight_share']:.1f} %)",
    ]
    for key, words in (
        ("died_said_to_fit_rows", "out of memory"),
        ("lived_said_not_to_fit_rows", "completed"),
    ):
        if figures[key]:
            shown = ", ".join(figures[key][:6])
            lines.append(f"  {words}: {shown}{', …' if len(figures[key]) > 6 else ''}")
    return lines


def _skipped(reasons: Mapping[str, int]) -> list[str]:
    lines = ["Not priced"]
    for reason, count in list(reasons.items())[:MOST_REASONS]:
        lines.append(f"  {count:>5}  {reason if len(reason) <= 91 else reason[:90] + '…'}")
    more = list(reasons.values())[MOST_REASONS:]
    if more:
        lines.append(f"  {sum(more):>5}  for {len(more)} other reasons (--json lists them by row)")
    return lines
