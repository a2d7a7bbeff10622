"""Plain-text tables: aligned columns, and two values of each figure side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from cost_models.units import format_bytes, format_rate, format_seconds

UNKNOWN: Final = "–"
NOT_COMPARABLE: Final = "not comparable"
MANY_TIMES: Final = 10.0  # ratio from which a difference is given as a factor
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
    rows: Iterable[Row],
    head: tuple[str, str, str],
    more: str,
    less: str,
    not_comparable: Collection[str] = (),
) -> list[str]:
    """Return the lines of a table with both values of each figure and their difference in words.

    Arguments as of ``comparison_rows``.

    >>> for line in comparison_table(
    ...     [("step", "seconds", 1.5, 1.0)], ("left", "right", "left is"), "more", "less"
    ... ):
    ...     print(line)
           left  right      left is
    step  1.5 s    1 s  50.0 % more
    """
    return aligned(comparison_rows(rows, head, more, less, not_comparable), left=[0])


def comparison_rows(
    rows: Iterable[Row],
    head: tuple[str, str, str],
    more: str,
    less: str,
    not_comparable: Collection[str] = (),
) -> list[tuple[str, ...]]:
    """Return the cells of such a table, its head first.

    ``head``: names of the left value, of the right one and of the difference; ``more`` and
    ``less``: words behind the percentage. ``not_comparable``: units whose values are of two
    machines and have no difference.
    """
    cells: list[tuple[str, ...]] = [("", *head)]
    for name, unit, left, right in rows:
        difference = relative_difference(left, right)
        if unit in not_comparable:
            words = NOT_COMPARABLE
        elif left is not None and left == right:
            words = "equal"
        elif difference is None:
            words = UNKNOWN
        elif abs(difference) < EQUAL_WITHIN:
            words = "within 0.1 %"
        else:
            words = _difference_words(difference, more, less)
        cells.append((name, _format(left, unit), _format(right, unit), words))
    return cells


def _difference_words(difference: float, more: str, less: str) -> str:
    """Return a relative difference as a percentage, a large one as a factor.

    >>> _difference_words(0.5, "high", "low"), _difference_words(110.78, "high", "low")
    ('50.0 % high', '112 times as high')
    """
    if difference + 1.0 >= MANY_TIMES:
        return f"{difference + 1.0:,.0f} times as {more}"
    return f"{100 * abs(difference):.1f} % {more if difference > 0 else less}"


def _format(value: float | None, unit: str) -> str:
    if value is None:
        return UNKNOWN
    if unit == "seconds":
        return format_seconds(value)
    if unit == "tokens_per_second":
        return format_rate(value)
    return format_bytes(value) if unit == "bytes" else f"{value:,.0f}"
