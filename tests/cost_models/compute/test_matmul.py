import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cost_models.compute.matmul import FULL_WAVE_SHARE, TILE_SETUP, matmul_seconds
from cost_models.compute.rates import Rates

MEMORY_BOUND = Rates(matmul=1e30, memory=1e12, operator=0.0, host_is_device=False)
BOTH = Rates(matmul=1e12, memory=1e11, operator=0.0, host_is_device=False)
GPU = Rates(matmul=2.7e14, memory=1e30, operator=0.0, host_is_device=False, units=108.0)
SIZES = st.integers(1, 40_000).map(float)


def test_a_memory_bound_matmul_takes_its_bytes() -> None:
    assert float(matmul_seconds(1.0, 1000.0, 2000.0, 2.0, MEMORY_BOUND)) == pytest.approx(
        2 * (1000 + 1000 * 2000 + 2000) / 1e12
    )


@given(
    st.floats(1, 1e6),
    st.floats(1, 1e6),
    st.floats(1, 1e6),
)
def test_the_roofline_is_the_slower_of_the_two_and_symmetric(m: float, k: float, n: float) -> None:
    seconds = float(matmul_seconds(m, k, n, 2.0, BOTH))
    work, moved = 2 * m * k * n / 1e12, 2 * (m * k + k * n + m * n) / 1e11
    assert seconds == pytest.approx(max(work, moved))
    assert seconds == pytest.approx(float(matmul_seconds(m, n, k, 2.0, BOTH)))


def test_a_full_wave_of_the_largest_tiles_runs_at_its_share_of_the_best_rate() -> None:
    rows, columns, summed = 256.0 * 108, 128.0, 1e7  # one tile for every multiprocessor
    seconds = float(matmul_seconds(rows, summed, columns, 2.0, GPU))
    ideal = 2 * rows * columns * summed / GPU.matmul
    assert seconds == pytest.approx(ideal / FULL_WAVE_SHARE, rel=2 * TILE_SETUP / summed)


def test_one_tile_more_is_a_wave_more() -> None:
    full, over = (float(matmul_seconds(256.0 * n, 64.0, 128.0, 2.0, GPU)) for n in (108, 109))
    assert over > 1.2 * full  # smaller tiles soften it, at their price


def test_a_short_sum_pays_for_the_setup_of_its_tiles() -> None:
    """Per FLOP, k = 64 takes (64 + setup) / 64 of what a long sum takes."""
    each = [float(matmul_seconds(256.0 * 108, k, 128.0, 2.0, GPU)) / k for k in (64.0, 1e6)]
    assert each[0] / each[1] == pytest.approx((64 + TILE_SETUP) / 64, rel=1e-3)


def test_setting_up_a_tile_takes_as_long_in_any_precision() -> None:
    """Of a rate twice as high, the same seconds: twice as many elements of k."""

    def setup(rate: Rates) -> float:
        short, long = (
            float(matmul_seconds(256.0 * 108, k, 128.0, 2.0, rate)) for k in (64.0, 128.0)
        )
        return 2 * short - long  # what does not grow with k

    twice = replace(GPU, matmul=2 * GPU.matmul, setup=2.0)
    assert setup(GPU) > 0
    assert setup(twice) == pytest.approx(setup(GPU))


def test_a_tall_sum_is_split_where_few_tiles_are_left() -> None:
    alone = float(matmul_seconds(128.0, 65536.0, 128.0, 2.0, GPU))
    assert alone < 0.5 * 2 * 128 * 128 * 65536 / (GPU.matmul / GPU.units)


@given(SIZES, SIZES, SIZES, st.integers(1, 64).map(float))
def test_a_larger_matmul_never_takes_less(m: float, k: float, n: float, batch: float) -> None:
    rate = replace(GPU, memory=1.8e12)
    base = float(matmul_seconds(m, k, n, 2.0, rate, batch=batch))
    assert base >= 2 * m * k * n * batch / (rate.matmul)
    for larger in ((2 * m, k, n), (m, 2 * k, n), (m, k, 2 * n)):
        assert float(matmul_seconds(*larger, 2.0, rate, batch=batch)) >= base * (1 - 1e-12)


def test_a_table_is_priced_as_its_rows() -> None:
    m = np.array([1.0, 100.0, 4096.0, 5000.0])
    column = matmul_seconds(m, 1024.0, 3072.0, 2.0, GPU)
    assert column.tolist() == [float(matmul_seconds(x, 1024.0, 3072.0, 2.0, GPU)) for x in m]


def test_no_rows_cost_nothing() -> None:
    assert float(matmul_seconds(0.0, 10.0, 10.0, 2.0, GPU)) == 0.0
    assert np.isfinite(float(matmul_seconds(0.0, 10.0, 10.0, 2.0, BOTH)))
