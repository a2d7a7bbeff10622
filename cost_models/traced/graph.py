"""A module of unknown layers as an acyclic graph: its blocks, and the tensors between them.

Nodes are the stretches of the forward pass in execution order: a block, or the operators between
two blocks. This order is topological, and a split between two nodes gives a first and a second
half. An edge is a tensor that one node makes and a later one reads; a tensor with several readers
crosses a split once.

A backward stretch of a block belongs to that block's node; one outside of blocks to the node before
the block of the latest backward pass (at first, to the last node). Units: seconds, bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cost_models.compute.rates import Rates
from cost_models.traced.module import BACKWARD, OUTSIDE, Pass, Segment, TracedModule
from cost_models.traced.time import pass_seconds

if TYPE_CHECKING:
    import networkx as nx  # heavy: imported where it is used

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ModuleNodes:
    """Time and memory of each node for micro-batches of some rows; arrays over the nodes."""

    names: tuple[str, ...]
    blocks: tuple[int, ...]  # position of the block, or OUTSIDE
    forward: Floats  # seconds
    backward: Floats  # seconds, recomputation included
    starts_forward: Floats  # host seconds to launch the operators
    starts_backward: Floats
    kept: Floats  # bytes saved for the backward pass
    working: Floats  # peak bytes beyond those saved by it and the nodes before it
    crossing: Floats  # bytes that cross the split before a node; and 0 after the last
    returning: Floats  # those of them with a gradient
    # parameters read: number, elements, whether trained
    parameters: tuple[tuple[tuple[int, int, bool], ...], ...]

    def __len__(self) -> int:
        return len(self.names)


def nodes_of(module: TracedModule, recompute: str, rows: int, rate: Rates) -> ModuleNodes:
    """Return the nodes of a module in execution order."""
    one = module.passes[recompute]
    stretches = [segment for segment in one.segments if segment.phase != BACKWARD]
    backward = backward_of(one)
    count = len(stretches)
    ends = [0.0, *(_at(segment.end, rows) for segment in stretches)]
    saved = np.minimum.accumulate(ends[::-1])[::-1]  # bytes that stay live afterwards
    working = np.zeros(count)
    times, starts = np.zeros((2, count)), np.zeros((2, count))
    for number, segment in enumerate(stretches):
        working[number] = _at(segment.kept, rows) - saved[number + 1]
        for way, parts in enumerate(([segment], [one.segments[p] for p in backward[number]])):
            for part in parts:
                times[way, number] += float(pass_seconds(part.operators, rows, rate))
                starts[way, number] += rate.operator * sum(part.operators.count)
                if way:
                    above = _at(part.kept, rows) - saved[number + 1]
                    working[number] = max(working[number], above)
    return ModuleNodes(
        names=tuple(_names(module, stretches)),
        blocks=tuple(segment.block for segment in stretches),
        forward=times[0],
        backward=times[1],
        starts_forward=starts[0],
        starts_backward=starts[1],
        kept=np.diff(saved),
        working=np.maximum(0.0, working),
        crossing=_crossing(one, count, rows, gradients=False),
        returning=_crossing(one, count, rows, gradients=True),
        parameters=tuple(segment.parameters for segment in stretches),
    )


def block_graph(module: TracedModule, recompute: str, rows: int, rate: Rates) -> nx.DiGraph[int]:
    """Return the nodes and the tensors between them as a networkx graph.

    Nodes have ``name``, ``forward``, ``backward`` (seconds), ``kept`` (bytes) and ``parameters``
    (elements), edges ``bytes``.
    """
    import networkx

    nodes = nodes_of(module, recompute, rows, rate)
    graph: nx.DiGraph[int] = networkx.DiGraph(name=module.name)
    for number, name in enumerate(nodes.names):
        graph.add_node(
            number,
            name=name,
            forward=float(nodes.forward[number]),
            backward=float(nodes.backward[number]),
            kept=float(nodes.kept[number]),
            parameters=sum(elements for _, elements, _ in nodes.parameters[number]),
        )
    for tensor in module.passes[recompute].handed:
        for reader in tensor.readers:
            sent = graph.get_edge_data(tensor.maker, reader, {"bytes": 0.0})["bytes"]
            graph.add_edge(tensor.maker, reader, bytes=sent + _at(tensor.size, rows))
    return graph


def backward_of(one: Pass) -> list[list[int]]:
    """Return the backward stretches of every node, as positions in the segments."""
    forward = [segment.block for segment in one.segments if segment.phase != BACKWARD]
    found: list[list[int]] = [[] for _ in forward]
    at = len(forward) - 1
    for position, segment in enumerate(one.segments):
        if segment.phase != BACKWARD:
            continue
        if segment.block != OUTSIDE:
            same = [n for n in range(at + 1) if forward[n] == segment.block]
            at = same[-1] if same else at
        elif at > 0 and forward[at] != OUTSIDE and found[at] and forward[at - 1] == OUTSIDE:
            at -= 1
        found[at].append(position)
    return found


def _crossing(one: Pass, count: int, rows: int, *, gradients: bool) -> Floats:
    """Return the bytes that cross the split before each node."""
    found = np.zeros(count + 1)
    for tensor in one.handed:
        if tensor.has_gradient or not gradients:
            found[tensor.maker + 1 : max(tensor.readers) + 1] += _at(tensor.size, rows)
    return found


def _names(module: TracedModule, stretches: list[Segment]) -> list[str]:
    last = len(stretches) - 1
    places = {0: "before the blocks", last: "after the blocks"}
    return [
        module.block_names[segment.block]
        if segment.block != OUTSIDE
        else places.get(number, "between blocks")
        for number, segment in enumerate(stretches)
    ]


def _at(lines: Any, rows: int) -> float:
    return float(lines.at(rows))
