"""Bandwidths that collectives reach on a cluster's links."""

from __future__ import annotations

from pathlib import Path

from cost_models.communication.seconds import achieved, links_may_differ
from hardware_profiles.cluster.parse import parse_cluster


def reached(cluster: str) -> float:
    """GB/s of every accelerator in a ring inside a node."""
    return achieved(parse_cluster(cluster), 0.764, 0.94).tiers[0].bandwidth.value / 1e9


def test_accelerators_without_peer_to_peer_share_the_memory_of_their_host() -> None:
    """Two Xeon 8480+ with RTX 5090: 28 GB/s with 8 cards, 35 with 4 (NVIDIA/nccl issue 1639)."""
    assert 27 < reached("8xRTX5090") < 29
    assert 34 < reached("4xRTX5090") < 36
    assert reached("8xRTX3090") == reached("2x8xRTX3090") < 0.6 * reached("2xRTX3090")
    assert reached("8xRTX-A6000") == reached("2xRTX-A6000")  # peer-to-peer


def test_an_assumed_host_widens_intervals_more_than_an_assumed_link() -> None:
    names = ("8xRTX3090", "2xRTX3090", "8xA100-80GB")
    assert [links_may_differ(parse_cluster(name)) for name in names] == [2.5, 1.5, 1.0]


def test_a_file_says_what_the_memory_of_a_host_moves(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        'nodes = 1\ngpus_per_node = 8\naccelerator = "RTX-3090"\n'
        '[host]\nmemory_bandwidth = 77e9\nkind = "datasheet"\n'
    )
    assert 3 < reached(str(path)) < 4
    assert links_may_differ(parse_cluster(str(path))) == 1.5
