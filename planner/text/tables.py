"""Table of plans, the best one marked."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cost_models.text_tables import aligned


def marked_table(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Return the head and the plans as aligned columns, the first plan with a mark.

    Columns in ``left`` are aligned to the left, the others to the right.
    """
    return [
        f"{'✔' if number == 1 else ' '} {line}".rstrip()
        for number, line in enumerate(aligned(rows, left))
    ]
