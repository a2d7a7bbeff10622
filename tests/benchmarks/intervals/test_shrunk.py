"""Intervals for sources that were not compared yet."""

import csv
import io

import numpy as np
import pandas as pd
import pytest

from benchmarks.intervals.shrunk import (
    MOST,
    Rule,
    counted,
    coverage_lines,
    shortest,
    source_weights,
)
from cost_models.uncertainty import (
    ANY,
    MEMORY_COLUMNS,
    MEMORY_INTERVALS,
    MEMORY_KIND,
    memory_spread,
    verdict_spread,
)

RULE = Rule(("trainer", "card"), (1.0, 1.0))


def runs(seed: int = 0) -> pd.DataFrame:
    """Six sources of two trainers on two cards; those of ``bad`` err five times as much."""
    random = np.random.default_rng(seed)
    parts = []
    for number in range(6):
        trainer = "bad" if number % 2 else "good"
        errors = (0.25 if trainer == "bad" else 0.05) * random.standard_normal(20 + 10 * number)
        parts.append(
            pd.DataFrame(
                {
                    "source_group": f"source {number}",
                    "trainer": trainer,
                    "card": "new" if number < 3 else "old",
                    "error": np.expm1(errors),
                    "found_later": number > 3,
                    "blind": number > 1,
                }
            )
        )
    return RULE.with_cells(pd.concat(parts, ignore_index=True))


def sizes(rows: pd.DataFrame) -> dict[tuple[object, ...], float]:
    return {kind: size for kind, size, _ in RULE.kinds(rows)}


def test_a_kind_that_one_source_met_shrinks_towards_its_properties() -> None:
    found = sizes(runs())
    assert found["good", ANY] < found[ANY, ANY] < found["bad", ANY]
    alone = runs()
    rows = alone[alone.source_group != "source 4"]  # the only good one on old cards
    without = sizes(RULE.with_cells(rows.reset_index(drop=True)))
    assert ("good", "old") not in without
    few = alone[(alone.source_group != "source 4") | (alone.index % 10 == 0)]
    some = sizes(RULE.with_cells(few.reset_index(drop=True)))
    assert found["good", "old"] < some["good", "old"] < without[ANY, ANY]


def test_intervals_hold_the_runs_of_sources_that_were_left_out() -> None:
    rows = runs(3)
    apart = RULE.left_out(rows)
    assert 0.8 <= np.average(apart.inside, weights=source_weights(apart)) <= 1.0
    bad = apart.trainer == "bad"
    assert apart.above[bad].mean() > 2.0 * apart.above[~bad].mean()
    times = np.where(rows.source_group == "source 0", 9.0, 1.0)
    changed = rows.assign(error=np.expm1(times * np.log1p(rows.error)))
    again = RULE.left_out(changed)
    ours = apart.source_group == "source 0"  # its own errors do not move its interval
    assert np.allclose(again.above[ours], apart.above[ours])
    assert not np.allclose(again.above[~ours], apart.above[~ours])
    assert any(line.startswith("source 5") for line in coverage_lines(apart))


def test_first_predictions_alone_say_how_far_an_interval_reaches() -> None:
    rows = runs()
    cells = RULE.cells_of(rows)
    used = np.ones(len(cells), dtype=bool)
    relative = RULE.relative_errors(rows, cells, used)
    assert set(rows.source_group[relative.index]) == set(rows.source_group[rows.blind])
    assert RULE.ends_of(rows, cells, used) == shortest(
        relative.to_numpy(), *counted(rows.loc[relative.index])
    )


def test_intervals_from_few_sources_hold_the_next_one() -> None:
    """The runs of a source err together: eight sources are few, however many runs they have."""
    random = np.random.default_rng(0)
    held, without = [], []
    for _ in range(300):
        errors = random.standard_normal((9, 1)) + 0.5 * random.standard_normal((9, 10))
        rows = pd.DataFrame({"source_group": np.repeat(np.arange(8), 10)})
        known = errors[:8].ravel()
        for inside, ends in (
            (held, shortest(known, *counted(rows))),
            (without, shortest(known, source_weights(rows))),
        ):
            inside.append(np.mean((errors[8] >= -ends[0]) & (errors[8] <= ends[1])))
    assert 0.88 <= np.mean(held) <= 0.94
    assert np.mean(without) < 0.8


def test_a_source_counts_as_few_runs() -> None:
    weights = pd.Series(source_weights(runs())).groupby(runs().source_group).sum()
    assert weights.to_list() == pytest.approx([MOST] * 6)


def test_the_stated_file_is_complete_and_verdicts_look_less_far() -> None:
    rows = list(csv.DictReader(io.StringIO(MEMORY_INTERVALS.read_text(encoding="utf-8"))))
    assert tuple(rows[0]) == MEMORY_COLUMNS
    assert [rows[0][name] for name in MEMORY_KIND] == [ANY] * len(MEMORY_KIND)
    for row in rows:
        # no measured peak is zero
        assert 0.0 < float(row["verdict_below"]) < float(row["below"]) < 1.0
        assert 0.0 < float(row["verdict_above"]) < float(row["above"])
    # of all; kinds are wider, mixtures most: first predictions of some were half of the peak
    assert float(rows[0]["below"]) < 0.4
    assert float(rows[0]["above"]) < 0.8


def test_a_trainer_without_compared_runs_is_an_unknown_one() -> None:
    for assumed in (False, True):
        never = memory_spread("nobody's", assumed=assumed)
        assert never == memory_spread("unknown", assumed=assumed)
        assert memory_spread("torchtune", assumed=assumed).above < never.above
        assert verdict_spread("shardplan", assumed=assumed) == memory_spread("shardplan")
    live, reserved = memory_spread("hf-trainer", "allocated"), memory_spread("hf-trainer")
    assert live.source != reserved.source  # live tensors have an interval of their own


def test_a_setting_that_was_assumed_never_narrows_the_interval() -> None:
    for of in (memory_spread, verdict_spread):
        for name in ("hf-trainer", "litgpt", "megatron", "torchtitan", "torchtune", "nobody's"):
            assert of(name).above <= of(name, assumed=True).above
            assert of(name).below <= of(name, assumed=True).below
        assert of("torchtitan").above < of("torchtitan", assumed=True).above
