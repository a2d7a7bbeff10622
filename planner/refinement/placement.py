"""Placement of ranks on accelerators whose links form an irregular tree.

A plan that is slower than another one with rank i on accelerator i (the default order) may be
faster in an order of its own, so that plan and order are searched together:

    1. every plan is bounded by its step on links that are no slower than in any order
       (``links.tree.ANY_ORDER``): the search itself runs with these links, and returns the plans
       whose bounds beat the best step known;
    2. of their grids of ranks, the lowest bound first: the orders that may win
       (``rank_orders``); all plans of the grid are priced in each, and simulated in the order of
       their closed form;
    3. stages of their own are chosen anew in each of these orders, where bounds on the step with
       any stages in any order allow that they win.

Exact up to ``rank_orders.EXACT`` accelerators. On more, a few grids are tried, each in the best
order that is found for its first plan. On a regular tree the default order is optimal:
tensor-parallel ranks, which communicate the most, are the nearest neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.columnar.projections import distinct_rows
from cost_models.communication.seconds import achieved_by
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.pricing.simulated_steps import above, simulated_steps
from cost_models.pricing.table import table_steps
from cost_models.scenario import Scenario
from hardware_profiles.cluster.links.tree import ANY_ORDER, tree_of
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.fields import names_in
from hardware_profiles.progress import report, tracked
from planner.refinement.best_partition import StagedPlan, all_stage_candidates, stages_below
from planner.refinement.placed_plan import (
    PlacedPlan,
    grid_of,
    groups_of,
    ordered_step,
    places_of,
    rank_groups,
    with_order,
)
from planner.refinement.rank_orders import (
    EXACT,
    BestOrder,
    Groups,
    Order,
    best_order,
    orders_that_may_win,
)
from planner.refinement.stage_bounds import least_steps
from planner.request.constraints import Constraint
from planner.request.divisors import divisors
from planner.request.objectives import pareto_front
from planner.request.options.choices import Recomputed

Floats = NDArray[np.float64]
FIRST: Final = 40  # plans of the first search with bounds; the following ones find more
MORE: Final = 8  # times as many
MOST: Final = 2_560
FINALISTS: Final = 10  # grids of ranks that are placed on up to SMALL accelerators; FEW on more
FEW: Final = 2
SMALL: Final = 64
GAIN: Final = 1e-3  # smallest gain, as a share of the step, that is worth another order
# parts of a plan that determine the groups of every axis
GRID: Final = names_in("""
    pipeline_parallel dp_replicate data_parallel context_parallel tensor_parallel expert_parallel
    expert_tensor_parallel secondary_ranks
""")


class Fastest(Protocol):
    """Plans that fit, the fastest first, with the seconds of their steps."""

    @property
    def plans(self) -> Sequence[Plan]:
        """The plans."""
        ...

    @property
    def seconds(self) -> Sequence[float]:
        """Of a step of each plan."""
        ...


Known: TypeAlias = tuple[float, float, Plan]  # seconds of a step, peak bytes, plan
# of a scenario, at most so many plans with steps below a limit in seconds
Search: TypeAlias = Callable[[Scenario, int, float], Fastest]


def can_be_placed(cluster: Cluster) -> bool:
    """Whether to search for an order of ranks: on irregular trees of GPUs without a given one."""
    gpus = cluster.accelerator.device != "cpu"
    return bool(cluster.levels) and cluster.rank_order is None and gpus


def has_exact_orders(cluster: Cluster) -> bool:
    """Whether all orders of the ranks can be compared, on an irregular tree of GPUs."""
    return can_be_placed(cluster) and cluster.num_gpus <= EXACT


def best_placed(
    scenario: Scenario,
    plans: Sequence[Plan],
    staged: StagedPlan | None,
    search: Search,
    candidates: PlanTable | None = None,
    *,
    recomputed: Recomputed = "by_stage",
    require: Sequence[Constraint] = (),
) -> PlacedPlan | None:
    """Return the plan with the best order of ranks; None without a gain.

    ``plans``: ranked in the default order; ``staged``: the best plan with uneven stages, if there
    is one. ``candidates``: plans whose stages may be chosen; ``recomputed``,
    ``require``: as in ``best_staged``.
    """
    if not plans or not can_be_placed(scenario.cluster):
        return None
    usual = ordered_step(scenario, plans[0], None)
    if staged is not None:
        usual = min(usual, ordered_step(staged.scenario(scenario), staged.plan, None))
    report("placing ranks on accelerators")
    placement = _Placement(scenario, usual * (1.0 - GAIN), recomputed, require)
    if staged is not None:
        placement.place_staged(staged)
    placement.place_even(search)
    if candidates is not None:
        table = all_stage_candidates(plans, candidates, recomputed=recomputed)
        placement.choose_stages(table)
    if placement.best is None:
        return None
    plan, ordered = placement.best
    rank = next((place for place, other in enumerate(plans) if other == plan), None)
    places = tuple(places_of(ordered, plan))
    return PlacedPlan(rank, plan, ordered, placement.limit, usual, placement.proven, places)


def placed_front(
    scenario: Scenario,
    usual: Fastest,
    fixed: Mapping[str, Any],
    search_front: Callable[[Scenario, Sequence[Known], Constraint], Fastest],
) -> list[PlacedPlan]:
    """Return the plans with orders of their own that belong to the front of step and peak.

    ``usual``: the front of the default order, the fastest first; ``fixed``: pinned parts of plans;
    ``search_front``: of a scenario with an order, those of some grids that known plans
    do not beat. Empty beyond EXACT accelerators. Every order that may win for some grids has a
    front of their plans; the best of all of them are the front in any order.
    """
    if not has_exact_orders(scenario.cluster) or not usual.plans:
        return []
    grids = _grids_of_orders(scenario, fixed)
    ordered = [scenario, *(with_order(scenario, one) for one in grids)]
    wanted = [None, *map(_HasGrid.of, grids.values())]
    pairs = list(zip(ordered, wanted, strict=True))
    steps, peaks = np.zeros(0), np.zeros(0)
    rows: list[tuple[int, Plan]] = []
    for place, (one, limits) in enumerate(tracked(pairs, "order {number} of {total}")):
        best = [(steps[row], peaks[row], rows[row][1]) for row in pareto_front(steps, peaks)]
        front = usual if limits is None else search_front(one, best, limits)
        if front.plans:
            steps = np.concatenate([steps, front.seconds])
            own = price(scenario, PlanTable.from_plans(list(front.plans))).peak
            peaks, rows = np.concatenate([peaks, own]), [*rows, *((place, p) for p in front.plans)]
    number = len(usual.plans)
    found = []
    for row in pareto_front(steps, peaks):
        place, plan = rows[row]
        before = np.min(steps[:number][peaks[:number] <= peaks[row]], initial=np.inf)
        if place and steps[row] < before * (1.0 - GAIN):
            places = tuple(places_of(ordered[place], plan))
            step, least = float(steps[row]), float(min(before, ordered_step(scenario, plan, None)))
            found.append(PlacedPlan(None, plan, ordered[place], step, least, True, places))
    return found


def _grids_of_orders(
    scenario: Scenario, fixed: Mapping[str, Any]
) -> dict[Order, frozenset[tuple[int, ...]]]:
    """Return the orders, but for the default one, and the grids for which each may win.

    Grids of all ranks: the values of GRID, without the secondary copies.
    """
    count, experts = scenario.cluster.num_gpus, scenario.model.has_experts
    tree = tree_of(achieved_by(scenario.software, scenario.cluster))
    known: dict[frozenset[Groups], list[Order]] = {}
    found: dict[Order, set[tuple[int, ...]]] = {}
    for pipeline, replicas, shards, context, tensor in _factors(count, 5):
        ranks = replicas * shards * context
        for expert, cut, copies in itertools.product(
            divisors(ranks) if experts else (1,), (True, False), divisors(shards)
        ):
            plan = Plan(
                data_parallel=replicas * shards,
                dp_replicate=replicas,
                pipeline_parallel=pipeline,
                context_parallel=context,
                tensor_parallel=tensor,
                expert_parallel=expert,
                expert_tensor_parallel=cut,
                secondary_ranks=copies,
            )
            grid = tuple(int(getattr(plan, name)) for name in GRID)
            if all(value == fixed.get(name, value) for name, value in zip(GRID, grid, strict=True)):
                groups = rank_groups(plan)
                if frozenset(groups) not in known:
                    known[frozenset(groups)] = orders_that_may_win(tree, groups, count)
                for order in known[frozenset(groups)]:
                    found.setdefault(order, set()).add(grid[:-1])
    usual = tuple(range(count))
    return {order: frozenset(grids) for order, grids in found.items() if order != usual}


class _HasGrid(Constraint, frozen=True):
    """That the ranks of a plan form one of some grids."""

    grids: frozenset[tuple[int, ...]] = frozenset()

    @classmethod
    def of(cls, grids: frozenset[tuple[int, ...]]) -> _HasGrid:
        """Return the constraint; grids as in ``_grids_of_orders``."""
        return cls("grid of ranks", "==", True, "grid of ranks", grids)

    def column(self, table: PlanTable) -> Any:
        """Return whether each plan has one of the grids."""
        number, first = distinct_rows(*(getattr(table, name) for name in GRID[:-1]))
        return np.array([_grid(table, row)[:-1] in self.grids for row in first.tolist()])[number]


def _factors(count: int, number: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a count as a product of a number of factors.

    >>> list(_factors(2, 2))
    [(1, 2), (2, 1)]
    """
    if number == 1:
        yield (count,)
        return
    for first in divisors(count):
        for rest in _factors(count // first, number - 1):
            yield (first, *rest)


class _Placement(Struct):
    """The best plan in an order of its own, and the step in seconds that others have to beat."""

    scenario: Scenario
    limit: float
    recomputed: Recomputed
    require: Sequence[Constraint]
    best: tuple[Plan, Scenario] | None = None
    proven: bool = True
    orders: dict[tuple[int, ...], list[Order]] = {}  # by grid

    @property
    def _bounds(self) -> Scenario:
        """The scenario with links that are no slower than in any order."""
        return with_order(self.scenario, ANY_ORDER)

    def place_even(self, search: Search) -> None:
        """Try all plans of the search whose bounds are below the limit."""
        done: set[Plan] = set()
        number = FIRST
        while True:
            found = search(self._bounds, number, self.limit)
            plans, bounds = found.plans, found.seconds
            new = [row for row, plan in enumerate(plans) if plan not in done]
            done |= set(plans)
            some = PlanTable.from_plans([plans[row] for row in new])
            for rows in self._by_grid(some, np.array(bounds)[new]):
                self._place_grid(some.rows(rows))
            if len(plans) < number or bounds[-1] >= self.limit:
                return
            if number >= MOST or not self._is_exact:
                self.proven = False
                return
            number *= MORE

    def choose_stages(self, candidates: PlanTable) -> None:
        """Choose stages in the orders of all grids with bounds below the limit."""
        bounds = least_steps(self._bounds, candidates, recomputed=self.recomputed)
        rows = np.flatnonzero(bounds < self.limit)
        candidates, bounds = candidates.rows(rows), bounds[rows]
        for rows in self._by_grid(candidates, bounds):
            some = candidates.rows(rows)
            for order in self._orders(some.plan(0)):
                ordered = with_order(self.scenario, order)
                found, proven = stages_below(
                    ordered, some, self.limit, recomputed=self.recomputed, require=self.require
                )
                self.proven = self.proven and proven
                if found is not None:
                    self._keep(found.plan, found.scenario(ordered), found.step)

    def place_staged(self, staged: StagedPlan) -> None:
        """Try a plan with stages of its own."""
        own = staged.scenario(self.scenario)
        for order in self._orders(staged.plan):
            self._keep(staged.plan, with_order(own, order), ordered_step(own, staged.plan, order))

    @property
    def _is_exact(self) -> bool:
        return self.scenario.cluster.num_gpus <= EXACT

    def _by_grid(self, table: PlanTable, bounds: Floats) -> Iterator[NDArray[np.intp]]:
        """Yield the rows of each grid with bounds below the limit, the lowest first."""
        grids: dict[tuple[int, ...], list[int]] = {}
        for row in np.argsort(bounds, kind="stable").tolist():
            grids.setdefault(_grid(table, row), []).append(row)
        most = FINALISTS if self.scenario.cluster.num_gpus <= SMALL else FEW
        for tried, rows in enumerate(grids.values()):
            if bounds[rows[0]] >= self.limit:
                return
            if tried >= most and not self._is_exact:
                self.proven = False
                return
            left = np.array(rows, dtype=np.intp)
            yield left[bounds[left] < self.limit]

    def _place_grid(self, table: PlanTable) -> None:
        """Simulate plans of one grid in all of its orders, by their steps in closed form."""
        orders = self._orders(table.plan(0))
        ordered = [with_order(self.scenario, order) for order in orders]
        steps = np.array([table_steps(one, table) for one in ordered]).reshape(-1, len(table))
        for place in np.argsort(steps, axis=None, kind="stable").tolist():
            number, row = divmod(place, len(table))
            step = steps[number, row]
            if step >= self.limit:
                return
            if table.pipeline_parallel[row] > 1:
                found = simulated_steps(ordered[number], table.rows(np.array([row])))
                step = above(steps[number, row : row + 1], found)[0]
            self._keep(table.plan(row), ordered[number], float(step))

    def _orders(self, plan: Plan) -> list[Order]:
        """Return the orders in which the plans of a grid are tried."""
        key = _grid(PlanTable.from_plans([plan]), 0)
        if key not in self.orders:
            found: list[Order] = []
            if groups_of(plan):
                if self._is_exact:
                    tree = tree_of(achieved_by(self.scenario.software, self.scenario.cluster))
                    found = orders_that_may_win(tree, rank_groups(plan), plan.world_size)
                else:
                    found, self.proven = [place(self.scenario, plan).order], False
            self.orders[key] = [one for one in found if one != tuple(range(plan.world_size))]
        return self.orders[key]

    def _keep(self, plan: Plan, ordered: Scenario, step: float) -> None:
        if step < self.limit:
            self.best, self.limit = (plan, ordered), step


def _grid(table: PlanTable, row: int) -> tuple[int, ...]:
    return tuple(int(getattr(table, name)[row]) for name in GRID)


def place(scenario: Scenario, plan: Plan) -> BestOrder:
    """Return the order of ranks with the shortest simulated step of a plan."""
    return best_order(
        tree_of(achieved_by(scenario.software, scenario.cluster)),
        rank_groups(plan),
        grid_of(plan),
        lambda order: ordered_step(scenario, plan, order),
    )
