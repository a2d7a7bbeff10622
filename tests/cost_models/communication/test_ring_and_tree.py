import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.communication.ring_and_tree import (
    all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    send,
    tree_all_reduce,
)

GROUPED = (ring_all_gather, ring_reduce_scatter, ring_all_reduce, tree_all_reduce, all_reduce)
SIZES = st.floats(0, 1e15)
RANKS = st.integers(1, 10**6)
BANDWIDTHS = st.floats(1e3, 1e13)
LATENCIES = st.floats(0, 1)


@pytest.mark.parametrize("collective", GROUPED)
def test_one_rank_costs_nothing(collective) -> None:
    assert float(collective(1e9, 1, 1e9, 1e-3)) == 0
    assert np.array_equal(collective(np.ones(3), np.ones(3, dtype=int), 1e9, 1e-3), np.zeros(3))


@pytest.mark.parametrize("collective", GROUPED)
@given(size=SIZES, ranks=RANKS, bandwidth=BANDWIDTHS, latency=LATENCIES)
def test_more_of_anything_is_never_faster(collective, size, ranks, bandwidth, latency) -> None:
    def cost(size=size, ranks=ranks, bandwidth=bandwidth, latency=latency) -> float:
        return float(collective(size, ranks, bandwidth, latency))

    slack = 1 + 1e-12
    assert 0 <= cost() <= cost(size=2 * size + 1) * slack
    assert cost() <= cost(ranks=ranks + 1) * slack
    assert cost() <= cost(latency=latency + 1e-3) * slack
    assert cost(bandwidth=2 * bandwidth) <= cost() * slack
    assert np.isfinite(cost())


@given(size=st.floats(1, 1e15), ranks=st.integers(2, 10**6), bandwidth=BANDWIDTHS)
def test_no_all_reduce_beats_the_bandwidth_bound(size, ranks, bandwidth) -> None:
    """Patarasuk and Yuan, JPDC 69 (2009), theorem 1: 2 (n - 1)/n of the bytes leave each rank."""
    bound = 2 * (ranks - 1) / ranks * size / bandwidth
    assert float(all_reduce(size, ranks, bandwidth, 0.0)) >= bound * (1 - 1e-12)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_ring_step_by_step(ranks: int) -> None:
    """Each of n - 1 steps sends one n-th of the tensor."""
    step = float(send(1e6 / ranks, 1e9, 1e-5))
    assert float(ring_all_gather(1e6, ranks, 1e9, 1e-5)) == pytest.approx((ranks - 1) * step)
    assert float(ring_all_reduce(1e6, ranks, 1e9, 1e-5)) == pytest.approx(2 * (ranks - 1) * step)


def test_trees_win_with_small_tensors_on_many_ranks_and_rings_with_large_ones() -> None:
    def both(size: float, ranks: int) -> tuple[float, float]:
        return (
            float(ring_all_reduce(size, ranks, 1e11, 1e-5)),
            float(tree_all_reduce(size, ranks, 1e11, 1e-5)),
        )

    ring, tree = both(1e3, 1024)
    assert tree < ring / 50
    ring, tree = both(1e9, 8)
    assert ring < tree
    assert float(all_reduce(1e3, 1024, 1e11, 1e-5)) == both(1e3, 1024)[1]


def test_tree_latency_is_logarithmic() -> None:
    cost = tree_all_reduce(0.0, np.array([2, 4, 8, 9, 1024]), 1e9, 1.0)
    assert cost.tolist() == [2, 4, 6, 8, 20]
