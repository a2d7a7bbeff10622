"""Meaning of the words in the cells of RUNS.csv: look-ups in words.toml.

A section is a list of entries; the first entry whose conditions are met applies. A condition is a
column and words: a text cell must contain all of them (ignoring case), a number must equal one of
them. ``without`` lists words that none of these cells may contain. An entry without conditions
always applies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from hardware_profiles.fields import read_toml
from planner.validation.runs_file import COLUMNS, TEXTS, Row

TABLE: Final = Path(__file__).parent / "words.toml"


@cache
def words_table() -> Mapping[str, Any]:
    """Return the whole table."""
    return read_toml(TABLE, "the table of words")


def look_up(section: str, row: Row) -> Mapping[str, Any]:
    """Return the first entry of a section that applies to a row; {} if none does."""
    for entry in words_table()[section]:
        if _applies(entry, row):
            return {key: value for key, value in entry.items() if key not in COLUMNS}
    return {}


def _applies(entry: Mapping[str, Any], row: Row) -> bool:
    conditions = {column: words for column, words in entry.items() if column in COLUMNS}
    cells = [row.words(column) for column in conditions]
    if any(word in cell for word in entry.get("without", ()) for cell in cells):
        return False
    return all(_matches(column, words, row) for column, words in conditions.items())


def _matches(column: str, words: list[str], row: Row) -> bool:
    """Whether a text contains all words ("": is empty), or a number equals one of them."""
    if column == "gpu":  # an A1000 is no A100
        text = row.words(column)
        return all(re.search(re.escape(word) + _whole_number(word), text) for word in words)
    if column in TEXTS:
        cell = row.words(column)
        return all(word in cell if word else not cell for word in words)
    value = row.get(column)
    return value is not None and f"{value:g}" in words


def _whole_number(word: str) -> str:
    """Pattern after a word: a final number must end there (after letters digits may follow)."""
    return r"(?!\d)" if word[-1:].isdigit() else ""


def number_in(section: str, row: Row) -> int | None:
    """Return the number that a pattern of a section finds in its column; None without one."""
    for entry in words_table()[section]:
        found = re.search(entry["pattern"], row.words(entry["column"]))
        if found:
            return int(found[1])
    return None
