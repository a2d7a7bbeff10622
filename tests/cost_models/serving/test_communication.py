"""Exchanges of tokens between experts while serving, against published latencies."""

import numpy as np
import pytest

from cost_models.serving.communication import ReplicaLinks
from hardware_profiles.cluster.links.nvlink_domains import exchange_bandwidth
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.software.serving_engine import serving_engine

# deepseek-ai/DeepEP: README.md, low-latency kernels on H800 with a NIC of 400 Gb/s each: 128 tokens
# of 7168 elements to 8 experts, there in 8 bits, back in 16: ranks, microseconds of both
DEEP_EP = [(16, 118, 195), (32, 155, 273), (64, 173, 314), (128, 192, 369), (256, 194, 360)]


@pytest.mark.parametrize(("ranks", "there", "back"), DEEP_EP)
def test_tokens_to_experts_and_back(ranks: int, there: float, back: float) -> None:
    links = ReplicaLinks(parse_cluster("32x8xH100-SXM-80GB"), serving_engine())
    elements = 128 * 8 * 7168.0
    assert 1e6 * float(links.collective("all_to_all", 2 * elements, ranks)) == pytest.approx(
        back, rel=0.10
    )
    assert 1e6 * float(links.collective("all_to_all", elements, ranks)) == pytest.approx(
        there, rel=0.20
    )


def test_what_leaves_a_node_leaves_by_each_ranks_own_share() -> None:
    cluster = parse_cluster("4x8xH100-SXM-80GB")
    found = exchange_bandwidth(cluster, np.array([8, 16, 32, 4, 1]), np.array([1, 1, 1, 8, 1]))
    inside, network = 450e9, 50e9
    assert found.tolist() == pytest.approx(
        [inside, network * 15 / 8, network * 31 / 24, network, inside]
    )
    # seconds of a rank's bytes: those for other nodes over its own NIC
    size, ranks = 1e9, 16
    assert (ranks - 1) / ranks * size / found[1] == pytest.approx(size * 8 / 16 / network)


def test_one_rank_and_nothing_cost_nothing() -> None:
    links = ReplicaLinks(parse_cluster("2x8xH100-SXM-80GB"), serving_engine())
    assert float(links.collective("all_to_all", 1e6, 1)) == 0.0
    assert float(links.collective("all_to_all", 0.0, 8)) == 0.0


def test_a_column_is_its_rows() -> None:
    links = ReplicaLinks(parse_cluster("4x8xH100-SXM-80GB"), serving_engine())
    sizes, ranks = np.array([1e3, 1e6, 1e8, 1e9]), np.array([1, 8, 16, 32])
    for kind in ("all_to_all", "all_reduce", "all_gather"):
        column = links.collective(kind, sizes, ranks)
        rows = [
            float(links.collective(kind, float(b), int(n)))
            for b, n in zip(sizes, ranks, strict=True)
        ]
        assert np.array_equal(column, rows)
