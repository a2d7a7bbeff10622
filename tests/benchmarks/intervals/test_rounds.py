"""Intervals judged round by round."""

import numpy as np
import pandas as pd

from benchmarks.intervals.rounds import FROM, in_rounds, judged
from benchmarks.intervals.shrunk import Rule

RULE = Rule(("trainer",), (1.0,))


def rounds(*, times: float) -> pd.DataFrame:
    """Twenty sources of ten rounds: first errors are ``times`` those of published runs."""
    random = np.random.default_rng(0)
    errors = 0.1 * random.standard_normal(400)
    number = np.repeat(np.arange(10), 40)
    return pd.DataFrame(
        {
            "source_group": [f"source {place // 20}" for place in range(400)],
            "trainer": "one",
            "error": np.expm1(np.where(number > 0, times, 1.0) * errors),
            "number": number,
            "blind": number > 0,
        }
    )


def test_intervals_from_first_predictions_hold_the_next_round() -> None:
    rows = rounds(times=3.0)
    learned = pd.concat([rows, *[rows[rows.number == 0]] * 5], ignore_index=True)
    found = judged(learned, RULE)
    assert found.number.min() == FROM
    assert 0.85 <= found.inside.mean() <= 0.97


def test_a_round_does_not_make_its_own_interval() -> None:
    rows = rounds(times=1.0)
    last = rows.number == rows.number.max()
    worse = rows.assign(error=np.where(last, 9.0 + rows.error, rows.error))
    found, again = (judged(one, RULE) for one in (rows, worse))
    assert np.allclose(found.above, again.above)


def test_a_run_belongs_to_the_day_of_its_table() -> None:
    table = ["published", "2026_12_03_times", "2026_12_03_peaks", "2026_12_04_times"]
    found = in_rounds(pd.DataFrame({"table": table, "source_group": "a"}))
    published, third, also, fourth = found.number
    assert 0 == published < third == also < fourth
    assert found.source_group.nunique() == 3
