"""Tables of phrases: what a row of a run says, and what is read from it.

A line of a table has the trainer, the notes and other cells of a row (``name=value | …``, empty
``name=``; usual ones elsewhere), and what is read: settings of the case (``plan.zero_stage=3``),
``understood`` (every word has a meaning), ``possible`` (the trainer can run the plan), ``says`` and
``never says`` (words of a default), ``engine`` and ``no engine`` (of the software profile),
``memory`` and ``counts`` (of what was measured).
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

from planner.validation.measurement import measured_memory
from planner.validation.pricing import why_impossible
from planner.validation.rows.case import Case, case_of
from planner.validation.rows.counts import not_understood
from planner.validation.rows.runs_file import Row, read_runs
from planner.validation.rows.words import look_up, words_table
from tests.planner.validation.rows import (
    test_case,
    test_suites,
    test_switches,
    test_table_words,
    test_trainer_phrases,
    test_vocabulary,
)

BETWEEN = " | "
STRANGERS = {  # what people write in READMEs, issues, logs, configurations and tables
    "model": "llama-2-7b",
    "gpu": "A100-SXM-80GB",
    "num_gpus": 8,
    "seq_len": 2048,
    "precision": "bf16",
}
USUAL = {
    "case.csv": test_case.GPT,
    "vocabulary.csv": test_vocabulary.LLAMA,
    "trainer_phrases.csv": test_trainer_phrases.CELLS,
    "switches.csv": test_switches.LLAMA,
    "suites.csv": test_suites.CELLS,
    "table_words.csv": test_table_words.USUAL,
    "strangers.csv": STRANGERS,
}


def cells_of(line: dict[str, str]) -> dict[str, str]:
    stated = {name: line[name] for name in ("framework", "notes") if line[name]}
    return stated | dict(cell.split("=", 1) for cell in line["cells"].split(BETWEEN) if cell)


def lines_and_rows() -> Iterator[Any]:
    """Yield what each line says is read, and the row of its cells, as read from a file of runs."""
    for name, usual in USUAL.items():
        with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
        rows = [{**usual, **cells_of(line)} for line in lines]
        with NamedTemporaryFile("w", suffix=".csv", encoding="utf-8", newline="") as runs:
            writer = csv.DictWriter(runs, dict.fromkeys(column for row in rows for column in row))
            writer.writeheader()
            writer.writerows(rows)
            runs.flush()
            found = read_runs(Path(runs.name))
        for number, (line, row) in enumerate(zip(lines, found, strict=True), 2):
            yield pytest.param(line["reads"], row, id=f"{name}:{number}: {line['about']}")


def read(row: Row, found: Case, name: str, expected: str) -> object:
    """Return what is read in a case; ``expected`` where its words or engines are as they should."""
    if name == "understood":
        return ", ".join(not_understood(row))
    if name == "possible":
        return why_impossible(found) or ""
    if name in ("says", "never says"):
        said = any(expected in text for text in found.defaults)
        return expected if said == (name == "says") else found.defaults
    if name in ("engine", "no engine"):
        engines = found.scenario.software.name.split("+")
        return expected if (expected in engines) == (name == "engine") else engines
    if name == "memory":  # kind and rank of the measured peak
        peak = measured_memory(row)
        return "none" if peak is None else f"{peak.kind}:{peak.rank}"
    if name == "counts":  # FLOP with or without recomputation
        flops = look_up(words_table().flops, row)
        return "none" if flops is None else flops.counts
    first, *rest = name.split(".")
    value = getattr(found if hasattr(found, first) else found.scenario, first)
    for part in rest:
        value = value[int(part)] if isinstance(value, tuple) else getattr(value, part)
    return str(value)


@pytest.mark.parametrize(("reads", "row"), list(lines_and_rows()))
def test_what_is_read(reads: str, row: Row) -> None:
    found = case_of(row)
    for reading in reads.split(BETWEEN):
        name, _, expected = reading.partition("=")
        assert read(row, found, name, expected) == expected, name
