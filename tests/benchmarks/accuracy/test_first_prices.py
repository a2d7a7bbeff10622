"""First prices of unseen runs: the file, and the fit of a trainer without a profile."""

import numpy as np
import pandas as pd
import pytest

from benchmarks.accuracy.first_prices import ROUNDS, SHARES, fitted, lines
from benchmarks.unseen import FIRST_PRICES, UNSEEN, with_first_prices
from planner.validation.rows.runs_file import read_runs


def loops(round_: int, source: str, slower: float) -> pd.DataFrame:
    """Runs that took ``slower`` times their first price, all of it computation."""
    shares = {share: -np.log(share) for share in SHARES}
    own = {"round": round_, "source_group": source, "measured": slower, "first": 1.0}
    return pd.DataFrame([own | shares] * 3)


def test_every_first_price_is_of_a_run_and_every_table_has_a_round() -> None:
    prices = pd.read_csv(FIRST_PRICES)
    assert not prices.duplicated(["table", "row_id"]).any()
    timed = prices[prices.seconds.notna()]
    assert set(timed.table) == {table for tables in ROUNDS for table in tables}
    for table, part in prices.groupby("table"):
        assert set(part.row_id) <= {row.name for row in read_runs(UNSEEN[str(table)])}
    assert prices[["seconds", "bytes"]].max(axis=1).gt(0).all()


def test_a_run_has_the_error_of_its_first_price_where_one_is_known() -> None:
    first = pd.read_csv(FIRST_PRICES).dropna(subset="seconds").iloc[0]
    runs = {"table": [first.table, "published"], "row_id": [first.row_id] * 2}
    rows = pd.DataFrame({**runs, "error": 0.1, "predicted_step_seconds": 2.0 * first.seconds})
    found = with_first_prices(rows, "seconds", "predicted_step_seconds")
    assert found.error.to_list() == pytest.approx([1.2, 0.1])  # the first price was half of today's
    assert found.blind.to_list() == [True, False]


def test_slower_runs_give_a_smaller_share_and_each_source_counts_once() -> None:
    slow, usual = loops(1, "slow", 1.0 / 0.9), loops(1, "usual", 1.0)
    assert fitted(slow) == 0.9
    assert fitted(usual) == 1.0
    many = pd.concat([slow, slow, slow, usual, loops(1, "another", 1.0)], ignore_index=True)
    assert fitted(many) == 1.0


def test_a_round_is_judged_by_the_rounds_before_it() -> None:
    rows = pd.concat([loops(1, "one", 1.0 / 0.8), loops(2, "two", 1.0 / 0.9)], ignore_index=True)
    text = list(lines(rows))
    assert any(line.startswith("round 2      0.80") for line in text)  # of round 1 alone
    assert "nearer in 0 of 1 sources" in text  # a tenth too slow instead of a tenth too fast
    assert text[-1].startswith("fitted on all rounds: 0.8")
