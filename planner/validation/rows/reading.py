"""Access to the cells of a row that records the defaults of empty ones."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from planner.validation.rows.runs_file import Row


class Unpriceable(Exception):
    """A row that cannot be priced; the message is the reason."""


class Reading:
    """A row and the defaults that replaced its empty cells, as texts."""

    def __init__(
        self, row: Row, defaults: list[str] | None = None, also: list[dict[str, Any]] | None = None
    ) -> None:
        self.row = row
        self.defaults: list[str] = [] if defaults is None else defaults
        # other readings: cells that words without a meaning here may stand for as well
        self.also: list[dict[str, Any]] = [] if also is None else also

    def changed(self, *notes: str, **cells: Any) -> Reading:
        """Return the reading with other cells; the notes say which and why."""
        self.defaults.extend(notes)
        return Reading(replace(self.row, **cells), self.defaults, self.also)

    def stand_in(self, column: str, taken: str, *others: str | None) -> None:
        """Record what is priced in the place of a cell without a meaning, and what it may be."""
        told = f"{column} {self.row.get(column)!r} has no meaning here: priced as {taken}"
        self.defaults.append(told)
        self.also += ({column: other} for other in others)

    def value(self, column: str, default: Any, why: str) -> Any:
        """Return a cell, or the default, which is recorded with its reason."""
        given = self.row.get(column)
        if given is not None:
            return given
        self.defaults.append(f"{column} {default} (default: {why})")
        return default

    def need(self, column: str) -> Any:
        """Return a required cell; raises Unpriceable if it is empty."""
        given = self.row.get(column)
        if given is None:
            raise Unpriceable(f"{column} is empty")
        return given
