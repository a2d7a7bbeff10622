"""Algorithms beside those that training takes: by hand, their laws, and the table of the docs."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.step_time.collective_algorithms import (
    direct_one_shot,
    direct_two_shot,
    hierarchical_all_reduce,
    in_network,
    nic_share,
    parameter_server,
    pipelined_broadcast,
    tree_broadcast,
)
from benchmarks.step_time.collectives import table
from cost_models.communication.ring_and_tree import ring_all_reduce
from hardware_profiles.cluster.links.groups import group_link
from hardware_profiles.cluster.parse import parse_cluster

EVERY = (
    parameter_server,
    direct_one_shot,
    direct_two_shot,
    in_network,
    pipelined_broadcast,
    tree_broadcast,
)
SIZES, RANKS = st.floats(0, 1e15), st.integers(1, 10**5)


@pytest.mark.parametrize("algorithm", EVERY)
@given(size=SIZES, ranks=RANKS)
def test_laws(algorithm, size: float, ranks: int) -> None:
    def cost(size: float = size, ranks: int = ranks, rate: float = 1e9, hop: float = 1e-6) -> float:
        return float(algorithm(size, ranks, rate, hop))

    assert cost(ranks=1) == 0.0
    assert 0.0 <= cost() <= cost(size=2 * size + 1) * (1 + 1e-12)
    assert cost(rate=2e9) <= cost() <= cost(hop=1e-3) * (1 + 1e-12)


@pytest.mark.parametrize("algorithm", EVERY)
def test_a_column_is_its_rows(algorithm) -> None:
    sizes, ranks = np.array([0.0, 1e4, 1e9]), np.array([1, 8, 128])
    column = algorithm(sizes, ranks, 1e11, 1e-6)
    rows = [
        float(algorithm(float(b), int(n), 1e11, 1e-6)) for b, n in zip(sizes, ranks, strict=True)
    ]
    assert np.array_equal(column, rows)


def test_servers_on_every_rank_are_a_ring_with_two_hops() -> None:
    for ranks in (2, 8, 100):
        all_serve = float(parameter_server(1e9, ranks, 1e9, 0.0, ranks))
        assert all_serve == pytest.approx(float(ring_all_reduce(1e9, ranks, 1e9, 0.0)))
        one = float(parameter_server(1e9, ranks, 1e9, 0.0))
        assert one / all_serve == pytest.approx(ranks / 2)


def test_hierarchies_of_one_level_are_rings() -> None:
    ring = float(ring_all_reduce(1e9, 8, 1e11, 2e-6))
    assert float(hierarchical_all_reduce(1e9, 8, 1, 1e11, 1e9, 2e-6, 9.0)) == pytest.approx(ring)
    assert float(hierarchical_all_reduce(1e9, 1, 8, 1.0, 1e11, 9.0, 2e-6)) == pytest.approx(ring)
    # the part of a node that each NIC carries is an eighth
    two = float(hierarchical_all_reduce(8e9, 8, 2, 1e30, 25e9, 0.0, 0.0))
    assert two == pytest.approx(2 * 1 / 2 * 1e9 / 25e9)


def test_a_share_of_the_nics_is_what_the_cluster_gives_a_group() -> None:
    cluster = parse_cluster("2xDGX-A100-80GB")
    for size, stride in ((2, 8), (4, 4), (16, 1)):
        members = size // 2
        bandwidth, _ = group_link(cluster, size, stride)
        assert float(bandwidth) == float(nic_share(25e9, 8, members, 8))


def test_switches_move_the_least_and_one_server_the_most() -> None:
    costs = [float(f(1e9, 8, 1e11, 1e-6)) for f in (in_network, direct_two_shot, parameter_server)]
    assert costs == sorted(costs)
    assert costs[0] / costs[1] == pytest.approx((1 + 1 / 8) / (2 * 7 / 8), rel=1e-3)


def test_the_docs_show_the_table() -> None:
    text = (Path(__file__).parents[3] / "docs" / "explanation" / "collectives.md").read_text(
        encoding="utf-8"
    )
    missing = [line for line in table() if line not in text]
    assert not missing, "python -m benchmarks.step_time.collectives"
