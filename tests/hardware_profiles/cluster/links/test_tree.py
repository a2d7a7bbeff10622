"""Links on irregular trees and for ranks in any order, against a walk over the networkx graph."""

import itertools
import math
import statistics
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise

import networkx
import numpy as np
import pytest

from cost_models.communication.seconds import achieved
from hardware_profiles.cluster.build import describe
from hardware_profiles.cluster.cluster_file import with_levels
from hardware_profiles.cluster.cluster_json import cluster_from_dict, cluster_to_dict
from hardware_profiles.cluster.irregular_tree import levels_of_graph
from hardware_profiles.cluster.links.groups import (
    group_link,
    link_graph,
    mean_hop_latency,
    point_to_point_link,
)
from hardware_profiles.cluster.links.nvlink_domains import domains_spanned, exchange_bandwidth
from hardware_profiles.cluster.links.tree import groups_of, levels_of_tiers
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.schema import Figure, Level
from hardware_profiles.cluster.subset import part_of
from hardware_profiles.errors import InputError

TWO_RACKS = """
nodes = 5
gpus_per_node = 2
accelerator = "H100-SXM-80GB"

[[level]]
name = "NVLink4"
each = 2
per_accelerator = 400e9
latency = 3e-6

[[level]]
name = "rack switch"
each = [3, 2]
per_accelerator = 50e9
latency = 10e-6

[[level]]
name = "uplink"
each = 2
bandwidth = [60e9, 40e9]
latency = 15e-6
"""


def figure(value):
    return Figure(value, "assumed", "test")


@pytest.fixture
def racks(tmp_path):
    path = tmp_path / "racks.toml"
    path.write_text(TWO_RACKS)
    return parse_cluster(str(path))


def tree_cluster(levels):
    """Return a cluster of single nodes below some levels."""
    one = parse_cluster("1x8xL40S")
    return with_levels(replace(one, gpus_per_node=len(levels[0].above)), tuple(levels))


def random_levels(rng, num_gpus):
    """Return a random tree; some levels are lanes, some links have figures of their own."""
    levels, below = [], num_gpus
    while below > 1:
        switches = int(rng.integers(1, below)) if len(levels) < 3 else 1
        above = np.concatenate([np.arange(switches), rng.integers(0, switches, below - switches)])
        above = rng.permutation(above) if rng.random() < 0.5 else np.sort(above)
        count = below if rng.random() < 0.5 else 1
        widths = tuple(figure(float(w)) for w in rng.integers(10, 400, count) * 1e9)
        times = tuple(figure(float(t)) for t in rng.integers(1, 30, count) * 1e-6)
        lanes = bool(rng.random() < 0.3)
        levels.append(Level(f"level {len(levels)}", tuple(above.tolist()), widths, times, lanes))
        below = switches
    return levels


def slowest_on_graph(cluster, groups, *, ring):
    """Return bandwidth, latency and mean hop of groups that all talk at once, path by path."""
    graph = link_graph(cluster)
    names = ["accelerator", *(level.name for level in cluster.levels)]
    height = {name: number for number, name in enumerate(names)}
    walk = networkx.dfs_preorder_nodes(graph, (names[-1], 0))
    order = [node[1] for node in walk if node[0] == "accelerator"]
    lanes = {level.name: level.per_accelerator for level in cluster.levels}
    used, paths = Counter(), []
    for group in groups:
        members = sorted(group, key=order.index) if ring else list(group)
        for one, other in zip(members, [*members[1:], members[0]], strict=True):
            path = networkx.shortest_path(graph, ("accelerator", one), ("accelerator", other))
            paths.append((members, list(pairwise(path))))
            used.update(pairwise(path))
    hops, latencies = [], []
    for members, path in paths:
        late, bandwidth = 0.0, math.inf
        for near, far in path:
            edge = graph.edges[near, far]
            share = edge["bandwidth"] / used[near, far]
            lower, upper = sorted((near, far), key=lambda node: height[node[0]])
            if lanes[upper[0]]:
                below = networkx.node_connected_component(
                    networkx.restricted_view(graph, [], [(near, far)]), lower
                )
                inside = sum(("accelerator", rank) in below for rank in members) if ring else 1
                lane = edge["bandwidth"] / graph.nodes[lower]["accelerators"]
                share = min(share, inside * lane)
            bandwidth = min(bandwidth, share)
            late = max(late, edge["latency"])
        latencies.append(late)
        hops.append(bandwidth)
    size = len(groups[0])
    bandwidth = min(hops)
    if not ring:  # half of a rank's messages go either way
        pairs = [
            (hops[i + j], hops[i + j - 1 if j else i + size - 1])
            for i in range(0, len(hops), size)
            for j in range(size)
        ]
        bandwidth = min(statistics.harmonic_mean(pair) for pair in pairs)
    means = [np.mean(latencies[i : i + size]) for i in range(0, len(latencies), size)]
    return bandwidth, max(latencies), max(means)


def exchange_on_graph(cluster, groups):
    """Return W of an exchange within each of the groups at once, pair by pair over the graph."""
    graph = link_graph(cluster)
    names = ["accelerator", *(level.name for level in cluster.levels)]
    lanes = {level.name for level in cluster.levels if level.per_accelerator}
    used, sent = Counter(), Counter()
    for group in groups:
        for one, other in itertools.permutations(group, 2):
            path = networkx.shortest_path(graph, ("accelerator", one), ("accelerator", other))
            used.update(pairwise(path))
            sent.update((one, edge) for edge in pairwise(path))
    others = len(groups[0]) - 1
    shares = [graph.edges[edge]["bandwidth"] * others / pairs for edge, pairs in used.items()]
    for (_, (near, far)), pairs in sent.items():
        lower, upper = sorted((near, far), key=lambda node: names.index(node[0]))
        if near == lower and upper[0] in lanes:
            lane = graph.edges[near, far]["bandwidth"] / graph.nodes[lower]["accelerators"]
            shares.append(lane * others / pairs)
    return min(shares)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(60))
def test_links_of_groups_equal_a_walk_over_the_graph(seed):
    rng = np.random.default_rng(seed)
    num_gpus = int(rng.choice([4, 6, 8]))
    cluster = tree_cluster(random_levels(rng, num_gpus))
    if rng.random() < 0.7:
        cluster = replace(cluster, rank_order=tuple(rng.permutation(num_gpus).tolist()))
    shapes = [
        (size, stride)
        for size in range(2, num_gpus + 1)
        for stride in range(1, num_gpus + 1)
        if num_gpus % (size * stride) == 0
    ]
    order = cluster.rank_order or range(num_gpus)
    for size, stride in shapes:
        groups = groups_of(order, size, stride).tolist()
        bandwidth, latency, hop = slowest_on_graph(cluster, groups, ring=True)
        found = group_link(cluster, size, stride)
        assert [float(value) for value in found] == pytest.approx([bandwidth, latency])
        assert float(mean_hop_latency(cluster, size, stride)) == pytest.approx(hop)
        exchanged = float(exchange_bandwidth(cluster, size, stride))
        assert exchanged == pytest.approx(exchange_on_graph(cluster, groups))
        bandwidth, latency, _ = slowest_on_graph(cluster, groups, ring=False)
        found = point_to_point_link(cluster, stride, size)
        assert [float(value) for value in found] == pytest.approx([bandwidth, latency])


FORMULAS = {
    "ring": group_link,
    "hop": mean_hop_latency,
    "neighbours": lambda cluster, size, stride: point_to_point_link(cluster, stride, size),
    "exchange": exchange_bandwidth,
    "an exchange once a domain": partial(exchange_bandwidth, copies=8, groups=(8, 4), share=0.75),
    "domains": domains_spanned,
}


@pytest.mark.parametrize(
    "name",
    [
        *("8xA100-80GB", "4x8xH100-SXM", "8x4xA100-80GB", "4xMI300X", "2x8xMI300X", "4x1xL40S"),
        *("3x6xH100-SXM", "5x4xL4", "6x8xA100-80GB"),
    ],
)
def test_places_of_equal_accelerators_have_the_same_links(name):
    """Nodes and accelerators change places; a torn order, and levels, have links of their own."""
    cluster = parse_cluster(name)
    total, each = cluster.num_gpus, cluster.gpus_per_node
    nodes = np.arange(total).reshape(-1, each)
    moved = replace(cluster, rank_order=tuple(nodes[::-1, ::-1].ravel().tolist()))
    levels = replace(cluster, levels=levels_of_tiers(cluster.tiers, total))
    shapes = [
        (size, stride)
        for size in range(2, total + 1)
        for stride in range(1, total // size + 1)
        if total % (size * stride) == 0
    ]
    differs = False
    for (size, stride), (what, formula) in itertools.product(shapes, FORMULAS.items()):
        expected, span = np.ravel(formula(cluster, size, stride)), size * stride
        assert np.ravel(formula(moved, size, stride)).tolist() == expected.tolist(), what
        even = max(each, stride) % min(each, stride) == 0 == max(each, span) % min(each, span)
        if even and cluster.tiers[0].peer_bandwidth is None:
            assert np.ravel(formula(levels, size, stride)) == pytest.approx(expected), what
        if cluster.num_nodes > 1 and each > 1:
            torn = replace(cluster, rank_order=tuple(nodes.T.ravel().tolist()))
            differs |= bool((np.ravel(formula(torn, size, stride)) != expected).any())
    assert differs == (cluster.num_nodes > 1 and each > 1)


def test_columns_of_groups_are_priced_one_by_one(racks):
    sizes, strides = np.array([2, 5, 2, 10]), np.array([1, 2, 5, 1])
    bandwidth, latency = group_link(racks, sizes, strides)
    for row in range(4):
        alone = group_link(racks, int(sizes[row]), int(strides[row]))
        assert (bandwidth[row], latency[row]) == (float(alone[0]), float(alone[1]))


def test_no_groups_have_no_links(racks):
    none = np.zeros(0, dtype=int)
    assert [column.size for column in group_link(racks, none, none)] == [0, 0]
    assert exchange_bandwidth(racks, none, none).size == 0


def test_two_racks_share_the_oversubscribed_uplink(racks):
    # pairs inside nodes; two rings of five over the slower uplink of 40 GB/s
    assert float(group_link(racks, 2, 1)[0]) == 400e9
    assert float(group_link(racks, 5, 2)[0]) == 20e9
    # ranks that follow the racks: the ring of the first three nodes' halves needs no uplink
    assert "2 rack switches of 2 to 3 (50 GB/s for each accelerator)" in describe(racks)
    assert [(t.domain_size, t.bandwidth.value) for t in racks.tiers] == [
        (2, 400e9),
        (4, 50e9),
        (10, 10e9),  # 60 GB/s for six, 40 GB/s for four
    ]


def test_a_permuted_order_moves_groups_to_other_links():
    cluster = parse_cluster("2x4xA100-80GB")
    torn = replace(cluster, rank_order=(0, 4, 1, 5, 2, 6, 3, 7))
    assert float(group_link(cluster, 2, 1)[0]) == 300e9
    assert float(group_link(torn, 2, 1)[0]) == 25e9
    assert float(group_link(torn, 4, 2)[0]) == 300e9
    sizes, strides = np.array([2, 4, 8]), np.array([1, 2, 1])
    assert domains_spanned(cluster, sizes, strides).tolist() == [1.0, 2.0, 2.0]
    assert domains_spanned(torn, sizes, strides).tolist() == [2.0, 1.0, 2.0]
    exchanged = exchange_bandwidth(torn, sizes, strides).tolist()
    assert exchanged == [25e9, 300e9, pytest.approx(25e9 * 7 / 4)]


def test_a_file_may_say_the_order_of_ranks(tmp_path):
    path = tmp_path / "torn.toml"
    head = "nodes = 2\ngpus_per_node = 2\n"
    path.write_text(head + 'accelerator = "H100-SXM-80GB"\nrank_order = [0, 2, 1, 3]\n')
    torn = parse_cluster(str(path))
    assert torn.rank_order == (0, 2, 1, 3)
    assert group_link(torn, 2, 1)[0] < group_link(torn, 2, 2)[0]


def test_levels_survive_plan_json_and_the_graph(racks):
    plain = cluster_to_dict(racks)
    assert "rank_order" not in plain
    assert cluster_from_dict(plain, "plan.json") == racks
    regular = cluster_to_dict(parse_cluster("8xA100-80GB"))
    assert "levels" not in regular
    graph = link_graph(racks)
    assert networkx.is_tree(graph)
    again = levels_of_graph(graph)
    assert [level.above for level in again] == [level.above for level in racks.levels]
    values = [[figure.value for figure in level.bandwidth] for level in again]
    assert values == [[400e9] * 10, [100e9] * 5, [60e9, 40e9]]


def test_a_graph_of_unequal_depth_has_links_over_several_levels():
    graph = networkx.Graph()
    for rank, switch in ((0, "a"), (1, "a"), (2, "top"), (3, "top")):
        graph.add_edge(("accelerator", rank), switch, bandwidth=10e9 * (rank + 1))
    graph.add_edge("a", "top", bandwidth=5e9)
    cluster = tree_cluster(levels_of_graph(graph))
    assert float(group_link(cluster, 2, 1)[0]) == 10e9  # 0 and 1; 2 and 3 have more
    assert float(group_link(cluster, 2, 2)[0]) == 2.5e9  # both pairs share the link of a


def test_a_part_keeps_its_links(racks):
    part = part_of(racks, 6)
    assert [level.above for level in part.levels] == [(0, 0, 1, 1, 2, 2), (0, 0, 0)]
    assert float(group_link(part, 3, 2)[0]) == 50e9
    assert part.tiers[-1].domain_size == 6


def test_trainers_reach_a_share_of_every_link(racks):
    slower = achieved(racks, 0.5, 0.9)
    assert [level.bandwidth[0].value for level in slower.levels] == [200e9, 45e9, 54e9]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("each = [3, 2]", "each = [3, 3]", "that add up to 5"),
        ("each = [3, 2]", "each = 2", "a divisor of the 5"),
        ("each = [3, 2]", "above = [0, 0, 2, 2, 2]", "without gaps"),
        ("each = [3, 2]", "above = [0, 0, 1]", "3 links, but 5"),
        ("each = 2\nbandwidth", "each = 1\nbandwidth", "has 2 switches"),
        ("[60e9, 40e9]", "[60e9, 40e9, 1e9]", "bandwidth has 3 figures"),
        ("[60e9, 40e9]", "0", "bandwidth = 0"),
        ("bandwidth = [60e9, 40e9]", "", "bandwidth (of a link) or per_accelerator"),
        ('"uplink"', '"rack switch"', "two levels have the name 'rack switch'"),
        ('[[level]]\nname = "NV', '[network]\nbandwidth = 1e9\n[[level]]\nname = "NV', "[network]"),
        ("nodes = 5", "nodes = 5\nrank_order = [0, 1, 2]", "every accelerator from 0 to 9 once"),
        ("latency = 3e-6", "latencies = 3e-6", "unknown key 'latencies'"),
    ],
)
def test_bad_levels_are_named(tmp_path, old, new, words):
    path = tmp_path / "racks.toml"
    assert old in TWO_RACKS
    path.write_text(TWO_RACKS.replace(old, new))
    with pytest.raises(InputError) as raised:
        parse_cluster(str(path))
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "edges",
    [
        [(("accelerator", 0), "a"), (("accelerator", 2), "a")],  # no 1
        [(("accelerator", 0), ("accelerator", 1))],
        [(("accelerator", 0), "a"), (("accelerator", 1), "a"), ("a", "b")],
    ],
)
def test_bad_graphs_are_refused(edges):
    graph = networkx.Graph(edges)
    networkx.set_edge_attributes(graph, 1e9, "bandwidth")
    with pytest.raises(InputError):
        levels_of_graph(graph)
