"""Runs that nothing was fitted on: priced, and as near as the docs say."""

from pathlib import Path

import pandas as pd
import pytest

import planner

RUNS = Path(__file__).parents[3] / "benchmarks" / "unseen" / "runs.csv"


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return planner.validate(RUNS).rows.set_index("row_id")


def test_all_are_priced(rows: pd.DataFrame) -> None:
    assert len(rows) == 58
    assert rows.skipped.isna().all()
    assert rows.time_error.notna().all()


def test_fsdp2_on_one_node_is_met_in_time_and_memory(rows: pd.DataFrame) -> None:
    """Llama 8B on two and four H200, gradients whole in fp32 over the micro-batches."""
    for name in ("kempnerforge-0002", "kempnerforge-0004"):
        assert abs(rows.time_error[name]) <= 0.03
        assert abs(rows.memory_error[name]) <= 0.06


def test_tensor_parallelism_without_a_switch_is_met(rows: pd.DataFrame) -> None:
    """Two ranks have a third of the links that four have."""
    for name in ("kempnerforge-0003", "kempnerforge-0005", "kempnerforge-0006"):
        assert abs(rows.time_error[name]) <= 0.06


def test_peaks_of_8_to_175_billion_parameters_are_met(rows: pd.DataFrame) -> None:
    """1 to 360 H200, whole gradients and whole logits on every tensor-parallel rank."""
    peaks = rows.memory_error[rows.source_group == "kempnerforge"].abs()
    assert len(peaks) == 26
    assert peaks.median() <= 0.045
    assert peaks.max() <= 0.105


def test_means_are_as_documented(rows: pd.DataFrame) -> None:
    counted = rows[~rows.partial]
    size = counted.time_error.abs().groupby(counted.source_group)
    assert size.median().max() <= 0.08
    assert size.mean().max() <= 0.11
