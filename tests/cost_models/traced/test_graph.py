"""The graph of a traced module's blocks, by hand and against real traces."""

import networkx
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cost_models.compute.rates import rates
from cost_models.traced.graph import backward_of, block_graph, nodes_of
from cost_models.traced.module import OUTSIDE, TracedModule, traced_module
from cost_models.traced.time import pass_seconds
from executor.trace.trace import trace
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.software.trainer import software_profile
from tests.traced_sample import sample

RATE = rates(parse_cluster("8xA100-80GB").accelerator, "fp32", software_profile("shardplan"))


class Skipping(nn.Module):
    """Four blocks; what the stem makes is read again behind them; a table stands at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16)) for _ in "1234"
        )

    def forward(self, x: Tensor) -> Tensor:
        first = h = self.table(x)
        for block in self.blocks:
            h = block(h).relu_()
        return (h + first) @ self.table.weight.T


def skipping() -> nn.Module:
    return Skipping()


skipping.example_inputs = lambda rows: {"x": torch.zeros(rows, 3, dtype=torch.int64)}  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def traced() -> TracedModule:
    return traced_module(trace(f"module:{__name__}:skipping"))


def test_nodes_by_hand() -> None:
    nodes = nodes_of(sample(), "none", 10, RATE)
    assert nodes.names == ("before the blocks", "b.0", "b.1", "after the blocks")
    assert nodes.blocks == (OUTSIDE, 0, 1, OUTSIDE)
    assert backward_of(sample().passes["none"]) == [[6], [5], [4], []]
    assert nodes.kept.tolist() == [100.0, 500.0, 500.0, 100.0]
    assert nodes.crossing.tolist() == [0.0, 160.0, 160.0 + 160.0, 160.0 + 80.0, 0.0]
    assert nodes.returning.tolist() == [0.0, 160.0, 320.0, 160.0, 0.0]
    assert nodes.starts_forward.tolist() == [0.0, RATE.operator, RATE.operator, 0.0]
    assert nodes.starts_backward.tolist() == [0.0, 2 * RATE.operator, 2 * RATE.operator, 0.0]
    one = (
        1000.0 / RATE.matmul if 1000.0 / RATE.matmul > 400.0 / RATE.memory else 400.0 / RATE.memory
    )
    assert nodes.forward == pytest.approx([0.0, one, one, 0.0])
    assert nodes.backward == pytest.approx([0.0, 2 * one, 2 * one, 0.0])


def test_a_graph_of_blocks_has_no_cycles_and_says_what_is_handed_on(traced: TracedModule) -> None:
    graph = block_graph(traced, "none", 5, RATE)
    assert networkx.is_directed_acyclic_graph(graph)
    assert list(networkx.topological_sort(graph)) == sorted(graph)
    names = [graph.nodes[node]["name"] for node in sorted(graph)]
    assert [name for name in names if name.startswith("blocks")] == [
        f"blocks.{n}" for n in range(4)
    ]
    hidden = 5 * 3 * 16 * 4.0
    last = max(graph)
    assert graph.edges[0, last]["bytes"] == hidden  # the skip
    chain = [edge for edge in graph.edges if edge[1] == edge[0] + 1]
    assert len(chain) == last
    assert all(graph.edges[edge]["bytes"] == hidden for edge in chain)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_nodes_add_up_to_the_whole_module(traced: TracedModule, recompute: str) -> None:
    nodes, one = nodes_of(traced, recompute, 7, RATE), traced.passes[recompute]
    assert nodes.forward.sum() == pytest.approx(float(pass_seconds(one.forward, 7, RATE)))
    assert nodes.backward.sum() == pytest.approx(float(pass_seconds(one.backward, 7, RATE)))
    used = {number: size for part in nodes.parameters for number, size, _ in part}
    assert sum(used.values()) == traced.num_parameters
    # the table is read by the first node and by the last one
    assert [n for n, part in enumerate(nodes.parameters) if 0 in {p for p, *_ in part}] == [
        0,
        len(nodes) - 1,
    ]
    # both halves of a cut in the middle: the hidden state and the skip
    middle = nodes.names.index("blocks.2")
    assert nodes.crossing[middle] == 2 * 7 * 3 * 16 * 4.0
    assert np.all(nodes.kept >= 0.0)


def test_what_is_changed_in_place_comes_from_where_it_was_changed(traced: TracedModule) -> None:
    """``relu_`` writes into a block's output: what the next one reads comes from between them."""
    handed = [(tensor.maker, tensor.readers) for tensor in traced.passes["none"].handed]
    names = nodes_of(traced, "none", 2, RATE).names
    one, two = names.index("blocks.0"), names.index("blocks.1")
    assert (one, (one + 1,)) in handed
    assert (one + 1, (two,)) in handed
    assert not any(maker == one and two in readers for maker, readers in handed)
