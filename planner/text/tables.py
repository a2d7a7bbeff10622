"""Tables of plans: columns that fit the terminal, rows without doubles, the best one marked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from cost_models.text_tables import aligned
from planner.text.paragraphs import width


def marked_table(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Return the head and the plans as aligned columns, the first plan with a mark.

    Columns in ``left`` are aligned to the left, the others to the right.
    """
    return [
        f"{'✔' if number == 1 else ' '} {line}".rstrip()
        for number, line in enumerate(aligned(rows, left))
    ]


def fitting_table(
    rows: Sequence[Sequence[str]], least_first: Iterable[str], left: Collection[str] = ()
) -> list[str]:
    """Return a table as wide as the terminal at most: without the least important columns.

    ``least_first``: headings of columns that may be left out, in this order; ``left``: headings of
    columns that are aligned to the left.
    """
    return narrowed(rows, least_first, left, marked_table)


def narrowed(
    rows: Sequence[Sequence[str]],
    least_first: Iterable[str],
    left: Collection[str] = (),
    table: Callable[[Sequence[Sequence[str]], Collection[int]], list[str]] = aligned,
) -> list[str]:
    """Return a ``table`` without the columns for which the terminal has no room."""
    cells = [list(row) for row in rows]
    for heading in (None, *least_first):
        if heading in cells[0]:
            at = cells[0].index(heading)
            cells = [[*row[:at], *row[at + 1 :]] for row in cells]
        lines = table(cells, [at for at, name in enumerate(cells[0]) if name in left])
        if max(map(len, lines)) <= width():
            break
    return [line.rstrip() for line in lines]


def table_of_plans(
    rows: Sequence[Sequence[str]],
    choices: int,
    least_first: Iterable[str],
    usual: Mapping[str, str],
    *,
    most: int | None = None,
    spread: bool = False,
    left: Collection[str] = (),
) -> tuple[list[str], int]:
    """Return a table as wide as the terminal at most, and the number of rows that it leaves out.

    Rows that are equal in the columns that have room, but for one choice, share a row.
    ``choices``: number of cells, from the first on, that describe the plan; ``least_first``:
    headings of columns that may be left out, in this order; ``usual``: values of columns that are
    left out where every row has them; ``most``: rows; ``spread``: those shown are taken evenly from
    all, the first and the last included.
    """
    cells = [list(row) for row in rows]
    chosen = set(cells[0][:choices])
    for heading in (None, *least_first):
        if heading in cells[0]:
            at = cells[0].index(heading)
            cells = [[*row[:at], *row[at + 1 :]] for row in cells]
        different = without_doubles(cells[1:], sum(name in chosen for name in cells[0]))
        kept = _spread(different, most) if spread else different[:most]
        shown = without_columns([cells[0], *kept], usual)
        lines = marked_table(shown, [at for at, name in enumerate(shown[0]) if name in left])
        if max(map(len, lines)) <= width():
            break
    return lines, len(different) - len(kept)


def _spread(rows: list[list[str]], most: int | None) -> list[list[str]]:
    """Return at most that many rows, at even distances.

    >>> _spread([["1"], ["2"], ["3"], ["4"], ["5"]], 3)
    [['1'], ['3'], ['5']]
    """
    if most is None or len(rows) <= most:
        return rows
    gaps = max(1, most - 1)
    return [rows[round(at * (len(rows) - 1) / gaps)] for at in range(most)]


def without_columns(rows: Sequence[Sequence[str]], usual: Mapping[str, str]) -> list[list[str]]:
    """Return a table without the columns that have their usual value in every row.

    ``usual``: the value by heading.

    >>> without_columns([["tp", "pp"], ["2", "1"], ["1", "1"]], {"tp": "1", "pp": "1"})
    [['tp'], ['2'], ['1']]
    """
    head, *others = rows
    kept = [
        at
        for at, name in enumerate(head)
        if name not in usual or any(row[at] != usual[name] for row in others)
    ]
    return [[row[at] for at in kept] for row in rows]


def without_doubles(rows: Sequence[Sequence[str]], choices: int) -> list[list[str]]:
    """Return rows in their order; rows that differ in one of the first cells alone become one.

    ``choices``: number of cells, from the first on, in which they may differ.

    >>> without_doubles([["1", "50.0"], ["2", "50.0"], ["3", "40.0"]], 1)
    [['1-2', '50.0'], ['3', '40.0']]
    """
    merged: list[list[list[str]]] = []  # for each row the values of each cell
    for row in rows:
        for other in merged:
            different = [at for at, cell in enumerate(row) if other[at] != [cell]]
            if not different:
                break
            if len(different) == 1 and different[0] < choices:
                values = other[different[0]]
                values += [] if row[different[0]] in values else [row[different[0]]]
                break
        else:
            merged.append([[cell] for cell in row])
    return [[_joined(cells) for cells in row] for row in merged]


def _joined(cells: Sequence[str]) -> str:
    """Return several values as one cell.

    >>> _joined(["1", "2", "3"]), _joined(["none", "selective"])
    ('1-3', 'none/selective')
    """
    if len(cells) > 1 and all(cell.isdigit() for cell in cells):
        numbers = sorted(map(int, cells))
        if numbers[-1] - numbers[0] == len(numbers) - 1:
            return f"{numbers[0]}-{numbers[-1]}"
    return "/".join(cells)
