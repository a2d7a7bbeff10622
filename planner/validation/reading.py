"""Reads a row's cells and remembers the defaults that empty ones took."""

from __future__ import annotations

from typing import Any

from planner.validation.runs_file import Row


class Unpriceable(Exception):
    """Why a row cannot be priced, in words."""


class Reading:
    """A row, and in words what was taken where it says nothing."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.defaults: list[str] = []

    def value(self, column: str, default: Any, why: str) -> Any:
        """Return a cell, or the default, which is noted."""
        given = self.row.get(column)
        if given is not None:
            return given
        self.defaults.append(f"{column} {default} (default: {why})")
        return default

    def need(self, column: str) -> Any:
        """Return a cell without which nothing can be said."""
        given = self.row.get(column)
        if given is None:
            raise Unpriceable(f"{column} is empty")
        return given
