"""Tables of plans: columns that fit the terminal, rows without doubles, the best one marked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

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
    cells = [list(row) for row in rows]
    for heading in (None, *least_first):
        if heading in cells[0]:
            at = cells[0].index(heading)
            cells = [[*row[:at], *row[at + 1 :]] for row in cells]
        lines = marked_table(cells, [at for at, name in enumerate(cells[0]) if name in left])
        if max(map(len, lines)) <= width():
            break
    return lines


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
