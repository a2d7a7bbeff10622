"""Orders are permutations that need no memory, and mixtures keep their shares."""

import itertools

import numpy as np
import pytest

from executor.data.order import BLOCK, Mixture, epochs, permuted


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097])
def test_a_permutation_meets_every_sample_once(count: int):
    assert sorted(permuted(np.arange(count), count, 7)) == list(range(count))


def test_any_place_of_a_huge_permutation_can_be_asked_for():
    count = 10**13
    places = np.array([0, 1, count - 1, count // 2])
    found = permuted(places, count, 1)
    assert len(set(found.tolist())) == 4
    assert found.min() >= 0
    assert found.max() < count
    assert permuted(places[2:3], count, 1)[0] == found[2]  # alone as among others


def test_permutations_look_random():
    """Of 4 samples all 24 orders come; places and neighbours do not go together."""
    orders = {tuple(permuted(np.arange(4), 4, key)) for key in range(1000)}
    assert orders == set(itertools.permutations(range(4)))
    shuffled = permuted(np.arange(20_000), 20_000, 3)
    assert abs(np.corrcoef(shuffled, np.arange(20_000))[0, 1]) < 0.03
    assert abs(np.corrcoef(shuffled[1:], shuffled[:-1])[0, 1]) < 0.03


def test_every_epoch_is_whole_and_in_another_order():
    found = epochs(np.arange(30), 10, seed=0).reshape(3, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in found)
    assert len({tuple(epoch) for epoch in found}) == 3
    assert not np.array_equal(found[0], epochs(np.arange(10), 10, seed=1))
    assert np.array_equal(epochs(np.arange(7, 23), 10, seed=0), found.ravel()[7:23])


def test_a_mixture_keeps_its_shares_and_counts_up_in_every_source():
    mixture = Mixture.of((0.7, 0.2, 0.1), seed=5)
    sources, inner = mixture(np.arange(3 * BLOCK))
    for block in sources.reshape(3, BLOCK):
        assert np.bincount(block).tolist() == [700, 200, 100]
    for source, count in enumerate((2100, 600, 300)):
        assert sorted(inner[sources == source]) == list(range(count))
    part = mixture(np.arange(1990, 2010))
    assert np.array_equal(part[0], sources[1990:2010])
    assert np.array_equal(part[1], inner[1990:2010])
    assert len(set(sources[:20])) > 1  # mixed, not one after the other


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 1e-9, 1), (3,), (1e9, 1, 1), (1,) * 999])
def test_shares_add_up_and_no_source_is_lost(weights: tuple[float, ...]):
    counts = Mixture.of(weights, 0).counts
    assert sum(counts) == BLOCK
    assert min(counts) >= 1
