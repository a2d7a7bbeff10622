"""A validation as text: rows, errors by group and over groups, ranking, verdicts, skipped rows."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from planner.assessment.verdict import WORDS
from planner.text.paragraphs import hanging, plain, width
from planner.text.tables import narrowed

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
MOST_ROWS: Final = 100
MOST: Final = 80  # columns
NARROW: Final = ("n", "median", "90th", "inside")  # figures that have room in a narrow terminal
NAME: Final = 24  # columns of a name, followed by seven figures
FIGURE: Final = 8
QUANTITY: Final = 22
# of the measured kind of memory, the name of the quantity
MEMORY: Final = {
    "allocated": "allocated, GiB",
    "reserved": "reserved, GiB",
    "device": "on the device, GiB",
}


def rows_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return prediction, measurement and error of every row, one quantity a line."""
    room, narrow = _columns(), _is_narrow()
    indent = 2 if narrow else NAME
    figures = f"{'':<{QUANTITY}}{'predicted':>11}{'measured':>11}{'error':>10}"
    lines = ["row"] * narrow + [f"{'' if narrow else 'row':<{indent}}{figures}"]
    for row in rows[:MOST_ROWS]:
        lines += [_cut(row["row_id"], room)] * narrow
        name = "" if narrow else _cut(row["row_id"], NAME - 1)
        for number, words in enumerate(_row_lines(row, room - indent)):
            lines.append(f"{name if number == 0 else '':<{indent}}{words}"[:room].rstrip())
    if len(rows) > MOST_ROWS:
        lines.append(f"and {len(rows) - MOST_ROWS:,} more rows: -o DIR or --json")
    if count := sum(bool(row["defaults"]) for row in rows):
        many = "s" if count > 1 else ""
        lines.append(f"Empty cells of {count:,} row{many} took defaults: --json lists them")
    return "\n".join([*lines, *_not_understood(rows)])


def _columns() -> int:
    return min(MOST, width())


def _is_narrow() -> bool:
    return width() < MOST


def _not_understood(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Words without a meaning, each once, with the first row that has them."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for words in row["not_understood"]:
            found.setdefault(words, []).append(row["row_id"])
    if found:
        yield "Not understood, and not priced:"
    for words, names in list(found.items())[:MOST_REASONS]:
        others = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        yield from textwrap.wrap(
            f"{words} ({names[0]}{others})",
            _columns(),
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
    if len(found) > MOST_REASONS:
        yield f"  and {len(found) - MOST_REASONS:,} more: --json lists them by row"


def _row_lines(row: Mapping[str, Any], room: int) -> Iterator[str]:
    if row["skipped"] is not None:
        where = f"line {row['line']}"
        where = "" if where == row["row_id"] else f"{where} is "
        reason = f"{where}not priced: {row['skipped']}"
        yield from textwrap.wrap(reason, room)
        return
    step, measured = row["predicted_step_seconds"], row["measured_step_seconds"]
    peak, size = row["predicted_peak_bytes"], row["measured_peak_bytes"]
    speed = row["measured_tokens_per_second_per_gpu"]
    if measured is not None or size is None:
        yield _compared("step, s", step, measured)
    if row["impossible"]:
        yield from textwrap.wrap(row["impossible"], room)
    if speed is not None:
        yield _compared("tokens/s per GPU", row["predicted_tokens_per_second_per_gpu"], speed)
    elif row["measured_mfu"] is not None and row["predicted_mfu"] is not None:
        yield _compared("MFU, %", 100.0 * row["predicted_mfu"], 100.0 * row["measured_mfu"])
    if size is not None:
        yield _compared(MEMORY[row["memory_kind"]], peak / 2**30, size / 2**30)
    if row["lacks_definition"]:
        yield from textwrap.wrap(row["lacks_definition"], room)
    if row["outcome"] == "oom":
        yield f"{'memory':<{QUANTITY}}{WORDS[row['verdict']]:>11}{'ran out':>11}"


def _compared(quantity: str, predicted: float, measured: float | None) -> str:
    text = f"{quantity:<{QUANTITY}}{_figure(predicted):>11}"
    if not measured:
        return text + f"{'–':>11}"
    return text + f"{_figure(measured):>11}{100.0 * (predicted / measured - 1.0):>+8.1f} %"


def _figure(value: float) -> str:
    """Return a number with three digits or more.

    >>> _figure(1.6), _figure(23.71), _figure(4816.2), _figure(0.00123)
    ('1.60', '23.7', '4,816', '0.00123')
    """
    if value < 1.0:
        return f"{value:.3g}"
    decimals = 2 if value < 10.0 else 1 if value < 100.0 else 0
    return f"{value:,.{decimals}f}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def validation_text(
    summary: Mapping[str, Any], what: Sequence[str], *, with_reasons: bool = True
) -> str:
    """Return the summary as lines, at most 80 columns wide.

    ``with_reasons``: count the reasons of rows that are not priced.
    """
    lines = [f"{summary['rows']:,} rows, {summary['priced']:,} priced"]
    for one in what:
        lines += ["", *_errors(WHAT[one], summary[one])]
    if summary.get("ranking"):
        lines += ["", *_ranking(summary["ranking"])]
    if "verdicts" in summary and summary["verdicts"]["died"] + summary["verdicts"]["lived"]:
        lines += ["", *_verdicts(summary["verdicts"])]
    if with_reasons and summary["skipped"]:
        lines += ["", *_skipped(summary["skipped"])]
    return "\n".join(lines)


def _errors(title: str, figures: Mapping[str, Any]) -> list[str]:
    if not figures["n"] and "partial" not in figures:
        return [f"{title}: nothing to compare"]
    lines = plain(f"{title}: predicted / measured - 1 in per cent, absolute unless bias")
    heads = NARROW if _is_narrow() else HEADS
    lines.append(f"{'':<{NAME}}" + "".join(f"{head:>{FIGURE}}" for head in heads))
    for grouping, groups in figures.get("by", {}).items():
        # of one group: the line of all rows; groups of one row: the rows themselves
        if len(groups) > 1 and any(group["n"] > 1 for group in groups.values()):
            lines.append(TITLES[grouping])
            lines += [_line(f"  {name}", group) for name, group in groups.items()]
    if "partial" in figures:
        lines.append("rows with incomplete sources, separately")
        lines += [_line(f"  {name}", group) for name, group in figures["partial"]["by"].items()]
    if figures["n"]:
        lines += [_line("all rows", figures["all_rows"])]
        mean = figures["over_groups"]
        if len(mean["groups"]) > 1:
            lines.append(_line(f"mean of {len(mean['groups'])} sources*", mean))
            lines.append("* with at least 5 rows")
    for name, reason in figures["left_out"].items():
        if name in figures.get("by", {}).get("source_group", {}):
            lines += textwrap.wrap(f"left out of that mean: {name} ({reason})", _columns())
    return lines


def _line(name: str, figures: Mapping[str, Any]) -> str:
    cells = [f"{100.0 * figures[key]:.1f}" for key in KEYS]
    cells[2] = f"{100.0 * figures['bias']:+.1f}"
    shown = zip(HEADS, [f"{figures['n']:,}", *cells], strict=True)
    return f"{_cut(name, NAME):<{NAME}}" + "".join(
        f"{cell:>{FIGURE}}" for head, cell in shown if head in NARROW or not _is_narrow()
    )


def _ranking(ranking: Mapping[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("", "groups", "spearman", "pairs, %", "regret, %", "worst, %", "between, %")
    ]
    rows += [
        (
            f"{_cut(f'  {name}', NAME):<{NAME}}",
            f"{figures['groups']}",
            f"{figures['spearman']:.3f}",
            f"{100.0 * figures['pairs_in_order']:.1f}",
            f"{100.0 * figures['mean_regret']:.2f}",
            f"{100.0 * figures['worst_regret']:.1f}",
            f"{100.0 * figures['error_between_plans']:.1f}",
        )
        for name, figures in ranking.items()
    ]
    title = "Ranking of plans that share model, accelerators and batch"
    return [title, *narrowed(rows, ("spearman", "worst, %", "between, %"), ("",))]


def _verdicts(figures: Mapping[str, Any]) -> list[str]:
    lines = ["Verdicts"]
    for words in (
        f"ran out of memory: {figures['died']}, of which {figures['died_said_to_fit']} were "
        "predicted to fit",
        f"completed: {figures['lived']}, of which {figures['lived_said_not_to_fit']} were "
        "predicted not to fit",
        f"{figures['tight']} of all predicted TIGHT ({100.0 * figures['tight_share']:.1f} %)",
    ):
        lines += hanging("  ", words)
    for key, words in (
        ("died_said_to_fit_rows", "out of memory"),
        ("lived_said_not_to_fit_rows", "completed"),
    ):
        if figures[key]:
            shown = ", ".join(figures[key][:6])
            line = f"{words}: {shown}{', …' if len(figures[key]) > 6 else ''}"
            lines += textwrap.wrap(line, _columns(), initial_indent="  ", subsequent_indent="    ")
    return lines


def _skipped(reasons: Mapping[str, int]) -> list[str]:
    lines = ["Not priced"]
    for reason, count in list(reasons.items())[:MOST_REASONS]:
        lines.append(f"  {count:>5}  {_cut(reason, _columns() - 9)}")
    more = list(reasons.values())[MOST_REASONS:]
    if more:
        lines.append(f"  {sum(more):>5}  for {len(more)} other reasons (--json lists them by row)")
    return lines
