"""NCCL's own model of its algorithms: what it chooses by size, and what one kernel takes."""

import numpy as np
import pytest

from cost_models.communication.nccl_protocols import (
    CHOICES,
    NcclGroup,
    direct_all_reduce,
    fastest_choice,
    nccl_seconds,
    seconds_by_choice,
)
from hardware_profiles.cluster.links.nvlink_domains import domains_spanned
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.software.nccl import ALGORITHMS, LINKS, PROTOCOLS, nccl_tuning

A100 = 229e9  # bytes/s of a ring on one node of 8 (VIA-Research/vTrain@f8dda84: trace/a100)
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def test_the_protocol_changes_with_the_size() -> None:
    sizes = 2.0 ** np.arange(10, 31)
    _, index = fastest_choice("all_reduce", sizes, NcclGroup(8, 1, A100))
    protocols = [CHOICES[i][1] for i in index]
    assert protocols[0] == "ll"
    assert protocols[-1] == "simple"
    order = [PROTOCOLS.index(p) for p in protocols]
    assert order == sorted(order)  # ll, then ll128, then simple


def test_by_hand() -> None:
    """Ring, LL128, 2 nodes of 8: 14 us, 26 steps of 1.9 us inside, 4 of 4 us between."""
    seconds = nccl_seconds("all_reduce", 1e6, NcclGroup(16, 2, 188e9), "ring", "ll128")
    assert float(seconds) == pytest.approx(
        14e-6 + 26 * 1.9e-6 + 4 * 4.0e-6 + 2 * 15 / 16 * 1e6 / (0.92 * 188e9)
    )
    # tree, LL: 6.8 us, 2 (7 x 0.6 + 1 x 5), of 39 GB/s at most
    seconds = nccl_seconds("all_reduce", 1e6, NcclGroup(16, 2, 188e9), "tree", "ll")
    assert float(seconds) == pytest.approx(6.8e-6 + 2 * (7 * 0.6e-6 + 5e-6) + 2e6 / 39e9)


def test_large_tensors_take_what_the_training_formulas_say() -> None:
    """One node: ring, Simple, within the constant that a collective takes to start."""
    from cost_models.communication.ring_and_tree import ring_all_reduce

    seconds, index = fastest_choice("all_reduce", 1e9, NcclGroup(8, 1, A100))
    assert CHOICES[int(index)] == ("ring", "simple")
    assert float(seconds) == pytest.approx(float(ring_all_reduce(1e9, 8, A100, 3.4e-6)), rel=2e-3)


def test_only_hopper_adds_up_in_its_switches() -> None:
    hopper = NcclGroup(8, 1, 344e9, architecture="Hopper")
    large = 1e9
    assert np.isinf(nccl_seconds("all_reduce", large, NcclGroup(8, 1, A100), "nvls", "simple"))
    assert float(nccl_seconds("all_reduce", large, hopper, "nvls", "simple")) == pytest.approx(
        23e-6 + large / (5 / 6 * 344e9)
    )
    assert CHOICES[int(fastest_choice("all_reduce", large, hopper)[1])][0] == "nvls"
    assert np.isinf(nccl_seconds("all_gather", large, hopper, "nvls", "simple"))


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_costs_nothing_and_something_always_can(kind: str) -> None:
    for link in LINKS:
        assert float(fastest_choice(kind, 1e6, NcclGroup(1, 1, 1e9, link))[0]) == 0.0
        assert np.isfinite(fastest_choice(kind, 1e6, NcclGroup(32, 4, 1e9, link))[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_is_its_rows(kind: str) -> None:
    sizes, ranks = np.array([0.0, 4096.0, 1e6, 1e9]), np.array([1, 8, 16, 64])
    nodes, bandwidth = np.array([1, 1, 2, 8]), np.array([1e9, 2e11, 1e11, 5e10])
    table = seconds_by_choice(kind, sizes, NcclGroup(ranks, nodes, bandwidth, "nvlink", "Hopper"))
    for choice, column in table.items():
        rows = [
            nccl_seconds(
                kind,
                float(sizes[i]),
                NcclGroup(int(ranks[i]), int(nodes[i]), float(bandwidth[i]), "nvlink", "Hopper"),
                *choice,
            )
            for i in range(4)
        ]
        assert np.array_equal(column, np.array(rows, dtype=float)), choice


# sgl-project/sglang/pull/2904: kernels of TensorRT-LLM on H100, without CUDA graphs, milliseconds
ON_H100 = [
    (2, 512, 0.0037), (4, 512, 0.0048), (8, 512, 0.0059),
    (2, 32768, 0.0045), (4, 32768, 0.0048), (8, 32768, 0.0078),
    (2, 524288, 0.0125), (4, 524288, 0.0202), (8, 524288, 0.0221),
    (2, 1048576, 0.0199), (4, 1048576, 0.0311), (8, 1048576, 0.0338),
]  # fmt: skip


def test_one_kernel_against_published_latencies() -> None:
    from hardware_profiles.software.serving_engine import serving_engine

    engine = serving_engine()
    errors = []
    for ranks, size, measured in ON_H100:
        said = direct_all_reduce(
            float(size),
            ranks,
            450e9,
            engine.communication.direct_all_reduce_start,
            engine.communication.direct_all_reduce_share,
        )
        errors.append(abs(1e3 * float(said) / measured - 1.0))
    assert float(np.median(errors)) < 0.20
    assert max(errors) < 0.40


def test_domains_of_a_group() -> None:
    cluster = parse_cluster("4x8xH100-SXM")
    spans = domains_spanned(cluster, np.array([1, 2, 8, 16, 32, 4]), np.array([1, 1, 1, 1, 1, 8]))
    assert spans.tolist() == [1, 1, 1, 2, 4, 4]
    assert domains_spanned(parse_cluster("8xH100-SXM"), 8, 1) == 1


def test_the_constants_are_whole() -> None:
    tuning = nccl_tuning()
    assert set(tuning.base) == set(tuning.share) == set(ALGORITHMS)
    assert all(set(tuning.hop[link]) <= set(ALGORITHMS) for link in LINKS)
    for link in LINKS:
        for algorithm in ("ring", "tree"):
            assert set(tuning.hop[link][algorithm]) == set(PROTOCOLS)
