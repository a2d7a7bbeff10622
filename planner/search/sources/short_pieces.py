"""Candidates that cut sequences into short pieces: fewer than MIN_TOKENS on each rank.

They are rarely the best, and outnumber all others. Where they are more than ``space.FEW``, the
search takes them after the others, and only those that may be among the best by a lower bound of
their steps:

    T >= m W / p    W both passes of a micro-batch on all p ranks together, nothing recomputed

It holds for every schedule, number of stages, layers of each stage, ZeRO stage and recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import among
from cost_models.columnar.columns import FactoredColumn
from cost_models.columnar.dictionary_encoding import decode
from cost_models.columnar.product_projections import ProductProjection
from cost_models.legality.rules import broken_rules, legality_codes
from cost_models.partition.schedules import LOOPED_CODES, V_CODES
from cost_models.plan.factored import distinct_plans
from cost_models.plan.plan import OFFLOADS, SCHEDULES, PlanTable
from cost_models.plan.recompute import FULL, NONE
from cost_models.pricing.table import table_balanced_steps, table_least_states, table_least_steps
from cost_models.scenario import Scenario
from planner.request.constraints import Constraint, broken_by_plan
from planner.search.candidates import grid_codes
from planner.search.feasible import Feasible
from planner.search.plan_product import PlanProduct
from planner.search.sources.partial_recompute import ROUNDING
from planner.search.sources.source import Leaders
from planner.search.space import Space

Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]
Rows = NDArray[np.integer[Any]]
FEW: Final = 3_000  # families of plans that are priced without their own bounds
FIRST: Final = 200_000  # candidates in the first table, whose best plans bound the others
LARGE: Final = 4_000_000  # candidates in a further table
# columns of the choices that the bound depends on
OF_PASSES: Final = (
    "context_parallel_method",
    "expert_parallel",
    "micro_batch_size",
    "sequence_parallel",
)
VARIED: Final = ("recompute", "offload")  # the last choices


def short_pieces(
    scenario: Scenario, space: Space, require: Sequence[Constraint], leaders: Leaders
) -> Iterator[tuple[PlanTable, Floats]]:
    """Yield the legal plans with short pieces that may beat the leaders, in tables.

    With a lower bound of their steps in seconds (0: not known), of all that differ in recomputation
    and offload, and of all with other stages where these are varied.
    """
    if not scenario.on_gpu:
        return
    product = space.short_product()
    if product is None:
        return
    of_grids, others = grid_codes(scenario, product)
    legal = np.flatnonzero(of_grids == 0)
    if len(legal) == 0:
        return
    product = product.grids(legal).choices_first(OF_PASSES)
    few, frame = product.factored()
    of_family = len(product.choices) - len(VARIED)
    sizes = len(OF_PASSES), of_family, len(product.choices)
    passes, families, every = (frame.project((1 << size) - 1) for size in sizes)
    variants = every.size // families.size  # of each family
    rules = list(broken_rules(scenario, few, others).values())
    if not all(isinstance(rule, FactoredColumn) for rule in rules):  # every plan breaks it
        return
    of_plans = [rule for rule in rules if rule.projection.mask & ~families.mask]
    of_families = [rule for rule in rules if not rule.projection.mask & ~families.mask]
    table = _first_plans(product, len(OF_PASSES), np.arange(passes.size))
    bound, longest = _least_steps(scenario, table), _longest(leaders, table)
    states, fit = _small_states(scenario, product)
    order = np.argsort(bound, kind="stable")
    order = order[bound[order] < longest[order]]
    plans_before = np.cumsum(passes.num_plans()[order])
    part = np.where(plans_before < FIRST, 0, 1 + plans_before // LARGE)
    for number in np.unique(part):
        rows = order[part == number]
        rows = rows[bound[rows] < _longest(leaders, table.rows(rows))]
        mine = families.rows_below(passes, rows)
        if leaders.plans:  # else the smallest plan may be wanted
            (row,) = families.numbers_in([frame.project(states)], mine)
            mine = mine[fit[row]]
        mine = mine[_breaks_none(of_families, families, mine)]
        if of_plans:
            may = _breaks_none(of_plans, every, every.rows_below(families, mine))
            mine = mine[np.any(may.reshape(len(mine), variants), axis=1)]
        if require:
            may = broken_by_plan(require, product.plans(families, mine).plain()) == 0
            mine = mine[np.any(may.reshape(len(mine), variants), axis=1)]
        may, least = _may_be_fast(scenario, _first_plans(product, of_family, mine), leaders)
        mine, least = mine[may], np.repeat(least[may], variants)
        plans = product.plans(families, mine)
        if require or of_plans:
            plain = plans.plain()
            kept = (legality_codes(scenario, plain) == 0) & (broken_by_plan(require, plain) == 0)
            plans, least = plans.rows(np.flatnonzero(kept)), least[kept]
        if len(plans):
            yield plans, least
    frame.release()


def _breaks_none(rules: Sequence[FactoredColumn], of: ProductProjection, rows: Rows) -> Flags:
    """Return which rows of a projection break none of some rules that depend on its choices."""
    legal = np.ones(len(rows), dtype=np.bool_)
    numbers_of = of.numbers_in([rule.projection for rule in rules], rows)
    for rule, numbers in zip(rules, numbers_of, strict=True):
        legal &= ~rule.values[numbers]
    return legal


def _small_states(scenario: Scenario, product: PlanProduct) -> tuple[int, Flags]:
    """Return a mask of choices, and for each row of their projection whether plans may fit.

    By the model states alone (``table_least_states``), if all plans have the same offload.
    """
    alike = bool(np.all(product.sizes[-1] == 1))
    names = {"expert_parallel", "zero_stage"} if alike else set[str]()
    kept = [number for number, choice in enumerate(product.choices) if names & set(choice)]
    few = product.first_values(kept)
    frame = few.factored()[1]
    table = few.plans(frame.project(0), np.arange(len(few.num_plans)))
    frame.release()
    mask = sum(1 << number for number in kept)
    if not alike:
        return mask, np.ones(len(table), dtype=np.bool_)
    least = table_least_states(scenario, table) * (1.0 - ROUNDING)
    return mask, least <= Feasible(scenario, (), 1).max_peak_at(1)


def _first_plans(product: PlanProduct, kept: int, rows: Rows) -> PlanTable:
    """Return a plan for some rows of the projection to the first ``kept`` choices."""
    few = product.first_values(range(kept))
    frame = few.factored()[1]
    plans = few.plans(frame.project((1 << kept) - 1), rows)
    frame.release()
    return plans


def _longest(leaders: Leaders, table: PlanTable) -> Floats:
    """Return the steps that plans have to beat; infinity where slow plans may be wanted, too."""
    return leaders.longest(table) if leaders.ranking.by_step else np.full(len(table), np.inf)


def _least_steps(scenario: Scenario, table: PlanTable) -> Floats:
    """Return the bounds of the steps of plans with the passes of each row, legal or not."""
    same = {
        "dp_replicate": 1,
        "zero_stage": 0,
        "recompute": NONE,
        "pipeline_schedule": SCHEDULES.index("1f1b"),
        "virtual_stages": 1,
        "offload": OFFLOADS.index("none"),
    }
    number, first = distinct_plans(table, without=list(same))
    few = replace(table.rows(first), **{n: np.broadcast_to(v, len(first)) for n, v in same.items()})
    passes = table_balanced_steps(scenario, few).whole
    bound: Floats = decode(few.num_microbatches) * passes / decode(few.pipeline_parallel)
    return bound[number]


def _may_be_fast(scenario: Scenario, families: PlanTable, leaders: Leaders) -> tuple[Flags, Floats]:
    """Return which plans may beat the leaders with their own schedule, and bounds of all steps.

    ``families``: a plan for all that differ in recomputation and offload, which have one bound. It
    holds for any layers of the stages (``table_balanced_steps``), and that of interleaved plans
    with two stages for all with more of them. Other plans with several stages on each rank also
    have the step without recomputation, which may only hide communication at its end.
    """
    longest = _longest(leaders, families)
    if len(families) < FEW or not np.all(np.isfinite(longest)):
        return np.ones(len(families), dtype=np.bool_), np.zeros(len(families))
    bound, every = _bounds(scenario, families)
    fast = bound < longest
    rows = np.flatnonzero(fast & (decode(families.virtual_stages) > 1) & ~every)
    full = replace(families.rows(rows), recompute=np.full(len(rows), FULL))
    fast[rows] = table_least_steps(scenario, full, longest[rows]) < longest[rows]
    return fast, bound


def family_bounds(scenario: Scenario, plans: PlanTable) -> tuple[Floats, Flags]:
    """Return lower bounds of the steps of plans, and which hold for all numbers of stages.

    Plans that differ in recomputation and offload are one family with one bound.
    """
    number, first = distinct_plans(plans, without=VARIED)
    step, every = _bounds(scenario, plans.rows(first))
    return step[number], every[number]


def _bounds(scenario: Scenario, families: PlanTable) -> tuple[Floats, Flags]:
    """Return ``family_bounds`` of a plan of each family."""
    schedule, virtual = decode(families.pipeline_schedule), decode(families.virtual_stages)
    every = among(schedule, LOOPED_CODES) & (virtual == 2)
    most = np.maximum(2, scenario.model.num_layers // decode(families.pipeline_parallel))
    bent = among(schedule, V_CODES)  # work of both ends as if in a line
    straight = replace(
        families,
        recompute=np.broadcast_to(NONE, len(families)),
        offload=np.broadcast_to(OFFLOADS.index("none"), len(families)),
        pipeline_schedule=np.where(bent, SCHEDULES.index("zero_bubble"), schedule),
    )
    stages = np.where(every, most, virtual)
    step = table_balanced_steps(scenario, straight, stages).step
    # exchanges of gradients at the ends of a line are longer than those of both ends
    rows = np.flatnonzero(bent)
    step[rows] = np.minimum(step[rows], _least_steps(scenario, families.rows(rows)))
    return step, every
