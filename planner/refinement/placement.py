"""Placement of ranks on accelerators whose links form an irregular tree.

The search prices plans with rank i on accelerator i (the default order). For the best plan of each
of the first grids of ranks, ``rank_orders`` finds the order with the shortest simulated step; the
plan with the shortest step of all is returned. On a regular tree the default order is optimal:
tensor-parallel ranks, which communicate the most, are the nearest neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from cost_models.communication.seconds import achieved, axis_groups
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price, rank_communication
from cost_models.pricing.simulated_steps import with_simulated_steps
from cost_models.scenario import Scenario
from hardware_profiles.cluster.link_tree import neighbour_link, ring_link, tree_of
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.progress import report, tracked
from planner.refinement.best_partition import StagedPlan
from planner.refinement.rank_orders import BestOrder, Groups, Order, best_order

WIDE: Final = 40  # plans of the search from which the plans to place are taken
FINALISTS: Final = 10  # plans that are placed on up to SMALL accelerators; FEW on more
FEW: Final = 2
SMALL: Final = 64
GAIN: Final = 1e-3  # smallest gain, as a share of the step, that is worth another order


@dataclass(frozen=True, slots=True)
class AxisPlace:
    """Links and traffic of the groups of one axis."""

    axis: str
    size: int  # ranks of a group
    sent: float  # bytes of one rank in one step, counted as whole tensors
    level: str
    bandwidth: float  # bytes/s of the slowest group, one way
    usual_level: str  # in the default order
    usual_bandwidth: float

    @property
    def moved(self) -> bool:
        """Whether the groups use other links than in the default order."""
        return (self.level, self.bandwidth) != (self.usual_level, self.usual_bandwidth)


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """A plan with its own order of ranks."""

    rank: int | None  # position among the plans of the search, from 0; None: not among them
    plan: Plan
    scenario: Scenario  # with the order of ranks and the plan's own stages
    step: float  # simulated seconds
    usual_step: float  # simulated seconds of the best plan in the default order
    proven: bool  # whether all orders were compared
    places: tuple[AxisPlace, ...]  # most bytes first

    @property
    def order(self) -> Order:
        """The accelerator of each rank."""
        order = self.scenario.cluster.rank_order
        assert order is not None
        return order

    @property
    def gain(self) -> float:
        """Share of the step time that is saved."""
        return 1.0 - self.step / self.usual_step

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "rank": self.rank,
            "plan": self.plan.to_dict(),
            "rank_order": list(self.order),
            "step_seconds": self.step,
            "usual_step_seconds": self.usual_step,
            "gain": self.gain,
            "proven": self.proven,
            "axes": [
                {
                    "axis": place.axis,
                    "ranks": place.size,
                    "bytes": place.sent,
                    "level": place.level,
                    "bandwidth": place.bandwidth,
                    "usual_level": place.usual_level,
                    "usual_bandwidth": place.usual_bandwidth,
                }
                for place in self.places
            ],
        }


def can_be_placed(cluster: Cluster) -> bool:
    """Whether to search for an order of ranks: on irregular trees of GPUs without a given one."""
    gpus = cluster.accelerator.device != "cpu"
    return bool(cluster.levels) and cluster.rank_order is None and gpus


def best_placed(
    scenario: Scenario, plans: Sequence[Plan], staged: StagedPlan | None
) -> PlacedPlan | None:
    """Return the plan with the best order of ranks; None without a gain.

    ``plans``: ranked in the default order; the first plan of each grid is placed.
    ``staged``: the best plan with uneven stages, if there is one.
    """
    if not plans or not can_be_placed(scenario.cluster):
        return None
    grids: dict[tuple[int, ...], tuple[int, Plan, Scenario]] = {}
    for rank, plan in enumerate(plans):
        grids.setdefault((*grid_of(plan), plan.expert_parallel), (rank, plan, scenario))
    most = FINALISTS if scenario.cluster.num_gpus <= SMALL else FEW
    choices: list[tuple[int | None, Plan, Scenario]] = [*list(grids.values())[:most]]
    if staged is not None:
        choices.insert(0, (staged.rank, staged.plan, staged.scenario(scenario)))
    usual = ordered_step(choices[0][2], choices[0][1], None)
    report("placing ranks on accelerators")
    each = tracked(choices, "placing ranks of plan {number} of {total}")
    placed = [_placed(rank, plan, own, usual) for rank, plan, own in each]
    found = [one for one in placed if one is not None and one.gain > GAIN]
    return min(found, key=lambda one: one.step, default=None)


def place(scenario: Scenario, plan: Plan) -> BestOrder:
    """Return the order of ranks with the shortest simulated step of a plan."""
    software = scenario.software
    reached = achieved(
        scenario.cluster,
        software.communication.bus_efficiency,
        software.communication.network_efficiency,
    )
    groups = [
        Groups(size, stride, axis != "pipeline") for axis, (size, stride) in groups_of(plan).items()
    ]
    return best_order(
        tree_of(reached), groups, grid_of(plan), lambda order: ordered_step(scenario, plan, order)
    )


def grid_of(plan: Plan) -> tuple[int, ...]:
    """Return the number of ranks along each axis, innermost last."""
    return (
        plan.pipeline_parallel,
        plan.dp_replicate,
        plan.dp_shard,
        plan.context_parallel,
        plan.tensor_parallel,
    )


def ordered_step(scenario: Scenario, plan: Plan, order: Order | None) -> float:
    """Return the simulated step of a plan with an order of ranks, in seconds."""
    ordered = replace(scenario, cluster=replace(scenario.cluster, rank_order=order))
    table = PlanTable.from_plans([plan])
    priced = with_simulated_steps(ordered, table, price(ordered, table))
    return float(priced.step[0])


def groups_of(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return size and stride of the groups of every axis whose links depend on the order."""
    layout = axis_groups(PlanTable.from_plans([plan]))
    silent = () if plan.experts_apart else ("expert", "expert_data")
    pairs = {
        axis: (int(np.ravel(size)[0]), int(np.ravel(stride)[0]))
        for axis, (size, stride) in layout.items()
        if axis not in silent
    }
    # a ring of all ranks uses the same links in every order
    most = {"pipeline": plan.world_size}
    return {
        axis: pair
        for axis, pair in pairs.items()
        if 1 < pair[0] <= most.get(axis, plan.world_size - 1)
    }


def _placed(rank: int | None, plan: Plan, scenario: Scenario, usual: float) -> PlacedPlan | None:
    if len(groups_of(plan)) == 0:
        return None
    found = place(scenario, plan)
    if found.order == tuple(range(plan.world_size)):
        return None
    ordered = replace(scenario, cluster=replace(scenario.cluster, rank_order=found.order))
    places = tuple(_places(ordered, plan))
    return PlacedPlan(rank, plan, ordered, found.cost, usual, found.proven, places)


def _places(scenario: Scenario, plan: Plan) -> list[AxisPlace]:
    """Return links and traffic of every axis, in the plan's order and in the default order."""
    by_rank = rank_communication(scenario, plan, default_layer_ranges(scenario, plan))
    usual = replace(scenario.cluster, rank_order=None)
    places = []
    for axis, (size, stride) in groups_of(plan).items():
        sent = max(
            sum(float(np.ravel(t.size)[0]) for (a, _), t in traffic.items() if a == axis)
            for traffic in by_rank
        )
        if sent > 0.0:
            sides = [_link(cluster, axis, size, stride) for cluster in (scenario.cluster, usual)]
            places.append(AxisPlace(axis, size, sent, *sides[0], *sides[1]))
    return sorted(places, key=lambda one: -one.sent)


def _link(cluster: Cluster, axis: str, size: int, stride: int) -> tuple[str, float]:
    link = neighbour_link if axis == "pipeline" else ring_link
    found = link(cluster, size, stride, cluster.num_gpus)
    return cluster.levels[found.level].name, found.bandwidth
