"""Averages, rank quality and verdicts as RUNS.csv defines them."""

import pandas as pd
import pytest

from planner.validation.statistics import (
    error_figures,
    over_groups,
    ranking_figures,
    verdict_figures,
)


def test_figures_of_a_group() -> None:
    rows = pd.DataFrame(
        {"e": [0.1, -0.1, 0.4, -0.2], "i": [True, True, False, False], "w": [0.1, 0.1, 0.3, 0.1]}
    )
    found = error_figures(rows, "e", "i", "w")
    assert found["n"] == 4
    assert found["median_absolute_error"] == pytest.approx(0.15)
    assert found["mean_absolute_error"] == pytest.approx(0.2)
    assert found["bias"] == pytest.approx(0.05)
    assert found["p90_absolute_error"] == pytest.approx(0.34)
    assert found["coverage"] == 0.5
    assert found["median_half_width"] == pytest.approx(0.1)


def test_groups_count_alike_whatever_their_size() -> None:
    groups = {
        "many": {"n": 95, "bias": 0.1},
        "few": {"n": 5, "bias": 0.3},
        "too few": {"n": 4, "bias": 9.0},
        "left out": {"n": 50, "bias": 9.0},
    }
    found = over_groups(groups, ["left out"])
    assert found["groups"] == ["few", "many"]
    assert found["n"] == 100
    assert found["bias"] == pytest.approx(0.2)


def ranked(predicted: list[float], measured: list[float]) -> pd.DataFrame:
    same = {
        "source_group": "s",
        "model": "m",
        "gpu": "g",
        "num_gpus": 8,
        "seq_len": 1,
        "global_batch_size": 8,
        "precision": "bf16",
        "peft": None,
        "framework": None,
    }
    return pd.DataFrame(
        {
            **same,
            "plan": [f"tp={i}" for i in range(len(predicted))],
            "predicted_step_seconds": predicted,
            "measured_step_seconds": measured,
        }
    )


def test_regret_is_the_price_of_trusting_the_ranking() -> None:
    found = ranking_figures(ranked([2.0, 1.0, 3.0, 4.0, 5.0], [1.0, 1.1, 3.0, 4.0, 5.0]))["s"]
    assert found["mean_regret"] == pytest.approx(0.1)
    assert found["pairs_in_order"] == pytest.approx(0.9)
    assert found["spearman"] == pytest.approx(0.9)
    perfect = ranking_figures(ranked([1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 4.0, 5.0, 9.0]))["s"]
    assert (perfect["mean_regret"], perfect["spearman"]) == (0.0, pytest.approx(1.0))
    # ratios 1/2, 2/3, 3/4, 4/5 and 5/9: from their median 2/3 they differ by 1/6 in the median
    assert perfect["error_between_plans"] == pytest.approx(1.0 / 6.0)


def test_a_ranking_needs_five_different_plans() -> None:
    rows = ranked([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert ranking_figures(rows.assign(plan="tp=1")) == {}
    assert ranking_figures(rows.head(4)) == {}


def test_verdicts_are_held_against_what_happened() -> None:
    rows = pd.DataFrame(
        {
            "row_id": list("abcde"),
            "outcome": ["oom", "oom", "ok", "ok", "ok"],
            "verdict": ["fits", "does_not_fit", "does_not_fit", "tight", "fits"],
            "exceeds_accelerator": False,
        }
    )
    found = verdict_figures(rows)
    assert (found["died"], found["died_said_to_fit_rows"]) == (2, ["a"])
    assert (found["lived"], found["lived_said_not_to_fit_rows"]) == (3, ["c"])
    assert found["tight_share"] == pytest.approx(0.2)
    spilled = verdict_figures(rows.assign(exceeds_accelerator=rows.row_id == "c"))
    assert (spilled["died"], spilled["lived_said_not_to_fit_rows"]) == (3, [])
