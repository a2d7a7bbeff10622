"""A plan with an order of ranks: its step, and the links and traffic of every axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import Struct, field

from cost_models.communication.seconds import axis_groups
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price, rank_communication
from cost_models.pricing.simulated_steps import with_simulated_steps
from cost_models.scenario import Scenario
from hardware_profiles.cluster.links.tree import neighbour_link, ring_link
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.record import Record, to_json
from planner.refinement.rank_orders import Groups, Order


class AxisPlace(Record, frozen=True):
    """Links and traffic of the groups of one axis."""

    axis: str
    size: int = field(name="ranks")  # of a group
    sent: float = field(name="bytes")  # of one rank in one step, counted as whole tensors
    level: str
    bandwidth: float  # bytes/s of the slowest group, one way
    usual_level: str  # in the default order
    usual_bandwidth: float

    @property
    def moved(self) -> bool:
        """Whether the groups use other links than in the default order."""
        return (self.level, self.bandwidth) != (self.usual_level, self.usual_bandwidth)


class PlacedPlan(Struct, frozen=True):
    """A plan with its own order of ranks."""

    rank: int | None  # position among the plans of the search, from 0; None: not among them
    plan: Plan
    scenario: Scenario  # with the order of ranks and the plan's own stages
    step: float  # simulated seconds
    usual_step: float  # simulated seconds of the best plan in the default order
    proven: bool  # whether no plan is faster in any order
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
            "axes": to_json(self.places),
        }


def with_order(scenario: Scenario, order: Order | None) -> Scenario:
    """Return a scenario with an order of ranks; None: the default order."""
    return replace(scenario, cluster=replace(scenario.cluster, rank_order=order))


def ordered_step(scenario: Scenario, plan: Plan, order: Order | None) -> float:
    """Return the simulated step of a plan with an order of ranks, in seconds."""
    ordered = with_order(scenario, order)
    table = PlanTable.from_plans([plan])
    priced = with_simulated_steps(ordered, table, price(ordered, table))
    return float(priced.step[0])


def grid_of(plan: Plan) -> tuple[int, ...]:
    """Return the number of ranks along each axis, innermost last."""
    return (
        plan.pipeline_parallel,
        plan.dp_replicate,
        plan.dp_shard,
        plan.context_parallel,
        plan.tensor_parallel,
    )


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


def rank_groups(plan: Plan) -> list[Groups]:
    """Return the groups of every axis whose links depend on the order."""
    return [
        Groups(size, stride, axis != "pipeline", axis in ("expert", "context"))
        for axis, (size, stride) in groups_of(plan).items()
    ]


def places_of(scenario: Scenario, plan: Plan) -> list[AxisPlace]:
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
