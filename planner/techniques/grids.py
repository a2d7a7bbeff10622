"""Lines of 2D, 2.5D and 3D tensor parallelism, with data parallelism over the other ranks.

The whole model is priced on one accelerator; states, activations and computation are shared out as
the grid shares them, and the traffic of ``cost_models.techniques.tensor_grids`` is added, nothing
of it hidden. Left out: smaller matmuls are less efficient; norms and biases are not whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Final, NamedTuple

import numpy as np

from cost_models.communication.ring_and_tree import received_bytes, ring_all_reduce
from cost_models.communication.seconds import achieved_by
from cost_models.memory.outside_torch import outside_bytes
from cost_models.memory.parts import MemoryParts
from cost_models.model.spec import ModelSpec
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import PredictionTable, price
from cost_models.scenario import Scenario
from cost_models.techniques.tensor_grids import (
    GridCost,
    depth_gradients,
    tensor_2d,
    tensor_2p5d,
    tensor_3d,
)
from cost_models.uncertainty import peak_interval
from hardware_profiles.cluster.links.groups import group_link
from planner.assessment.verdict import budget_bytes, plan_verdict_spread, verdict
from planner.request.divisors import divisors
from planner.techniques.line import TechniqueLine


class Grid(NamedTuple):
    """Ranks that share one copy of the model's matrices."""

    side: int
    depth: int = 1  # squares of side x side
    cube: bool = False

    @property
    def ranks(self) -> int:
        """Ranks of a copy."""
        return self.side**3 if self.cube else self.side**2 * self.depth

    @property
    def weight_ranks(self) -> int:
        """Parts into which a matrix is cut."""
        return self.side**3 if self.cube else self.side**2

    @property
    def batch_parts(self) -> int:
        """Parts into which the sequences of a micro-batch are cut."""
        return self.side**2 if self.cube else self.side * self.depth

    @property
    def words(self) -> str:
        """The grid in words."""
        sides = [self.side] * (3 if self.cube else 2) + ([self.depth] if self.depth > 1 else [])
        return " x ".join(map(str, sides))

    def cost(self, tokens: float, features: int, outputs: int) -> GridCost:
        """Return the cost of one matrix."""
        sizes = tokens * features, 1.0 * features * outputs, tokens * outputs
        if self.cube:
            return tensor_3d(*sizes, self.side)
        if self.depth == 1:
            return tensor_2d(*sizes, self.side)
        return tensor_2p5d(*sizes, self.side, self.depth)


SIZES: Final = (1, 2, 4, 8)  # sequences of a micro-batch for each row, of a weight's every transfer
Kind = Callable[[int], Iterator[Grid]]  # from ranks to the grids that divide them


def squares(ranks: int) -> Iterator[Grid]:
    """Yield the squares of at least 2 x 2 whose ranks divide a number.

    >>> [grid.words for grid in squares(16)]
    ['2 x 2', '4 x 4']
    """
    yield from (Grid(side) for side in divisors(ranks) if side > 1 and ranks % side**2 == 0)


def boxes(ranks: int) -> Iterator[Grid]:
    """Yield the boxes, no deeper than their side, whose ranks divide a number.

    >>> [grid.words for grid in boxes(16)]
    ['2 x 2 x 2']
    """
    for square in squares(ranks):
        for depth in divisors(ranks // square.ranks):
            if 1 < depth <= square.side:
                yield square._replace(depth=depth)


def cubes(ranks: int) -> Iterator[Grid]:
    """Yield the cubes whose ranks divide a number.

    >>> [grid.words for grid in cubes(64)]
    ['2 x 2 x 2', '4 x 4 x 4']
    """
    sides = (side for side in divisors(ranks) if side > 1 and ranks % side**3 == 0)
    yield from (Grid(side, cube=True) for side in sides)


KINDS: Final[tuple[tuple[str, str, str, Kind], ...]] = (
    ("tensor_2d", "2D tensor", "q x q", squares),
    ("tensor_2p5d", "2.5D tensor", "q x q x d", boxes),
    ("tensor_3d", "3D tensor", "q x q x q", cubes),
)


def grid_lines(scenario: Scenario, micro_batch_size: int | None) -> list[TechniqueLine]:
    """Return the lines of 2D, 2.5D and 3D tensor parallelism.

    Of each the best grid: one that fits with the shortest step, else the smallest.
    """
    experts, lines = scenario.model.has_experts, []
    layouts = {
        name: [] if experts else _layouts(scenario, list(of(scenario.world_size)), micro_batch_size)
        for name, _, _, of in KINDS
    }
    plans = dict.fromkeys(plan for of_kind in layouts.values() for _, plan in of_kind)
    whole = _priced(scenario, list(plans))
    for name, title, shape, of in KINDS:
        if layouts[name]:
            every = [_line(scenario, *layout, whole, name, title) for layout in layouts[name]]
            lines.append(min(every, key=lambda line: line.order))
            continue
        why = "its formulas have no experts" if experts else _why_not(scenario, shape, of)
        lines.append(TechniqueLine(name, title, "compares", why_not=why))
    return lines


def _layouts(
    scenario: Scenario, grids: list[Grid], micro_batch_size: int | None
) -> list[tuple[Grid, Plan]]:
    """Return the possible layouts on some grids."""
    return [
        (grid, plan)
        for grid in grids
        for size in (SIZES if micro_batch_size is None else [micro_batch_size / grid.batch_parts])
        for recompute in ("none", "full")
        if (plan := _plan(scenario, grid, size, recompute)) is not None
    ]


def _why_not(scenario: Scenario, shape: str, of: Kind) -> str:
    """Return why no grid of a kind is possible."""
    grids = list(of(scenario.world_size))
    if not grids:
        return f"{shape} ranks in none of {scenario.world_size}"
    return (
        "no side q divides the heads, or no number of rows the batch "
        f"(a micro-batch of {_rows(grids)} sequences)"
    )


def _priced(scenario: Scenario, plans: list[Plan]) -> dict[Plan, PredictionTable]:
    """Return the prices of plans of whole models, those with as many ranks as one table."""
    found: dict[Plan, PredictionTable] = {}
    for copies in dict.fromkeys(plan.data_parallel for plan in plans):
        alike = [plan for plan in plans if plan.data_parallel == copies]
        alone = replace(scenario, num_ranks=copies, layer_ranges=None)
        table = price(alone, PlanTable.from_plans(alike))
        found |= {plan: table.row(number) for number, plan in enumerate(alike)}
    return found


def _rows(grids: list[Grid]) -> str:
    return ", ".join(str(number) for number in sorted({grid.batch_parts for grid in grids}))


def _plan(scenario: Scenario, grid: Grid, sequences: float, recompute: str) -> Plan | None:
    """Return the plan of one copy's whole model; None where batch or heads do not divide.

    Sequences stay whole, as attention needs them: ``sequences`` of a micro-batch for each row of
    the grid.
    """
    copies, batch = scenario.world_size // grid.ranks, scenario.workload.global_batch_size
    size = int(sequences * grid.batch_parts)
    heads = [kind.attention.num_heads for kind in scenario.model.kinds]
    if sequences % 1 or batch % (copies * size) or any(n % grid.side for n in heads):
        return None
    return Plan(
        data_parallel=copies,
        micro_batch_size=size,
        num_microbatches=batch // (copies * size),
        recompute=recompute,
    )


def _line(
    scenario: Scenario,
    grid: Grid,
    plan: Plan,
    priced: Mapping[Plan, PredictionTable],
    name: str,
    title: str,
) -> TechniqueLine:
    whole = priced[plan]
    peak = _peak(scenario, whole.memory, grid, plan)
    spread = plan_verdict_spread(scenario)
    low, high = peak_interval(peak, peak, spread)
    received, exposed = _traffic(scenario, grid, plan)
    return TechniqueLine(
        name,
        title,
        "compares",
        layout=f"grid {grid.words}, dp {plan.data_parallel}, micro-batch {plan.micro_batch_size}"
        + (", recompute full" if plan.recompute == "full" else ""),
        verdict=verdict(low, high, budget_bytes(scenario.cluster)),
        peak_bytes=peak,
        received_bytes=received,
        exposed_seconds=exposed,
        step_seconds=exposed + _computation(whole, grid),
        note="no communication is hidden; matmuls as efficient as whole ones",
    )


def _peak(scenario: Scenario, parts: MemoryParts, grid: Grid, plan: Plan) -> float:
    """Return the peak of a rank: states cut as matrices are, the rest over all ranks.

    Of CUDA and the allocator, the part outside torch is whole on every rank.
    """
    outside = outside_bytes(scenario.software, scenario.cluster, PlanTable.from_plans([plan]))
    states = parts.weights + parts.gradients + parts.optimizer
    others = parts.activations + parts.logits + parts.buffers + (parts.runtime - outside)
    return float(np.sum(states / grid.weight_ranks + others / grid.ranks + outside))


def _computation(whole: PredictionTable, grid: Grid) -> float:
    """Return the seconds of a step's computation on a rank."""
    time = whole.time
    shared = (time.compute + time.recompute) / grid.ranks
    return float(np.sum(shared + time.host + time.optimizer / grid.weight_ranks))


def _traffic(scenario: Scenario, grid: Grid, plan: Plan) -> tuple[float, float]:
    """Return bytes that a rank receives in a step, and their seconds: products, then gradients."""
    workload, reached = scenario.workload, achieved_by(scenario.software, scenario.cluster)
    element = workload.compute_bytes
    cost = products(scenario.model, grid, plan.micro_batch_size * workload.seq_len)
    repeats = plan.num_microbatches * _passes(plan, grid)
    strides = np.array([grid.side**axis for axis in range(3 if grid.cube else 2)])
    bandwidth, latency = group_link(reached, np.full(len(strides), grid.side), strides)
    seconds = float(cost.seconds(element, float(bandwidth.min()), float(latency.max()))) * repeats
    received = float(cost.received) * element * repeats
    held = scenario.model.num_parameters / grid.weight_ranks * workload.reduction_bytes
    copies = plan.data_parallel
    sums = [(copies, grid.ranks)] + ([(grid.depth, grid.side**2)] if grid.depth > 1 else [])
    for size, stride in sums:
        band, wait = group_link(reached, np.array([size]), np.array([stride]))
        seconds += float(ring_all_reduce(held, size, float(band[0]), float(wait[0])))
    received += float(received_bytes("all_reduce", held, copies))
    elements = float(depth_gradients(scenario.model.num_parameters, grid.side, grid.depth))
    return received + elements * workload.reduction_bytes, seconds


def _passes(plan: Plan, grid: Grid) -> float:
    """Return the traffic of all passes over that of a forward and a backward pass."""
    forward = 1.0 / 2.0 if grid.cube else 1.0 / 3.0
    return 1.0 + (forward if plan.recompute == "full" else 0.0)


def products(model: ModelSpec, grid: Grid, tokens: int) -> GridCost:
    """Return the cost of all matrices of a model, the head's included, for some tokens."""
    shapes: dict[tuple[int, int], int] = {}
    for number in model.pattern:
        for weight in model.kinds[number].weights:
            if weight.role == "linear" and len(weight.shape) == 2:
                rows, columns = weight.shape
                shape = (rows, columns) if weight.transposed else (columns, rows)
                shapes[shape] = shapes.get(shape, 0) + 1
    if model.head_multiply:
        shape = (model.hidden_size, model.head_multiply // model.hidden_size)
        shapes[shape] = shapes.get(shape, 0) + 1
    costs = (
        _times(grid.cost(1.0 * tokens, features, outputs), number)
        for (features, outputs), number in shapes.items()
    )
    return reduce(add, costs)


def _times(cost: GridCost, number: int) -> GridCost:
    return GridCost(*(number * getattr(cost, name) for name in GridCost.__struct_fields__))
