"""Checkpoints and failures: published figures, a simulation, and what must hold for all sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.step_time.goodput import (
    checkpoint_bytes,
    checkpoint_interval,
    checkpoint_stall,
    goodput,
    seconds_between_failures,
    write_seconds,
)

SECONDS = st.floats(1e-3, 1e7)


@pytest.mark.parametrize(("hours", "minutes"), [(24.0, 117.0), (6.0, 57.0), (0.25, 9.1)])
def test_daly_figures_3_to_5(hours: float, minutes: float) -> None:
    """d = 5 minutes; the optimum of the higher-order model."""
    found = float(checkpoint_interval(300.0, hours * 3600.0)) / 60.0
    assert found == pytest.approx(minutes, abs=0.5 if minutes > 10 else 0.05)


@pytest.mark.parametrize("stall", [0.1, 5.0, 300.0])
def test_no_other_interval_is_better(stall: float) -> None:
    between, restart = 11_000.0, 660.0
    best = float(checkpoint_interval(stall, between))
    tried = best * np.linspace(0.2, 5.0, 97)
    shares = goodput(tried, stall, between, restart)
    assert float(goodput(best, stall, between, restart)) >= float(np.max(shares)) - 1e-3


def test_a_simulation_of_failures_comes_out_the_same() -> None:
    rng = np.random.default_rng(1)
    between, stall, restart, interval, pieces = 3600.0, 20.0, 120.0, 400.0, 20_000
    clock, done, fails = 0.0, 0, float(rng.exponential(between))
    while done < pieces:
        needed = interval + stall
        if fails > needed:
            clock, fails, done = clock + needed, fails - needed, done + 1
            continue
        clock, fails = clock + fails, float(rng.exponential(between))
        while fails < restart:  # failures while it starts again
            clock, fails = clock + fails, float(rng.exponential(between))
        clock, fails = clock + restart, fails - restart
    simulated = pieces * interval / clock
    assert float(goodput(interval, stall, between, restart)) == pytest.approx(simulated, rel=0.01)


def test_llama_3_was_above_nine_tenths() -> None:
    """419 interruptions in 54 days on 16,384 H100, more than 90 % effective (sec. 3.3.4)."""
    between = float(seconds_between_failures(50_677.0, 16_384))
    assert 54 * 24 * 3600 / between == pytest.approx(419, rel=1e-3)
    interval = float(checkpoint_interval(5.0, between))
    assert 0.90 < float(goodput(interval, 5.0, between, 660.0)) < 0.95


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_a_share_is_a_share(interval: float, stall: float, between: float, restart: float) -> None:
    share = float(goodput(interval, stall, between, restart))
    assert 0.0 <= share <= 1.0
    assert share >= float(goodput(interval, 2 * stall, between, restart))
    assert share >= float(goodput(interval, stall, between, 2 * restart))
    assert share <= float(goodput(interval, stall, 2 * between, restart)) * (1 + 1e-12)


def test_columns_are_their_rows() -> None:
    stall, between = np.array([0.1, 5.0, 400.0, 9.0]), np.array([1e6, 1e4, 100.0, 4.5])
    column = goodput(checkpoint_interval(stall, between), stall, between, 60.0)
    rows = [
        float(goodput(float(checkpoint_interval(d, m)), float(d), float(m), 60.0))
        for d, m in zip(stall, between, strict=True)
    ]
    assert np.array_equal(column, rows)
    assert checkpoint_interval(400.0, 100.0) == 100.0  # d >= 2 M


def test_bytes_and_seconds_by_hand() -> None:
    size = float(checkpoint_bytes(405e9, 4.0, 8.0))
    assert size == 4.86e12
    assert float(checkpoint_stall(size, 16_384, 63e9)) == pytest.approx(4.71e-3, rel=1e-3)
    assert float(write_seconds(size, 2048, 0.98e9)) == pytest.approx(2.42, rel=1e-2)
