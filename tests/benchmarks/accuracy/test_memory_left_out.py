"""Peaks of trainers that no profile describes."""

import pandas as pd
import pytest

from benchmarks.accuracy.memory_left_out import by_source, interval_of
from planner.validation.rows.case import case_of
from planner.validation.rows.runs_file import PUBLISHED, read_runs
from planner.validation.rows.words import without_trainers


def test_no_profile_describes_a_trainer() -> None:
    """What the row says of its software does not count, but for engines among its words."""
    rows = {row.group: row for row in reversed(read_runs(PUBLISHED))}
    usual = [case_of(rows[name]).scenario.software.name for name in ("litgpt", "megatron-ci")]
    assert usual == ["litgpt", "megatron-core"]
    with without_trainers():
        unknown = [case_of(rows[name]).scenario.software.name for name in ("litgpt", "megatron-ci")]
        assert unknown == ["torch-trainer+fsdp1", "torch-trainer"]  # the row names FSDP1
    assert case_of(rows["megatron-ci"]).scenario.software.name == "megatron-core"


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
