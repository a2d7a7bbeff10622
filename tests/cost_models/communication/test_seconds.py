"""Bandwidths that collectives reach on a cluster's links."""

from pathlib import Path

import pytest

from cost_models.communication.seconds import achieved, links_may_differ
from hardware_profiles.cluster.parse import parse_cluster

CARDS = 'nodes = 1\ngpus_per_node = 8\naccelerator = "RTX-3090"\n'


def reached(cluster: str) -> float:
    """GB/s of every accelerator in a ring inside a node."""
    return achieved(parse_cluster(cluster), 0.764, 0.94).tiers[0].bandwidth.value / 1e9


def test_hosts_of_cards_without_peer_to_peer_are_between_those_measured() -> None:
    """0.9 to 3.9 GB/s in clouds, 14.5 in a server (measured/pcie_collectives.csv)."""
    assert 3.9 < reached("2xRTX3090") == reached("8xRTX4090") < 14.5
    assert reached("1x16xRTX3090") < reached("8xRTX3090")  # share the memory of their host
    assert reached("8xRTX3090") == reached("2x8xRTX3090")
    assert reached("8xRTX-A6000") == reached("2xRTX-A6000") > 3 * reached("2xRTX3090")


def test_an_assumed_host_widens_intervals_more_than_an_assumed_link() -> None:
    names = ("8xRTX3090", "2xRTX3090", "2xRTX-A6000", "8xA100-80GB")
    assert [links_may_differ(parse_cluster(name)) for name in names] == [3.0, 3.0, 1.5, 1.0]


def test_a_file_says_what_the_memory_of_a_host_moves(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(CARDS + '[host]\nmemory_bandwidth = 77e9\nkind = "datasheet"\n')
    assert 3 < reached(str(path)) < 4


def test_a_file_says_what_collectives_reach(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(CARDS + "[link]\nbus_bandwidth = 25e9\n")
    assert reached(str(path)) == 25.0
    assert links_may_differ(parse_cluster(str(path))) == 1.0
    path.write_text(CARDS + "[link]\nbandwidth = 7.9e9\nbus_bandwidth = 3e9\n")
    assert reached(str(path)) == 3.0
    path.write_text(CARDS + '[link]\nname = "NVLink3"\nbandwidth = 56e9\nbus_bandwidth = 45e9\n')
    assert reached(str(path)) == 45.0


def test_lanes_limit_what_collectives_reach(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(CARDS.replace("8", "2") + "[link]\nbandwidth = 7.75e9\n")
    assert reached(str(path)) == pytest.approx(reached("2xRTX3090") / 4)


@pytest.mark.parametrize(
    ("gigabits", "of_line"), [(1, 0.94), (10, 0.94), (20, 0.68), (25, 0.544), (100, 0.54)]
)
def test_tcp_fills_slow_lines_alone(tmp_path: Path, gigabits: float, of_line: float) -> None:
    """1.7 GB/s of a node, or 0.54 of a line that is faster."""
    path, rate = tmp_path / "own.toml", gigabits / 8 * 1e9
    network = f'[network]\nname = "Ethernet"\nbandwidth = {rate / 8:.9g}\n'
    path.write_text(CARDS.replace("nodes = 1", "nodes = 2") + network)
    found = achieved(parse_cluster(str(path)), 0.764, 0.94).tiers[-1].bandwidth.value
    assert 8 * found == pytest.approx(of_line * rate)


def test_links_of_a_known_virtual_machine_reach_more() -> None:
    """50 Gb/s between two T4 of g4dn.12xlarge; 3 GB/s are taken of cards without peer-to-peer."""
    assert 3.0 < reached("g4dn.12xlarge") < 6.25
