"""The plan with the best stages of its own, among all that can be the fastest.

The search prices even stages with the same number of recomputed layers each. Stages of their own
gain most where that fits badly, so the best plan with even stages need not be the best of all.
``best_staged`` takes plans in the order of a lower bound of their step with any stages, until the
bound is no better than the best step found:

    1. the bound in closed form, for all candidates at once (``table_balanced_steps``; for several
       stages on a rank, whose layers stay as they are, the passes without recomputation, and the
       communication that full recomputation cannot hide);
    2. for a group of plans at a time, the fewest recomputed layers with which each possible stage
       fits, and their seconds;
    3. for each plan of the group, the best stages (``stage_search``, ``minimal_recompute``).

The result is exact for these prices unless one of the limits below ends the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from cost_models.legality.rules import legality_codes
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import OFFLOADS, SCHEDULES, Plan, PlanTable
from cost_models.plan.recompute import FULL, NONE, SELECTIVE
from cost_models.pricing.table import (
    BalancedSteps,
    table_balanced_steps,
    table_least_steps,
)
from cost_models.scenario import Scenario
from cost_models.step_time.pipeline_bound import longest_stage
from hardware_profiles.progress import stages, tracked
from planner.refinement.minimal_recompute import least_recompute
from planner.refinement.stage_costs import (
    StageContents,
    StageCosts,
    price_stages,
    simulated_step,
    with_stages,
)
from planner.refinement.stage_search import (
    ONE_STAGE_A_RANK,
    Ranges,
    best_stages,
)
from planner.request.command import describe_plan
from planner.request.constraints import Constraint, broken_by_plan
from planner.request.stage_layers import layers_option, stage_recompute_options

BOUNDS: Final = (1.0, 2.0)  # seconds, relative: stages with other layers, with their own
RECOMPUTED: Final = 0.1  # seconds of a plan whose recomputed layers are chosen; its stages: 1
FIRST: Final = 16  # plans priced together until a good step is known; then the others
PRICES: Final = (8.0, 1.0)  # seconds, relative: prices of the stages of plans, their choice
AT_ONCE: Final = 250  # plans whose stages are priced together, before the others have to beat them
MOST_PLANS: Final = 1500  # whose stages are priced
Rows = NDArray[np.intp]
GAIN: Final = 1e-3  # smallest gain, as a share of the step, that is worth uneven stages
RECOMPUTES: Final = (FULL, SELECTIVE)  # settings whose numbers of layers are chosen
UNEVEN: Final = [SCHEDULES.index(schedule) for schedule in ONE_STAGE_A_RANK]


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """A plan with its own stages and numbers of recomputed layers."""

    rank: int | None  # position among the plans of the search, from 0; None: not among them
    plan: Plan
    layer_ranges: Ranges
    by_stage: tuple[int, ...] | None  # recomputed layers of each stage; None: as in the plan
    step: float  # simulated seconds
    even_step: float  # simulated seconds of the best plan with even stages
    proven: bool  # whether no other plan with stages of its own has a shorter step

    @property
    def gain(self) -> float:
        """Share of the step time that is saved."""
        return 1.0 - self.step / self.even_step

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return tuple(last - first for first, last in self.layer_ranges)

    @property
    def stage_options(self) -> str:
        """The options of the stages."""
        options = [layers_option(self.layer_ranges)] if len(self.layers) > 1 else []
        return " ".join([*options, *stage_recompute_options(self.by_stage)])

    @property
    def options(self) -> str:
        """The options of the plan and of its stages."""
        return f"{describe_plan(self.plan)} {self.stage_options}".strip()

    def scenario(self, scenario: Scenario) -> Scenario:
        """Return a scenario with these stages."""
        return with_stages(scenario, self.layer_ranges, self.by_stage)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "rank": self.rank,
            "plan": self.plan.to_dict(),
            "layers": list(self.layers),
            "recompute_layers": None if self.by_stage is None else list(self.by_stage),
            "step_seconds": self.step,
            "even_step_seconds": self.even_step,
            "gain": self.gain,
            "proven": self.proven,
        }


def best_staged(
    scenario: Scenario,
    plans: Sequence[Plan],
    candidates: PlanTable | None,
    fastest: float = np.inf,
    *,
    by_stage: bool = True,
    require: Sequence[Constraint] = (),
) -> StagedPlan | None:
    """Return the plan with the shortest step with stages of its own; None without a gain.

    ``plans``: the best with even stages, best first; ``candidates``: legal plans whose stages may
    be chosen, if any; ``fastest``: seconds that a step has to beat, besides that of the first plan.
    ``by_stage``: each stage may recompute a number of layers of its own; otherwise all, none, or as
    many as in ``plans``. ``require``: constraints on parts of the plan.
    """
    if not plans or candidates is None or not scenario.on_gpu:
        return None
    even = simulated_step(scenario, plans[0], default_layer_ranges(scenario, plans[0]))
    limit = min(even, fastest) * (1.0 - GAIN)
    table = all_stage_candidates(plans, candidates, by_stage=by_stage)
    found, _ = stages_below(scenario, table, limit, by_stage=by_stage, require=require)
    if found is None:
        return None
    ranks = [row for row, other in enumerate(plans) if _family(other) == _family(found.plan)]
    return replace(found, rank=ranks[0] if ranks else None, even_step=even)


def all_stage_candidates(
    plans: Sequence[Plan], candidates: PlanTable, *, by_stage: bool = True
) -> PlanTable:
    """Return the plans of ``best_staged`` among which stages are chosen."""
    found = PlanTable.from_plans(list(plans))  # other numbers of virtual stages, too
    names = [column.name for column in fields(PlanTable)]
    both = {n: np.concatenate([getattr(candidates, n), getattr(found, n)]) for n in names}
    return stage_candidates(PlanTable(**both), by_stage=by_stage)


def stages_below(
    scenario: Scenario,
    candidates: PlanTable,
    limit: float,
    *,
    by_stage: bool = True,
    require: Sequence[Constraint] = (),
) -> tuple[StagedPlan | None, bool]:
    """Return the shortest step below a limit in seconds, and whether it is proven to be that."""
    search = _Search(scenario, limit, by_stage, require)
    search.run(candidates)
    if search.best is None:
        return None, search.proven
    found = StagedPlan(None, *search.best, search.limit, limit, search.proven)
    return found, search.proven


def chooses_layers(table: PlanTable) -> NDArray[np.bool_]:
    """Return which plans have one stage on each of several ranks, whose layers are chosen."""
    one_stage = np.isin(table.pipeline_schedule, UNEVEN) & (table.virtual_stages == 1)
    found: NDArray[np.bool_] = one_stage & (table.pipeline_parallel > 1)
    return found


def stage_candidates(table: PlanTable, *, by_stage: bool = True) -> PlanTable:
    """Return the plans among which stages are chosen, each once.

    A plan that recomputes layers can also recompute none of them, so that the same plan without
    recomputation is left out, unless all stages recompute the same (``by_stage``). Plans with
    several stages on a rank keep their layers.
    """
    usual = (table.recompute_every == 0) & (table.offload == OFFLOADS.index("none"))
    if not by_stage:
        return _once(table.rows(np.flatnonzero(usual & chooses_layers(table))))
    usual = usual & np.isin(table.recompute, [*RECOMPUTES, NONE])
    table = table.rows(np.flatnonzero(usual & (chooses_layers(table) | (table.recompute != NONE))))
    table = replace(table, recompute_layers=np.zeros_like(table.recompute_layers))
    names = [column.name for column in fields(PlanTable) if column.name != "recompute"]
    columns = np.stack([getattr(table, name).astype(np.int64) for name in names])
    _, family = np.unique(columns, axis=1, return_inverse=True)
    family = family.ravel()
    _, first = np.unique(np.stack([family, table.recompute]), axis=1, return_index=True)
    with_full = np.isin(family[first], family[table.recompute == FULL])
    return table.rows(np.sort(first[~(with_full & (table.recompute[first] == NONE))]))


def _once(table: PlanTable) -> PlanTable:
    names = [column.name for column in fields(PlanTable)]
    columns = np.stack([getattr(table, name).astype(np.int64) for name in names])
    return table.rows(np.sort(np.unique(columns, axis=1, return_index=True)[1]))


def stage_bounds(scenario: Scenario, table: PlanTable, *, by_stage: bool = True) -> BalancedSteps:
    """Return lower bounds of plans with any stages and recomputed layers.

    ``by_stage``: otherwise plans that recompute all layers do so in every stage. Plans with several
    stages on a rank keep their layers; only their steps are bounded: with the
    passes without recomputation, and the communication that recomputation of all layers leaves
    exposed.
    """
    part = by_stage | (table.recompute_layers > 0)
    without = replace(
        table,
        recompute=np.where(part, NONE, table.recompute).astype(table.recompute.dtype),
        recompute_layers=np.zeros_like(table.recompute_layers),
    )
    bounds = BalancedSteps(*(np.zeros(len(table)) for _ in range(3)))
    uneven = chooses_layers(table)
    with stages(*BOUNDS, joint=True) as begin:
        begin("bounding the steps of all stages")
        rows = np.flatnonzero(uneven)
        found = table_balanced_steps(scenario, without.rows(rows))
        for bound, values in zip(astuple(bounds), astuple(found), strict=True):
            bound[rows] = values
        begin()
        rows = np.flatnonzero(~uneven)
        bounds.step[rows] = table_least_steps(scenario, table.rows(rows))
    return bounds


def _family(plan: Plan) -> Plan:
    return replace(plan, recompute="none", recompute_layers=0)


@dataclass
class _Search:
    """The best stages found, and the step in seconds that others have to beat."""

    scenario: Scenario
    limit: float
    by_stage: bool = True
    require: Sequence[Constraint] = ()
    best: tuple[Plan, Ranges, tuple[int, ...] | None] | None = None
    proven: bool = True
    contents: dict[int, StageContents] = field(default_factory=dict)  # by pipeline_parallel

    def run(self, candidates: PlanTable) -> None:
        """Refine candidates in the order of their bounds."""
        bounds = stage_bounds(self.scenario, candidates, by_stage=self.by_stage)
        uneven = chooses_layers(candidates)
        order = np.argsort(bounds.step, kind="stable")
        order = order[bounds.step[order] < self.limit]
        parts = order[:FIRST], order[FIRST:MOST_PLANS]
        numbers = [(np.sum(uneven[rows]), np.sum(~uneven[rows])) for rows in parts]
        sizes = [each for n, others in numbers for each in (float(n), RECOMPUTED * others)]
        with stages(*sizes, joint=True) as begin:
            for rows in parts:
                rows = rows[bounds.step[rows] < self.limit]
                begin(f"choosing stages of {len(rows):,} plans")
                self._choose_stages(candidates, bounds, rows[uneven[rows]])
                others = rows[~uneven[rows]].tolist()
                begin(f"choosing recomputed layers of {len(others):,} plans")
                self._choose_recomputed([candidates.plan(row) for row in others])
        left = order[MOST_PLANS:]
        self.proven = self.proven and not np.any(bounds.step[left] < self.limit)

    def _choose_stages(self, table: PlanTable, bounds: BalancedSteps, rows: Rows) -> None:
        """Try plans with one stage on each rank, AT_ONCE at a time."""
        for some in tracked(np.array_split(rows, max(1, -(-len(rows) // AT_ONCE)))):
            self._choose_some_stages(table, bounds, some[bounds.step[some] < self.limit])

    def _choose_some_stages(self, table: PlanTable, bounds: BalancedSteps, rows: Rows) -> None:
        costs = []
        for row in rows.tolist():
            plan, few = table.plan(row), table.rows(np.array([row]))
            depth = plan.pipeline_parallel
            contents = StageContents(self.scenario.model, depth)
            contents = self.contents.setdefault(depth, contents)
            most = self.limit - bounds.once[row]
            longest = longest_stage(few, bounds.whole[row : row + 1], most)[:, 0].tolist()
            costs.append(
                StageCosts(self.scenario, plan, contents, self.limit, longest, self.by_stage)
            )
        with stages(*PRICES) as begin:
            begin(f"pricing the stages of {len(costs):,} plans")
            price_stages(costs)
            begin(f"choosing stages of {len(costs):,} plans")
            for one in tracked(costs):
                one.limit = self.limit
                found, proven = best_stages(one)
                self.proven = self.proven and proven
                if found is not None:
                    self._keep(one.plan, found.layer_ranges, found.recomputed, found.step)

    def _choose_recomputed(self, plans: Sequence[Plan]) -> None:
        """Try plans whose layers stay as they are."""
        ranges = [default_layer_ranges(self.scenario, plan) for plan in plans]
        pairs = list(zip(plans, ranges, strict=True))
        for one in sorted(
            least_recompute(self.scenario, pairs, self.limit), key=lambda one: one.step_bound
        ):
            if one.step_bound >= self.limit:
                break
            recomputed = one.by_stage(self.scenario)
            if recomputed is not None:
                step = simulated_step(self.scenario, one.plan, one.ranges, recomputed)
                self._keep(one.plan, one.ranges, recomputed, step)

    def _keep(
        self, plan: Plan, ranges: Sequence[tuple[int, int]], recomputed: Sequence[int], step: float
    ) -> None:
        """Keep a plan with its stages if it is legal and the best so far."""
        by_stage: tuple[int, ...] | None = tuple(recomputed)
        if not self.by_stage:
            by_stage = None
        elif not any(recomputed):
            plan, by_stage = replace(plan, recompute="none"), None
        elif by_stage == tuple(last - first for first, last in ranges):
            by_stage = None
        staged = with_stages(self.scenario, ranges, by_stage)
        table = PlanTable.from_plans([plan])
        wanted = not legality_codes(staged, table)[0] and not broken_by_plan(self.require, table)[0]
        if wanted and step < self.limit:
            self.best, self.limit = (plan, tuple(ranges), by_stage), step
