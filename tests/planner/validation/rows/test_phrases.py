"""Tables of phrases: what a row of a run says, and what is read from it.

A line of a table has the trainer, the notes and other cells of a row (``name=value | …``; usual
ones where it has none), and what is read: settings of the case (``plan.zero_stage=3``),
``understood`` (every word has a meaning), ``possible`` (the trainer can run the plan), ``says`` and
``never says`` (words of a default), ``engine`` and ``no engine`` (of the software profile).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from planner.validation.pricing import why_impossible
from planner.validation.rows.case import Case, case_of
from planner.validation.rows.counts import not_understood
from planner.validation.rows.runs_file import Row
from tests.planner.validation.rows import test_suites, test_switches, test_trainer_phrases

BETWEEN = " | "
USUAL = {
    "trainer_phrases.csv": test_trainer_phrases.CELLS,
    "switches.csv": test_switches.LLAMA,
    "suites.csv": test_suites.CELLS,
}


def lines() -> Iterator[Any]:
    for name, usual in USUAL.items():
        with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as file:
            for number, line in enumerate(csv.DictReader(file), 2):
                yield pytest.param(usual, line, id=f"{name}:{number}: {line['about']}")


def row_of(usual: dict[str, Any], line: dict[str, str]) -> Row:
    others = dict(cell.split("=", 1) for cell in line["cells"].split(BETWEEN) if cell)
    cells = {"framework": line["framework"], "notes": line["notes"], **others}
    given = {name: text for name, text in cells.items() if text}
    return msgspec.convert({**usual, **given}, Row, strict=False)


def read(found: Case, name: str, expected: str) -> object:
    """Return what is read in a case; ``expected`` where its words or engines are as they should."""
    if name == "understood":
        return ", ".join(not_understood(found.row))
    if name == "possible":
        return why_impossible(found) or ""
    if name in ("says", "never says"):
        said = any(expected in text for text in found.defaults)
        return expected if said == (name == "says") else found.defaults
    if name in ("engine", "no engine"):
        engines = found.scenario.software.name.split("+")
        return expected if (expected in engines) == (name == "engine") else engines
    first, *rest = name.split(".")
    value = getattr(found if hasattr(found, first) else found.scenario, first)
    for part in rest:
        value = value[int(part)] if isinstance(value, tuple) else getattr(value, part)
    return str(value)


@pytest.mark.parametrize(("usual", "line"), list(lines()))
def test_what_is_read(usual: dict[str, Any], line: dict[str, str]) -> None:
    found = case_of(row_of(usual, line))
    for reading in line["reads"].split(BETWEEN):
        name, _, expected = reading.partition("=")
        assert read(found, name, expected) == expected, name
