"""Runs of trainers and accelerators that nothing was fitted on: as near as the docs say."""

from pathlib import Path

import pandas as pd
import pytest

import planner

RUNS = Path(__file__).parents[3] / "benchmarks" / "unseen" / "trainers.csv"


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return planner.validate(RUNS).rows.set_index("row_id")


@pytest.mark.slow
def test_every_row_is_priced(rows: pd.DataFrame) -> None:
    assert len(rows) == 236
    assert rows.time_error.notna().all()


@pytest.mark.slow
def test_one_script_is_met_on_twenty_kinds_of_cards(rows: pd.DataFrame) -> None:
    """GPT-2 under torch.compile, from an L4 of 72 W to a B200 of 1000: power, not the datasheet."""
    cards = rows[(rows.source_group == "runpod-gpt2") & rows.time_error.notna()]
    assert cards.gpu.nunique() == 20
    assert cards.time_error.abs().median() <= 0.06
    assert cards.memory_error.abs().median() <= 0.06
    small = cards[cards.gpu == "L4"]
    assert small.time_error.abs().max() <= 0.06  # by the datasheet it is twice as fast


@pytest.mark.slow
def test_megatron_is_met_where_its_groups_stay_in_a_node(rows: pd.DataFrame) -> None:
    grid = rows[rows.source_group == "dlperf-megatron-v100"]
    inside = grid[(grid.num_gpus <= 8)]
    assert inside.time_error.abs().median() <= 0.07


@pytest.mark.slow
def test_few_that_ran_are_said_not_to_fit(rows: pd.DataFrame) -> None:
    lived = rows[(rows.outcome == "ok") & rows.verdict.notna() & rows.tests_memory]
    assert len(lived) == 105
    assert (lived.verdict == "does_not_fit").sum() == 0


@pytest.mark.slow
def test_means_are_as_documented(rows: pd.DataFrame) -> None:
    sizes = rows.time_error.dropna().abs()
    assert sizes.median() <= 0.15
    assert sizes.mean() <= 0.2
