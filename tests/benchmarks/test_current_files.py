"""Recorded files about compared runs are current: each run is priced once for all of them."""

import csv
import io
from typing import Any

import numpy as np
import pytest

from benchmarks.accuracy.__main__ import PAGES, filled
from benchmarks.intervals import compared_runs, peaks
from benchmarks.intervals.shrunk import source_weights
from benchmarks.unseen import validated
from cost_models.uncertainty import MEMORY_INTERVALS, MEMORY_KIND
from planner.assessment.confidence import COMPARED_RUNS


@pytest.mark.slow(seconds=300)
def test_files_are_current_and_published_peaks_as_near_as_they_were() -> None:
    """Files that differ: ``benchmarks.accuracy``, ``intervals.compared_runs`` or ``.peaks``."""
    summary = validated("published").summary
    peaks_stay_as_near_as_they_are(summary)
    no_source_is_forgotten(summary)
    verdicts_over_the_sources(summary)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert filled(text) == text
    assert COMPARED_RUNS.read_text(encoding="utf-8") == compared_runs.table()
    intervals_are_what_the_command_writes()


def peaks_stay_as_near_as_they_are(summary: Any) -> None:
    mean = summary["memory"]["over_groups"]
    assert len(mean["groups"]) >= 6
    assert mean["n"] >= 263
    assert mean["median_absolute_error"] <= 0.035
    assert mean["p90_absolute_error"] <= 0.105
    assert abs(mean["bias"]) <= 0.03
    assert mean["coverage"] >= 0.88


def no_source_is_forgotten(summary: Any) -> None:
    by_source = summary["memory"]["by"]["source_group"]
    bounds = {
        "bigscience-v100": 0.085,
        "fms-acceleration": 0.03,
        "litgpt": 0.03,
        "megatron-ci": 0.02,
        "peft-method-comparison": 0.03,
        "torchtune": 0.045,
    }
    found = {name: by_source[name]["median_absolute_error"] for name in bounds}
    assert {name for name, error in found.items() if error > bounds[name]} == set()


def verdicts_over_the_sources(summary: Any) -> None:
    verdicts = summary["verdicts"]
    assert verdicts["died"] >= 58
    assert verdicts["died_said_to_fit_rows"] == []
    assert verdicts["lived_said_not_to_fit"] <= 0.02 * verdicts["lived"]
    # Intervals of sources left out are wider than those of a source's own runs, by which 10 % of
    # these runs were TIGHT: those had held 52 % of the runs of new sources. FITS and DOES NOT FIT
    # are said with nine in ten chances (docs/explanation/intervals.md).
    # The runs of 26 November, a quarter of which were outside, widened them: 16.3 to 18.2 % TIGHT.
    assert 0.10 <= verdicts["tight_share"] <= 0.19


def intervals_are_what_the_command_writes() -> None:
    """Within two points: prices of single runs may move a little between two writings."""
    compared = peaks.all_runs()
    fresh = csv.DictReader(io.StringIO(peaks.table_text(compared)))
    rows = csv.DictReader(io.StringIO(MEMORY_INTERVALS.read_text(encoding="utf-8")))
    written = {tuple(row[name] for name in MEMORY_KIND): row for row in rows}
    for row in fresh:
        kind = tuple(row[name] for name in MEMORY_KIND)
        for name in ("below", "above", "verdict_below", "verdict_above"):
            assert float(written[kind][name]) == pytest.approx(float(row[name]), abs=0.02), kind
    apart = peaks.RULE.left_out(compared)
    unknown = peaks.is_unknown(apart)
    for part in (apart[~unknown], apart[~unknown & apart.found_later], apart[unknown]):
        assert 0.85 <= np.average(part.inside, weights=source_weights(part)) <= 0.95
