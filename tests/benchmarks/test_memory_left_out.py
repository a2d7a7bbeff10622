"""Peaks of trainers that no profile describes."""

from __future__ import annotations

import pandas as pd
import pytest
from msgspec.structs import replace

from benchmarks.memory_left_out import by_source, interval_of, naming_no_trainer
from planner.validation.case import case_of
from planner.validation.runs_file import PUBLISHED, read_runs
from planner.validation.words import reading_with, words_table


def test_entries_of_any_trainer_are_left() -> None:
    table = words_table()
    left = naming_no_trainer(table.software)
    assert {entry.profile for entry in left} >= {"torch-trainer", "torch-compile"}
    assert not any({"framework", "source"} & set(entry.when) for entry in left)
    row = next(row for row in read_runs(PUBLISHED) if row.group == "litgpt")
    assert case_of(row).scenario.software.name.startswith("lit")
    with reading_with(replace(table, software=left)):
        assert case_of(row).scenario.software.name == "torch-trainer"
    assert words_table() is table


def runs(**errors: list[float]) -> pd.DataFrame:
    found = pd.DataFrame(
        [(name, error) for name, rows in errors.items() for error in rows],
        columns=["source_group", "error"],
    )
    return found.assign(memory_error=1.0 / (1.0 + found.error) - 1.0)


def test_a_source_is_judged_by_the_interval_of_the_others() -> None:
    found = by_source(runs(a=[0.5] * 9, b=[-0.1, 0.1], c=[0.2])).set_index("source")
    assert list(found.runs) == [9, 2, 1]
    assert found.inside["a"] == 0.0  # the others end at 0.2
    assert found.inside["b"] == 0.5  # they begin at 0.2, but either end is at least 2 %
    assert found.inside["c"] == 1.0


def test_all_sources_count_the_same() -> None:
    assert interval_of(runs(a=[-0.05] * 100, b=[0.3])) == pytest.approx((0.05, 0.3))
