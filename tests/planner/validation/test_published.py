"""The published peaks stay as near as they are: each bound a little above what is printed today."""

from __future__ import annotations

from typing import Any

import pytest

import planner


@pytest.mark.slow(seconds=60)
def test_errors_and_verdicts_of_published_peaks() -> None:
    summary = planner.validate(what="memory").summary
    errors_over_the_sources(summary)
    no_source_is_forgotten(summary)
    verdicts_over_the_sources(summary)


def errors_over_the_sources(summary: Any) -> None:
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
    # are said with nine in ten chances (docs/reference/validate.md has what other chances cost).
    # The runs of 26 November, a quarter of which were outside, widened them: 16.3 to 18.2 % TIGHT.
    assert 0.10 <= verdicts["tight_share"] <= 0.19
