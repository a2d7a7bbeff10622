"""The link of a group against an enumeration of all groups on the graph; files in and out."""

import json
import math
from itertools import pairwise

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware_profiles.cluster.catalogue import find_accelerator
from hardware_profiles.cluster.cluster_json import cluster_from_dict, cluster_to_dict
from hardware_profiles.cluster.links import groups
from hardware_profiles.cluster.links.groups import (
    group_link,
    link_graph,
    mean_hop_latency,
    point_to_point_link,
)
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.schema import Cluster, Figure, Tier
from hardware_profiles.errors import InputError
from tests.samples import examples

HALF_INSIDE = 2.0 / (1.0 / 300e9 + 1.0 / 25e9)  # half of the messages over NVLink


def toy(sizes, *, peer=None):
    """Return a cluster whose tiers have the given domain sizes, each slower than the one inside."""
    tiers = tuple(
        Tier(
            f"tier{index}",
            size,
            Figure(300.0 / 7**index, "assumed", "test"),
            Figure(1.0 + index, "assumed", "test"),
            peer_bandwidth=None if peer is None or index else Figure(peer, "assumed", "test"),
        )
        for index, size in enumerate(sizes)
    )
    accelerator = find_accelerator("A100-SXM-80GB")
    return Cluster("toy", accelerator, sizes[-1] // sizes[0], sizes[0], tiers)


def groups_of(num_gpus, size, stride):
    """Return all groups: block after block of size * stride ranks."""
    block = size * stride
    return [
        [base + offset + stride * index for index in range(size)]
        for base in range(0, num_gpus, block)
        for offset in range(stride)
    ]


def below(graph, lower, upper, ranks):
    """Return how many of the ranks hang below the edge from lower to upper."""
    cut = graph.copy()
    cut.remove_edge(lower, upper)
    reached = networkx.node_connected_component(cut, lower)
    return sum(("accelerator", rank) in reached for rank in ranks)


def ring_on_graph(graph, group):
    """Return bandwidth and latency of one group's ring; every member has its share of each edge."""
    bandwidth, latency = math.inf, 0.0
    for left, right in zip(group, [*group[1:], group[0]], strict=True):
        path = networkx.shortest_path(graph, ("accelerator", left), ("accelerator", right))
        for near, far in pairwise(path):
            edge = graph.edges[near, far]
            lower, upper = sorted((near, far), key=lambda node: graph.nodes[node]["accelerators"])
            if graph.nodes[near]["accelerators"] == graph.nodes[far]["accelerators"]:
                continue  # a domain of one: the edge above it adds nothing
            share = below(graph, lower, upper, group) / graph.nodes[lower]["accelerators"]
            bandwidth = min(bandwidth, edge["bandwidth"] * share)
            latency = max(latency, edge["latency"])
    return bandwidth, latency


def mean_hop_on_graph(graph, group):
    """Return seconds of a ring's average hop; one of a rank to itself is the inner tier's."""
    inner = min(edge["latency"] for *_, edge in graph.edges(data=True))
    if len(group) == 1:
        return inner
    hops = []
    for rank, following in zip(group, [*group[1:], group[0]], strict=True):
        path = networkx.shortest_path(graph, ("accelerator", rank), ("accelerator", following))
        hops.append(max(graph.edges[edge]["latency"] for edge in pairwise(path)))
    return sum(hops) / len(hops)


CASES = [
    (sizes, size, stride)
    for sizes in ([6], [8, 16], [8, 24], [4, 8, 16], [2, 12], [3, 12], [6, 24])
    for size in range(2, sizes[-1] + 1)
    for stride in range(1, sizes[-1] + 1)
    if sizes[-1] % (size * stride) == 0
]


@pytest.mark.parametrize("sizes", [[6], [8, 16], [8, 24], [4, 8, 16], [2, 12], [3, 12], [6, 24]])
def test_closed_form_equals_every_group_on_the_graph(sizes):
    cluster = toy(sizes)
    graph = link_graph(cluster)
    for _, size, stride in (case for case in CASES if case[0] == sizes):
        rings = [ring_on_graph(graph, group) for group in groups_of(sizes[-1], size, stride)]
        bandwidth, latency = group_link(cluster, size, stride)
        assert float(bandwidth) == pytest.approx(min(ring[0] for ring in rings)), (size, stride)
        assert float(latency) == max(ring[1] for ring in rings), (size, stride)
        hops = [mean_hop_on_graph(graph, group) for group in groups_of(sizes[-1], size, stride)]
        span = size * stride
        fills = all(d % span == 0 or (span % d == 0 and d % stride == 0) for d in sizes)
        if fills:  # else some group straddles an edge: never too fast
            assert float(mean_hop_latency(cluster, size, stride)) == pytest.approx(hops[0])
        assert float(mean_hop_latency(cluster, size, stride)) >= max(hops) * (1 - 1e-12)


@pytest.mark.parametrize(
    ("size", "stride", "gigabytes"),
    [
        (1, 1, 300),
        (8, 1, 300),
        (4, 2, 300),
        (16, 1, 200),
        (2, 8, 25),
        (4, 4, 50),
        (3, 1, 25),
        (6, 1, 50),
        (12, 1, 100),
        (16, 2, 100),
    ],
)
def test_two_dgx_a100_by_hand(size, stride, gigabytes):
    bandwidth, _ = group_link(parse_cluster("6x8xA100-80GB"), size, stride)
    assert float(bandwidth) == gigabytes * 1e9


def test_a_full_mesh_of_amd_accelerators():
    bandwidth, _ = group_link(parse_cluster("8xMI300X"), np.array([2, 4, 8]), 1)
    assert bandwidth.tolist() == [64e9, 192e9, 448e9]
    peer, _ = point_to_point_link(parse_cluster("8xMI300X"), 1)
    assert float(peer) == 64e9


def test_four_boards_without_a_switch_share_their_links_out():
    """6 of 18 NVLinks to each neighbour: two ranks have 150 GB/s, all four 450."""
    cluster = parse_cluster("2xJUPITER-Booster")
    assert [float(group_link(cluster, n, 1)[0]) for n in (2, 4)] == [150e9, 450e9]
    assert float(group_link(cluster, 2, 4)[0]) == 25e9  # one NIC each


def test_four_gh200_are_a_board_that_shares_its_power() -> None:
    """JUPITER's board of four allows a superchip 680 W, its servers of one 900."""
    watts = [parse_cluster(name).accelerator.watts for name in ("1xGH200", "1x4xGH200")]
    assert [one is not None and one.value for one in watts] == [700.0, 580.0]
    assert float(group_link(parse_cluster("1x4xGH200"), 2, 1)[0]) == 150e9


def test_tpu_slices_whose_ends_are_not_joined_have_half_the_links():
    tiers = [parse_cluster(f"{chips}xTPU-v5e").tiers[0] for chips in (8, 256)]
    assert [tier.bandwidth.value for tier in tiers] == [90e9, 180e9]


@given(
    sizes=st.sampled_from([[8, 64], [4, 8, 64], [6, 48], [72, 144], [8]]),
    rows=st.lists(st.tuples(st.integers(1, 4096), st.integers(1, 4096)), min_size=1, max_size=16),
    peer=st.sampled_from([None, 50.0]),
)
def test_table_equals_rows_and_nothing_beats_the_inner_link(sizes, rows, peer):
    cluster = toy(sizes, peer=peer)
    size, stride = np.array(rows).T
    bandwidth, latency = group_link(cluster, size, stride)
    inner = cluster.tiers[0]
    for index, (one_size, one_stride) in enumerate(rows):
        one = group_link(cluster, one_size, one_stride)
        assert (float(one[0]), float(one[1])) == (bandwidth[index], latency[index])
    assert np.all(bandwidth > 0)
    assert np.all(bandwidth <= inner.bandwidth.value)
    assert np.all(latency >= inner.latency.value)
    peers = point_to_point_link(cluster, stride, size)
    for index, (one_size, one_stride) in enumerate(rows):
        one = point_to_point_link(cluster, one_stride, one_size)
        assert (float(one[0]), float(one[1])) == (peers[0][index], peers[1][index])


@given(
    powers=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    more=st.integers(1, 3),
)
def test_a_wider_stride_is_never_faster(powers, more):
    cluster = toy([8, 512])
    size, stride = 2 ** powers[0], 2 ** powers[1]
    near, near_latency = group_link(cluster, size, stride)
    far, far_latency = group_link(cluster, size, stride * 2**more)
    assert far <= near
    assert far_latency >= near_latency


def test_a_job_on_part_of_the_cluster():
    cluster = parse_cluster("2x8xA100-80GB")
    assert float(group_link(cluster, 3, 1)[0]) == 25e9
    assert float(group_link(cluster, 3, 1, world_size=6)[0]) == 300e9
    assert float(point_to_point_link(cluster, 1, 3, world_size=6)[0]) == 300e9
    assert group_link(cluster, 3, 1, np.array([6, 12]))[0].tolist() == [300e9, 25e9]
    assert point_to_point_link(cluster, 1, 3, np.array([6, 12]))[0].tolist() == [300e9, HALF_INSIDE]


@pytest.mark.parametrize(("ranks", "measured"), [(2, 23), (3, 45), (4, 86), (8, 135)])
def test_the_cube_mesh_of_a_dgx_1_against_measured_all_reduce(ranks, measured):
    """VIA-Research/vTrain, all-reduce of 1 GB on V100: bus bandwidth in GB/s."""
    bandwidth, _ = group_link(parse_cluster("8xV100-SXM2-32GB"), ranks, 1)
    assert float(bandwidth) / 1e9 == pytest.approx(measured, rel=0.15)


def test_columns_broadcast():
    cluster = toy([8, 64])
    bandwidth, latency = group_link(cluster, np.array([[2], [4]]), np.array([1, 8, 16]))
    assert bandwidth.shape == latency.shape == (2, 3)
    assert bandwidth.dtype == latency.dtype == np.float64


def test_extreme_sizes_stay_finite():
    bandwidth, latency = group_link(parse_cluster("125000x8xH100-SXM"), 10**6, 10**6)
    assert np.isfinite(bandwidth)
    assert np.isfinite(latency)


@pytest.mark.parametrize(
    ("distance", "size", "gigabytes"),
    [
        *[(1, 8, 300), (2, 4, 300), (1, 2, 300), (8, 2, 25), (8, 4, 25), (6, 2, 25), (5, 4, 25)],
        # a node holds two stages or more: one neighbour of a stage is inside
        *[(4, 4, HALF_INSIDE / 1e9), (2, 8, HALF_INSIDE / 1e9), (1, None, HALF_INSIDE / 1e9)],
    ],
)
def test_pipeline_neighbours(distance, size, gigabytes):
    bandwidth, latency = point_to_point_link(parse_cluster("4x8xA100-80GB"), distance, size)
    assert float(bandwidth) == pytest.approx(gigabytes * 1e9)
    assert float(latency) == (3.4e-6 if gigabytes == 300 else 14e-6)


def test_a_graph_of_131072_accelerators_adds_every_edge_once(monkeypatch):
    added, add_edge = [], networkx.Graph.add_edge

    def counted(graph, one, other, **attributes):
        added.append(one)
        add_edge(graph, one, other, **attributes)

    monkeypatch.setattr(networkx.Graph, "add_edge", counted)
    graph = link_graph(parse_cluster("16384x8xH100-SXM"))
    assert len(graph) == 131072 + 16384 + 1
    assert len(added) == len(graph) - 1
    assert networkx.is_tree(graph)


def test_a_million_rows_take_as_many_calls_as_ten(monkeypatch):
    calls, members = [], groups._members

    def counted(*arguments):
        calls.append(arguments)
        return members(*arguments)

    monkeypatch.setattr(groups, "_members", counted)
    cluster, size = parse_cluster("16384x8xH100-SXM"), 2 ** np.arange(10)
    few = group_link(cluster, size, 4)
    once = len(calls)
    many = group_link(cluster, np.tile(size, 100_000), 4)
    assert len(calls) == 2 * once
    for column, repeated in zip(few, many, strict=True):
        assert (repeated.reshape(-1, len(size)) == column).all()


# --- files ---

WORDS = [
    "8xA100-80GB",
    "16x8xH100-SXM",
    "2xgb200-nvl72",
    "2xMI300X-platform",
    "256xTPU-v5e",
    "1xT4",
]


def again(plain):
    return cluster_from_dict(json.loads(json.dumps(plain)), "plan.json: cluster")


@pytest.mark.parametrize("words", WORDS)
def test_round_trip_is_exact(words):
    cluster = parse_cluster(words)
    assert again(cluster_to_dict(cluster)) == cluster


@settings(max_examples=examples(30))
@given(value=st.floats(1e-6, 1e20), nodes=st.integers(1, 64))
def test_round_trip_of_any_figure(value, nodes):
    cluster = toy([8, 8 * (nodes + 1)])
    plain = cluster_to_dict(cluster)
    plain["tiers"][1]["bandwidth"]["value"] = value
    assert cluster_to_dict(again(plain)) == plain


def edited(path, value):
    plain = cluster_to_dict(parse_cluster("2x8xA100-80GB"))
    *parents, last = path
    inner = plain
    for key in parents:
        inner = inner[key]
    inner[last] = value
    return plain


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["num_nodes"], 0, "num_nodes = 0"),
        (["num_nodes"], 3, "domain sizes"),
        (["num_nodes"], 10**6, "num_nodes = 1000000"),
        (["gpus_per_node"], -8, "gpus_per_node = -8"),
        (["gpus_per_node"], "8", "gpus_per_node ="),
        (["nodes"], 2, "unknown key 'nodes'. Did you mean"),
        (["name"], None, "name is missing"),
        (["notes"], [3], "notes"),
        (["tiers"], [], "domain sizes"),
        (["tiers"], 3, "tiers = 3"),
        (["tiers", 0], 3, "tiers[0] = 3"),
        (["tiers", 0, "domain_size"], 16, "domain sizes"),
        (["tiers", 1, "domain_size"], 32, "domain sizes"),
        (["tiers", 0, "bandwidth"], 3e11, "bandwidth = 3"),
        (["tiers", 0, "bandwidth", "value"], 0, "value = 0"),
        (["tiers", 0, "bandwidth", "value"], -1, "value = -1"),
        (["tiers", 0, "bandwidth", "unit"], "GB/s", "unknown key 'unit'"),
        (["tiers", 0, "bandwith"], {}, "unknown key 'bandwith'"),
        (["tiers", 0, "latency", "value"], -1e-6, "value ="),
        (["accelerator"], "A100", "accelerator ="),
        (["accelerator", "device"], "asic", "device ="),
        (["accelerator", "memory_capacity", "value"], True, "value = true"),
        (["accelerator", "memory_capacity", "kind"], "rumour", "kind ="),
        (["accelerator", "memory_capacity", "source"], None, "source is missing"),
        (["accelerator", "peak_flops", "bf17"], {}, "unknown key 'bf17'"),
        (["accelerator", "peak_flops", "bf16", "value"], 1e40, "value = 1e+40"),
        (["accelerator", "aliases"], "A100", "aliases ="),
        (["accelerator", "colour"], "green", "unknown key 'colour'"),
    ],
)
def test_edited_values_are_checked(path, value, words):
    with pytest.raises(InputError) as error:
        cluster_from_dict(edited(path, value), "plan.json: cluster")
    assert words in str(error.value)
    assert "plan.json" in str(error.value)


def test_an_accelerator_without_peaks_is_refused():
    with pytest.raises(InputError, match="peak_flops"):
        cluster_from_dict(edited(["accelerator", "peak_flops"], {}), "plan.json")
