"""Plans among which stages of their own are chosen, and lower bounds of their steps.

Bounds hold for any layers and recomputed layers of the stages; ``best_partition`` uses them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cost_models.columnar.projections import distinct_rows
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.partition.schedules import V_CODES
from cost_models.plan.factored import distinct_plans
from cost_models.plan.plan import OFFLOADS, SCHEDULES, PlanTable
from cost_models.plan.recompute import FULL, NONE, SELECTIVE
from cost_models.pricing.table import BalancedSteps, table_balanced_steps, table_least_steps
from cost_models.scenario import Scenario
from hardware_profiles.progress import stages
from planner.refinement.rank_prices import table_passes
from planner.refinement.stage_contents import StageContents
from planner.refinement.stage_search import ONE_STAGE_A_RANK
from planner.request.options.choices import Recomputed

BOUNDS: Final = (1.0, 2.0)  # seconds, relative: stages with other layers, with their own
MANY: Final = 4_000
RECOMPUTES: Final = (FULL, SELECTIVE)  # settings whose numbers of layers are chosen
UNEVEN: Final = [SCHEDULES.index(schedule) for schedule in ONE_STAGE_A_RANK]


def chooses_layers(table: PlanTable) -> NDArray[np.bool_]:
    """Return which plans have one stage on each of several ranks, whose layers are chosen."""
    one_stage = np.isin(table.pipeline_schedule, UNEVEN) & (table.virtual_stages == 1)
    found: NDArray[np.bool_] = one_stage & (table.pipeline_parallel > 1)
    return found


def stage_candidates(table: PlanTable, *, recomputed: Recomputed = "by_stage") -> PlanTable:
    """Return the plans among which stages are chosen, each once.

    A plan that recomputes layers can also recompute none of them, so that the same plan without
    recomputation is left out, unless all stages recompute the same number (``recomputed``). Plans
    with several stages on a rank keep their layers.
    """
    usual = (table.recompute_every == 0) & (table.offload == OFFLOADS.index("none"))
    cut = chooses_layers(table) | is_looped(table)
    if recomputed != "by_stage":
        table = table.rows(np.flatnonzero(usual & cut))
        if recomputed == "one_number":  # one row stands for all numbers
            table = replace(table, recompute_layers=np.zeros_like(table.recompute_layers))
        return table.rows(np.sort(distinct_plans(table)[1]))
    usual = usual & np.isin(table.recompute, [*RECOMPUTES, NONE])
    table = table.rows(np.flatnonzero(usual & (cut | (table.recompute != NONE))))
    table = replace(table, recompute_layers=np.zeros_like(table.recompute_layers))
    family, _ = distinct_plans(table, without=["recompute"])
    _, first = distinct_plans(table)
    with_full = np.isin(family[first], family[table.recompute == FULL])
    return table.rows(np.sort(first[~(with_full & (table.recompute[first] == NONE))]))


def stage_bounds(
    scenario: Scenario,
    table: PlanTable,
    limit: float = np.inf,
    *,
    recomputed: Recomputed = "by_stage",
) -> tuple[BalancedSteps, NDArray[np.float64]]:
    """Return lower bounds of plans with any layers and recomputed layers, and with those chosen.

    ``recomputed``: if the number is given, plans that recompute all layers do so in every stage.
    The second bounds are seconds of steps: those of plans that keep their layers, of which each
    stage recomputes a number of its own, are of the passes without recomputation, and of the
    communication that recomputation of all layers leaves exposed. ``limit``: seconds; longer steps
    may have a lower bound from there on.
    """
    with stages(*BOUNDS, joint=True) as begin:
        begin("bounding the steps of all stages")
        bounds = balanced_bounds(scenario, table, recomputed)
        begin()
        kept = bounds.step.copy()
        if recomputed == "by_stage":
            rows = np.flatnonzero(~chooses_layers(table) & (kept < limit))
            kept[rows] = table_least_steps(scenario, table.rows(rows), limit)
    return bounds, kept


def balanced_bounds(scenario: Scenario, table: PlanTable, recomputed: Recomputed) -> BalancedSteps:
    """Return lower bounds of plans for all numbers of layers and recomputed layers of a rank."""
    in_order = SCHEDULES.index("interleaved_zero_bubble")  # a V has as many passes on each rank
    schedule = table.pipeline_schedule
    schedule = np.where(np.isin(schedule, V_CODES), in_order, schedule).astype(schedule.dtype)
    balanced = replace(_without(table, recomputed), pipeline_schedule=schedule)
    return table_balanced_steps(scenario, balanced, table.virtual_stages)


def is_looped(table: PlanTable) -> NDArray[np.bool_]:
    """Return which plans have several stages on each of several ranks."""
    found: NDArray[np.bool_] = (table.pipeline_parallel > 1) & (table.virtual_stages > 1)
    return found


def looped_bounds(
    scenario: Scenario,
    table: PlanTable,
    bounds: BalancedSteps,
    limit: float,
    *,
    recomputed: Recomputed = "by_stage",
) -> tuple[PlanTable, BalancedSteps]:
    """Return plans with several stages on a rank, and lower bounds of their steps below a limit.

    ``bounds``: of ``stage_bounds``. For every number of layers of one kind on each rank, but for
    the layers of the search. One rank has no fewer than all on average, and computes them for every
    micro-batch; the bound leaves that out for more than MANY plans.
    """
    rows = np.flatnonzero(is_looped(table) & (bounds.step < limit))
    table, few = table.rows(rows), bounds.rows(rows)
    if len(rows) <= MANY:
        without = _without(table, recomputed)
        longest = _longest_ranks(scenario, without, whole=recomputed == "given")
        np.maximum(few.step, longest * table.num_microbatches + few.once, out=few.step)
    kept = np.flatnonzero(few.step < limit)
    return table.rows(kept), few.rows(kept)


def least_steps(
    scenario: Scenario, table: PlanTable, *, recomputed: Recomputed
) -> NDArray[np.float64]:
    """Return lower bounds of the steps in seconds with all stages that are tried."""
    bounds, kept = stage_bounds(scenario, table, recomputed=recomputed)
    looped = is_looped(table) & (len(scenario.model.kinds) == 1)
    return np.where(looped, np.minimum(kept, bounds.step), kept)


def _longest_ranks(scenario: Scenario, table: PlanTable, *, whole: bool) -> NDArray[np.float64]:
    """Return lower bounds of the passes of the rank with the most layers, other than evenly cut.

    ``whole``: plans that recompute do so in all layers.
    """
    model, found = scenario.model, np.full(len(table), np.inf)
    v_shaped = np.isin(table.pipeline_schedule, V_CODES)
    group, first = distinct_rows(table.pipeline_parallel, table.virtual_stages, v_shaped)
    ranks = []
    for number, row in enumerate(first.tolist()):
        plan, rows = table.plan(row), np.flatnonzero(group == number)
        most, left = divmod(model.num_layers, plan.pipeline_parallel)
        of = StageContents.of_plan(model, plan)
        searched = of.layers_of_ranks(default_layer_ranges(scenario, plan))
        most += left > 0 or max(searched) == most  # else equal ranks, as the search has them
        ranks += [(rows, of.of(n, *pair, whole * most)) for n, pair in of.different([most])]
    for (rows, _), seconds in zip(ranks, table_passes(scenario, table, ranks), strict=True):
        found[rows] = np.minimum(found[rows], seconds)
    return found


def _without(table: PlanTable, recomputed: Recomputed) -> PlanTable:
    """Return plans without the recomputation that may be left out."""
    part = (recomputed != "given") | (table.recompute_layers > 0)
    return replace(
        table,
        recompute=np.where(part, NONE, table.recompute).astype(table.recompute.dtype),
        recompute_layers=np.zeros_like(table.recompute_layers),
    )
