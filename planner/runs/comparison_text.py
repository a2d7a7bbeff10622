"""A comparison as plain text: what differs, the terms side by side, what explains it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cost_models.units import format_bytes, format_seconds
from planner.runs.compare import ComparedTerm, Comparison

UNKNOWN = "–"


def comparison_text(comparison: Comparison) -> str:
    """Return the comparison as lines."""
    lines = []
    for field, left, right in comparison.changes:
        lines.append(f"{field}: {left} | {right}")
    if comparison.changes:
        lines.append("")
    lines += [f"left:  {comparison.left}", f"right: {comparison.right}", ""]
    rows = [("", "left", "right", "left is"), *(_cells(term) for term in comparison.terms)]
    lines += _table(rows)
    return "\n".join([*lines, "", *comparison.explanation])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, len(row)))])
        for row in rows
    ]


def _cells(term: ComparedTerm) -> tuple[str, str, str, str]:
    difference = term.difference
    if term.left is not None and term.left == term.right:
        words = "equal"
    elif difference is None:
        words = UNKNOWN
    elif abs(difference) < 0.0005:
        words = "within 0.1 %"
    else:
        words = f"{abs(100 * difference):.1f} % {'more' if difference > 0 else 'less'}"
    name = term.name.replace("_", " ") if term.unit == "seconds" else term.name
    return name, _format(term.left, term.unit), _format(term.right, term.unit), words


def _format(value: Any, unit: str) -> str:
    if value is None:
        return UNKNOWN
    return format_seconds(value) if unit == "seconds" else format_bytes(value)
