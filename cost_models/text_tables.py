"""Plain-text tables: aligned columns, and two values of each figure side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from cost_models.units import format_bytes, format_seconds

UNKNOWN: Final = "–"
EQUAL_WITHIN: Final = 0.0005  # relative difference that is not shown as a number
Row = tuple[str, str, float | None, float | None]  # name, unit, left and right value


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Return rows as lines of aligned columns, those in ``left`` to the left, others to the right.

    >>> aligned([("", "GiB"), ("peak", "3.5"), ("rest", "12.0")], left=[0])
    ['       GiB', 'peak   3.5', 'rest  12.0']
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def relative_difference(left: float | None, right: float | None) -> float | None:
    """Return left over right, less one; None where a value is unknown or right is zero."""
    return None if left is None or not right else left / right - 1.0


def comparison_table(
    rows: Iterable[Row], head: tuple[str, str, str], more: str, less: str
) -> list[str]:
    """Return the lines of a table with both values of each figure and their difference in words.

    ``head``: names of the left value, of the right one and of the difference; ``more`` and
    ``less``: words behind the percentage.

    >>> for line in comparison_table(
    ...     [("step", "seconds", 1.5, 1.0)], ("left", "right", "left is"), "more", "less"
    ... ):
    ...     print(line)
           left  right      left is
    step  1.5 s    1 s  50.0 % more
    """
    cells = [("", *head)]
    for name, unit, left, right in rows:
        difference = relative_difference(left, right)
        if left is not None and left == right:
            words = "equal"
        elif difference is None:
            words = UNKNOWN
        elif abs(difference) < EQUAL_WITHIN:
            words = "within 0.1 %"
        else:
            words = f"{100 * abs(difference):.1f} % {more if difference > 0 else less}"
        cells.append((name, _format(left, unit), _format(right, unit), words))
    return aligned(cells, left=[0])


def _format(value: float | None, unit: str) -> str:
    if value is None:
        return UNKNOWN
    if unit == "seconds":
        return format_seconds(value)
    return format_bytes(value) if unit == "bytes" else f"{value:,.0f}"
