"""The plan with the best stages of its own, among all that can be the fastest.

The search prices even stages with the same number of recomputed layers each. Stages of their own
gain most where that fits badly, so the best plan with even stages need not be the best of all.
``best_staged`` takes plans in the order of a lower bound of their step with any stages, until the
bound is no better than the best step found:

    1. the bound in closed form, for all candidates at once (``table_balanced_steps``; for several
       stages on a rank with the layers of the search, the passes without recomputation, and the
       communication that full recomputation cannot hide);
    2. for a group of plans at a time, the fewest recomputed layers with which each possible stage
       fits, and their seconds;
    3. for each plan of the group, the best stages (``stage_search``, ``minimal_recompute``).

Where all layers are of one kind, the price of several stages on a rank depends on their layers
together, and those are chosen like the layers of one stage; of more than MOST_PLANS such plans
whose states fit, only for those that the search found. For layers of several kinds they stay as
they are.

The result is exact for these prices unless one of the limits below ends the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from cost_models.arrays import ascending
from cost_models.legality.rules import legality_codes
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.table import BalancedSteps, table_least_states, table_memory
from cost_models.scenario import Scenario
from cost_models.step_time.pipeline_bound import longest_stage
from hardware_profiles.progress import stages, tracked
from planner.assessment.verdict import near_budget
from planner.refinement.minimal_recompute import least_recompute
from planner.refinement.rank_prices import max_peak
from planner.refinement.stage_bounds import (
    MANY,
    balanced_bounds,
    chooses_layers,
    is_looped,
    looped_bounds,
    stage_bounds,
    stage_candidates,
)
from planner.refinement.stage_contents import StageContents
from planner.refinement.stage_costs import StageCosts, price_stages, simulated_step, with_stages
from planner.refinement.stage_search import (
    MOST_NODES,
    MOST_SIMULATED,
    SAME,
    Ranges,
    StageSplit,
    best_stages,
)
from planner.request.command import describe_plan
from planner.request.constraints import Constraint, broken_by_plan, most_memory
from planner.request.options.choices import Recomputed
from planner.request.stage_layers import layers_option, stage_recompute_options

RECOMPUTED: Final = 0.1  # seconds of a plan whose recomputed layers are chosen; its stages: 1
FIRST: Final = 16  # plans priced together until a good step is known; then the others
PRICES: Final = (8.0, 1.0)  # seconds, relative: prices of the stages of plans, their choice
AT_ONCE: Final = 750  # plans whose stages are priced together, before the others have to beat them
MOST_PLANS: Final = 1500  # whose stages are priced
Rows = NDArray[np.intp]
MANY_LOOPED: Final = 512  # plans with several stages on a rank, beyond which states bound memory
FEW: Final = 10_000  # candidates that a search has priced
FEWEST_NODES: Final = 40  # of the search for the stages of one of many plans
FEWEST_SIMULATED: Final = 2
GAIN: Final = 1e-3  # smallest gain, as a share of the step, that is worth uneven stages


class StagedPlan(Struct, frozen=True):
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
    recomputed: Recomputed = "by_stage",
    require: Sequence[Constraint] = (),
) -> StagedPlan | None:
    """Return the plan with the shortest step with stages of its own; None without a gain.

    ``plans``: the best with even stages, best first; ``candidates``: legal plans whose stages may
    be chosen, if any; ``fastest``: seconds that a step has to beat, besides that of the first plan.
    ``recomputed``: whether each stage may recompute a number of layers of its own, all stages the
    same number, or all, none, or as many as in ``plans``. ``require``: constraints on parts of the
    plan and on its peak.
    """
    if not plans or candidates is None or not scenario.on_gpu:
        return None
    even = simulated_step(scenario, plans[0], default_layer_ranges(scenario, plans[0]))
    limit = min(even, fastest) * (1.0 - GAIN)
    table = all_stage_candidates(plans, candidates, recomputed=recomputed)
    found, _ = stages_below(
        scenario, table, limit, recomputed=recomputed, require=require, first=plans
    )
    if found is None:
        return None
    ranks = [row for row, other in enumerate(plans) if _family(other) == _family(found.plan)]
    return structs.replace(found, rank=ranks[0] if ranks else None, even_step=even)


def all_stage_candidates(
    plans: Sequence[Plan], candidates: PlanTable, *, recomputed: Recomputed = "by_stage"
) -> PlanTable:
    """Return the plans of ``best_staged`` among which stages are chosen."""
    found = PlanTable.from_plans(list(plans))  # other numbers of virtual stages, too
    names = [column.name for column in fields(PlanTable)]
    both = {n: np.concatenate([getattr(candidates, n), getattr(found, n)]) for n in names}
    return stage_candidates(PlanTable(**both), recomputed=recomputed)


def stages_below(
    scenario: Scenario,
    candidates: PlanTable,
    limit: float,
    *,
    recomputed: Recomputed = "by_stage",
    require: Sequence[Constraint] = (),
    first: Sequence[Plan] = (),
) -> tuple[StagedPlan | None, bool]:
    """Return the shortest step below a limit in seconds, and whether it is proven to be that.

    ``first``: plans whose layers are chosen, where those with several stages on a rank are many.
    """
    search = _Search(scenario, limit, recomputed, require, first)
    search.run(candidates)
    if search.best is None:
        return None, search.proven
    found = StagedPlan(None, *search.best, search.limit, limit, search.proven)
    return found, search.proven


def _family(plan: Plan) -> Plan:
    return replace(plan, recompute="none", recompute_layers=0)


@dataclass
class _Search:
    """The best stages found, and the step in seconds that others have to beat."""

    scenario: Scenario
    limit: float
    recomputed: Recomputed = "by_stage"
    require: Sequence[Constraint] = ()
    first: Sequence[Plan] = ()  # with several stages on a rank, alone if all are too many
    best: tuple[Plan, Ranges, tuple[int, ...] | None] | None = None
    proven: bool = True
    share: int = 1  # plans that share the nodes and simulations of one

    def run(self, candidates: PlanTable) -> None:
        """Refine candidates in the order of their bounds."""
        bounds, kept = stage_bounds(
            self.scenario, candidates, self.limit, recomputed=self.recomputed
        )
        uneven = chooses_layers(candidates)
        order = np.argsort(kept, kind="stable")
        tried = (kept < self.limit) & (uneven | (self.recomputed == "by_stage"))
        order = self._near(candidates, order[tried[order]], MOST_PLANS)
        parts = order[:FIRST], order[FIRST:MOST_PLANS]
        numbers = [(np.sum(uneven[rows]), np.sum(~uneven[rows])) for rows in parts]
        sizes = [each for n, others in numbers for each in (float(n), RECOMPUTED * others)]
        with stages(*sizes, joint=True) as begin:
            for rows in parts:
                rows = rows[kept[rows] < self.limit]
                begin(f"choosing stages of {len(rows):,} plans")
                self._choose_stages(candidates, bounds, rows[uneven[rows]])
                others = rows[~uneven[rows]].tolist()
                begin(f"choosing recomputed layers of {len(others):,} plans")
                self._choose_recomputed([candidates.plan(row) for row in others])
        left = order[MOST_PLANS:]
        self.proven = self.proven and not np.any(kept[left] < self.limit)
        self._choose_looped(candidates, bounds)

    def _near(self, table: PlanTable, rows: Rows, most: int) -> Rows:
        """Return the rows that may fit with stages of their own; more than ``most`` may be a part.

        Those whose peak with even stages is near the budget. Of few plans, a search has left
        out all others.
        """
        if len(table) <= FEW:
            return rows
        budget, found = near_budget(self.scenario.cluster), [rows[:0]]
        for some in np.array_split(rows, -(-len(rows) // FEW) or 1):
            few = table.rows(some)
            uncut = few.num_stages > self.scenario.model.num_layers  # priced with own stages alone
            even = np.flatnonzero(~uncut)
            peak, _ = table_memory(self.scenario, few.rows(even), budget)
            uncut[even] = peak <= budget
            found.append(some[uncut])
            if sum(map(len, found)) > most:
                break
        return np.concatenate(found)

    def _choose_looped(self, table: PlanTable, bounds: BalancedSteps) -> None:
        """Choose the layers of plans with several stages on a rank: all if they are few."""
        if len(self.scenario.model.kinds) > 1:
            self.proven = self.proven and not np.any(is_looped(table))
            return
        rows = np.flatnonzero(is_looped(table) & (bounds.step < self.limit))
        rows = self._near(table, rows, MANY)
        table, bounds = self._looped(table.rows(rows), bounds.rows(rows))
        if MANY_LOOPED < len(table) <= MANY:
            states = table_least_states(self.scenario, table) * (1.0 - SAME)
            most = max_peak(self.scenario, most_memory(self.require, np.inf))
            rows = np.flatnonzero(states <= most)
            table, bounds = table.rows(rows), bounds.rows(rows)
        if len(table) > MOST_PLANS:
            self.proven = False
            first = PlanTable.from_plans(list(self.first))
            table = stage_candidates(first, recomputed=self.recomputed)
            table, bounds = self._looped(
                table, balanced_bounds(self.scenario, table, self.recomputed)
            )
        self.share = max(1, len(table))
        self._choose_stages(table, bounds, np.argsort(bounds.step, kind="stable"))

    def _looped(self, table: PlanTable, bounds: BalancedSteps) -> tuple[PlanTable, BalancedSteps]:
        return looped_bounds(self.scenario, table, bounds, self.limit, recomputed=self.recomputed)

    def _choose_stages(self, table: PlanTable, bounds: BalancedSteps, rows: Rows) -> None:
        """Try plans with one stage on each rank, AT_ONCE at a time."""
        for some in tracked(np.array_split(rows, max(1, -(-len(rows) // AT_ONCE)))):
            self._choose_some_stages(table, bounds, some[bounds.step[some] < self.limit])

    def _choose_some_stages(self, table: PlanTable, bounds: BalancedSteps, rows: Rows) -> None:
        longest: dict[int, list[float]] = {}
        for depth in ascending(table.pipeline_parallel[rows]).tolist():
            alike = rows[table.pipeline_parallel[rows] == depth]
            most = self.limit - bounds.once[alike]
            every = longest_stage(table.rows(alike), bounds.whole[alike], most)
            longest |= zip(alike.tolist(), every.T.tolist(), strict=True)
        plans = {row: table.plan(row) for row in rows.tolist()}
        costs = [
            self._costs(plan, longest[row], by_stage=self._varies(plan))
            for row, plan in plans.items()
        ]
        with stages(*PRICES) as begin:
            begin(f"pricing the stages of {len(costs):,} plans")
            price_stages(costs)
            begin(f"choosing stages of {len(costs):,} plans")
            for one in tracked(costs):
                found = self._best_of(one)
                if found is None:
                    continue
                if self.recomputed == "one_number" and self._varies(one.plan):
                    self._choose_number(one)
                else:
                    self._keep(one.plan, found.layer_ranges, found.recomputed, found.step)

    def _varies(self, plan: Plan) -> bool:
        """Whether numbers of recomputed layers of a plan are chosen; one for all: of whole ones."""
        of_all = self.recomputed == "one_number" and plan.recompute == "full"
        return self.recomputed == "by_stage" or of_all

    def _choose_number(self, costs: StageCosts) -> None:
        """Try every number of recomputed layers, the same for all stages.

        With a number for each stage, a plan takes no longer; only those that win then come here.
        """
        most = -(-max(high for _, high in costs.sizes) // costs.plan.virtual_stages)
        plans = [replace(costs.plan, recompute_layers=n) for n in range(1, most)]
        plans.append(costs.plan)  # all layers
        numbers = [self._costs(plan, costs.longest, by_stage=False) for plan in plans]
        price_stages(numbers)
        for one in numbers:
            found = self._best_of(one)
            if found is not None:
                self._keep(one.plan, found.layer_ranges, found.recomputed, found.step)

    def _costs(self, plan: Plan, longest: Sequence[float], *, by_stage: bool) -> StageCosts:
        contents = StageContents.of_plan(self.scenario.model, plan)
        most = most_memory(self.require, np.inf)
        return StageCosts(self.scenario, plan, contents, self.limit, longest, by_stage, most)

    def _best_of(self, costs: StageCosts) -> StageSplit | None:
        """Return the best stages of a plan, if they are the best so far."""
        costs.limit = self.limit
        found, proven = best_stages(
            costs,
            most_nodes=max(FEWEST_NODES, MOST_NODES // self.share),
            most_simulated=max(FEWEST_SIMULATED, MOST_SIMULATED // self.share),
        )
        self.proven = self.proven and proven
        return found

    def _choose_recomputed(self, plans: Sequence[Plan]) -> None:
        """Try plans whose layers stay as they are."""
        if not plans:
            return
        ranges = [default_layer_ranges(self.scenario, plan) for plan in plans]
        pairs = list(zip(plans, ranges, strict=True))
        most = most_memory(self.require, np.inf)
        least = least_recompute(self.scenario, pairs, self.limit, most)
        for one in sorted(least, key=lambda one: one.step_bound):
            if one.step_bound >= self.limit:
                break
            recomputed = one.by_stage(self.scenario, most)
            if recomputed is not None:
                step = simulated_step(self.scenario, one.plan, one.ranges, recomputed)
                self._keep(one.plan, one.ranges, recomputed, step)

    def _keep(
        self, plan: Plan, ranges: Sequence[tuple[int, int]], recomputed: Sequence[int], step: float
    ) -> None:
        """Keep a plan with its stages if it is legal and the best so far."""
        by_stage: tuple[int, ...] | None = tuple(recomputed)
        if self.recomputed != "by_stage":
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
