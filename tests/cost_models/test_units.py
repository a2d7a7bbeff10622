import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.units import (
    GIB,
    format_bytes,
    format_count,
    format_gib,
    format_per_second,
    format_rate,
    format_seconds,
    format_step,
)

SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "days": 86400, "years": 31557600}
COUNTS = {"": 1, "M": 1e6, "B": 1e9, "T": 1e12}


def parsed(text: str, units: dict[str, float]) -> float:
    match = re.fullmatch(r"(-?[\d,.]+) ?(\S*)", text)
    assert match, text
    return float(match[1].replace(",", "")) * units[match[2]]


@given(st.floats(10, 1e18))
def test_bytes_keep_their_size(value: float) -> None:
    assert parsed(format_bytes(value), SIZES) == pytest.approx(value, rel=0.06)


@given(st.floats(-1e15, -10))
def test_negative_bytes_keep_their_size(value: float) -> None:
    assert parsed(format_bytes(value), SIZES) == pytest.approx(value, rel=0.06)


@given(st.floats(1e-4, 1e9))
def test_seconds_keep_their_size(value: float) -> None:
    assert parsed(format_seconds(value), SECONDS) == pytest.approx(value, rel=0.05)


@given(st.floats(10, 1e15))
def test_counts_keep_their_size(value: float) -> None:
    assert parsed(format_count(value), COUNTS) == pytest.approx(value, rel=0.06)


@given(st.floats(1e-3, 1e6))
def test_gib_keep_their_size(gib: float) -> None:
    assert float(format_gib(gib * GIB).replace(",", "")) == pytest.approx(gib, rel=0.6, abs=5e-4)


def test_units_where_they_change() -> None:
    assert [format_bytes(v * GIB) for v in (0.5, 1, 99.94, 150, 10240)] == [
        "512 MiB",
        "1.0 GiB",
        "99.9 GiB",
        "150 GiB",
        "10.0 TiB",
    ]
    assert [format_seconds(v) for v in (5e-4, 1e-3, 1, 59.9, 600, 5400)] == [
        "500 µs",
        "1.0 ms",
        "1 s",
        "59.9 s",
        "10.0 min",
        "1.5 h",
    ]
    assert [format_count(v) for v in (999_999, 1e6, 70.5e9, 1.2e12)] == [
        "999,999",
        "1.00 M",
        "70.50 B",
        "1.20 T",
    ]
    assert format_gib(0) == "0.000"


@given(st.floats(1e-8, 1e9))
def test_rates_keep_their_size_and_are_never_zero(value: float) -> None:
    assert parsed_number(format_per_second(value)) == pytest.approx(value, rel=0.06)
    words = format_rate(value)
    if words.endswith(" tokens/s"):
        assert parsed_number(words.removesuffix(" tokens/s")) == pytest.approx(value, rel=0.06)
    else:
        seconds = parsed(words.removesuffix(" a token"), SECONDS)
        assert seconds == pytest.approx(1.0 / value, rel=0.1)


def parsed_number(text: str) -> float:
    return float(text.replace(",", ""))


def test_slow_rates_are_times() -> None:
    assert [format_rate(rate) for rate in (3533.2, 12.0, 1.0, 1 / 9, 1 / 420)] == [
        "3,530 tokens/s",
        "12 tokens/s",
        "1 tokens/s",
        "9 s a token",
        "420 s a token",
    ]


def test_a_machine_that_is_too_slow_is_called_so() -> None:
    hour = 3600.0
    words = format_step(7 * hour, 6 * hour, 8 * hour, 0.16)
    assert words == "a step takes 7.0 h (6.0 h to 8.0 h): this machine is not for training it"
    # a huge batch on fast accelerators takes long, too
    assert "not for" not in format_step(7 * hour, 6 * hour, 8 * hour, 3000.0)
    assert "not for" not in format_step(20.0, 10.0, 30.0, 0.16)


def test_days_become_years_after_two_of_them() -> None:
    assert [format_seconds(365.25 * 86400 * years) for years in (1, 3)] == [
        "365.2 days",
        "3.0 years",
    ]
