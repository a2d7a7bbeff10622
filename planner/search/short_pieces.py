"""Candidates that cut sequences into short pieces: fewer than MIN_TOKENS on each rank.

They are rarely the best, and outnumber all others. Where they are more than ``space.FEW``, the
search takes them last, and only those that may be among the best by a lower bound of their steps:

    T >= m W / p    W both passes of a micro-batch on all p ranks together, nothing recomputed

It holds for every schedule, number of stages, layers of each stage, ZeRO stage and recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.columnar.projections import distinct_rows
from cost_models.legality.rules import legality_codes
from cost_models.partition.schedules import LOOPED, LOOPED_CODES, V_SHAPED
from cost_models.plan.plan import OFFLOADS, SCHEDULES, PlanTable
from cost_models.plan.recompute import FULL, NONE
from cost_models.pricing.table import table_balanced_steps, table_least_steps
from cost_models.scenario import Scenario
from planner.request.constraints import Constraint, broken_by_plan
from planner.search.candidates import grid_codes, varies_virtual_stages
from planner.search.sources import Leaders
from planner.search.space import short_product

Flags = NDArray[np.bool_]
SINGLE: Final = [i for i, name in enumerate(SCHEDULES) if name not in (*LOOPED, *V_SHAPED)]
FEW: Final = 10_000  # plans that are priced without their own bounds
FIRST: Final = 200_000  # candidates in the first table, whose best plans bound the others
LARGE: Final = 4_000_000  # candidates in a further table
# columns of the choices that the bound depends on
OF_PASSES: Final = (
    "context_parallel_method",
    "expert_parallel",
    "micro_batch_size",
    "sequence_parallel",
)


def short_pieces(
    scenario: Scenario,
    fixed: Mapping[str, Any],
    require: Sequence[Constraint],
    offloads: Sequence[str],
    leaders: Leaders,
) -> Iterator[PlanTable]:
    """Yield the legal plans with short pieces that may beat the leaders, in tables."""
    if not scenario.on_gpu:
        return
    product = short_product(
        scenario.model,
        scenario.workload,
        scenario.cluster.num_gpus,
        fixed,
        offloads=offloads,
        every_cut=not varies_virtual_stages(scenario, require),
    )
    if product is None:
        return
    legal = np.flatnonzero(grid_codes(scenario, product) == 0)
    if len(legal) == 0:
        return
    product = product.grids(legal).choices_first(OF_PASSES)
    frame = product.factored()[1]
    passes = frame.project((1 << len(OF_PASSES)) - 1)
    alone = product.first_values(len(OF_PASSES))
    whole = alone.factored()[1].project(0)
    table = alone.plans(whole, np.arange(whole.size)).plain()
    bound, longest = _least_steps(scenario, table), _longest(leaders, table)
    order = np.argsort(bound, kind="stable")
    order = order[bound[order] < longest[order]]
    plans_before = np.cumsum(passes.num_plans()[order])
    part = np.where(plans_before < FIRST, 0, 1 + plans_before // LARGE)
    for number in np.unique(part):
        rows = order[part == number]
        rows = rows[bound[rows] < _longest(leaders, table.rows(rows))]
        plans = product.plans(passes, rows)
        plain = plans.plain()
        kept = (legality_codes(scenario, plain) == 0) & (broken_by_plan(require, plain) == 0)
        plans = plans.rows(np.flatnonzero(kept))
        plans = plans.rows(np.flatnonzero(_may_be_fast(scenario, plans, leaders)))
        if len(plans):
            yield plans
    frame.release()


def _longest(leaders: Leaders, table: PlanTable) -> NDArray[np.float64]:
    """Return the steps that plans have to beat; infinity where slow plans may be wanted, too."""
    ranking = leaders.ranking
    by_time = not ranking.front and ranking.objective != "memory"
    return leaders.longest(table) if by_time else np.full(len(table), np.inf)


def _least_steps(scenario: Scenario, table: PlanTable) -> NDArray[np.float64]:
    """Return the bounds of the steps of plans with the passes of each row, legal or not."""
    same = {
        "zero_stage": 0,
        "recompute": NONE,
        "pipeline_schedule": SCHEDULES.index("1f1b"),
        "virtual_stages": 1,
        "offload": OFFLOADS.index("none"),
    }
    few = replace(table, **{n: np.full_like(getattr(table, n), v) for n, v in same.items()})
    passes = table_balanced_steps(scenario, few).whole
    bound: NDArray[np.float64] = few.num_microbatches * passes / few.pipeline_parallel
    return bound


def _may_be_fast(scenario: Scenario, plans: PlanTable, leaders: Leaders) -> Flags:
    """Return which legal plans may beat the leaders with their own schedule.

    Plans that differ in recomputation and offload have one bound. With one stage on each rank it
    holds for any layers of the stages (``table_balanced_steps``); else it is the step without
    recomputation, which may only hide communication at its end. Interleaved plans with two stages
    stand for all with more of them and are kept.
    """
    if len(plans) < FEW or not np.all(np.isfinite(_longest(leaders, plans.plain()))):
        return np.ones(len(plans), dtype=np.bool_)
    names = [f.name for f in fields(PlanTable) if f.name not in ("recompute", "offload")]
    family, first = distinct_rows(*(getattr(plans, name) for name in names))
    table = plans.rows(first).plain()
    zeros = np.zeros_like(table.recompute)
    table = replace(table, recompute=zeros + NONE, offload=zeros + OFFLOADS.index("none"))
    bound, single = np.zeros(len(table)), np.isin(table.pipeline_schedule, SINGLE)
    rows = np.flatnonzero(single)
    bound[rows] = table_balanced_steps(scenario, table.rows(rows)).step
    looped = np.isin(table.pipeline_schedule, LOOPED_CODES) & (table.virtual_stages == 2)
    rows = np.flatnonzero(~single & ~looped)
    full = replace(table.rows(rows), recompute=np.full(len(rows), FULL))
    bound[rows] = table_least_steps(scenario, full)
    return np.asarray(bound < _longest(leaders, table))[family]
