"""Candidate plans of a search: the legal ones, and how many each rule or requirement removes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.columnar.columns import FactoredColumn, common_projection, values_at
from cost_models.columnar.dictionary_encoding import concatenate
from cost_models.legality.rules import CODES, RULES, broken_rules
from cost_models.plan.plan import COLUMNS, ENDS, PlanTable, split_layers
from cost_models.scenario import Scenario
from planner.request.constraints import Constraint, broken_by_plan
from planner.request.divisors import divisors
from planner.search.plan_product import PlanProduct
from planner.search.space import MAX_VIRTUAL_STAGES, Space, slabs


def varies_virtual_stages(scenario: Scenario, require: Sequence[Constraint]) -> bool:
    """Whether legality and requirements are the same for every number of virtual stages.

    If not, all numbers are candidates; if so, most are found by their bounds
    (``VirtualStages``).
    """
    given = scenario.layer_ranges is not None or scenario.stage_recompute_layers is not None
    return not given and not any(one.name == "virtual_stages" for one in require)


def space_of(
    scenario: Scenario,
    fixed: Mapping[str, Any],
    require: Sequence[Constraint],
    offloads: Sequence[str],
) -> Space:
    """Return the search space of a scenario, with all stages whose layers may be given."""
    return Space(
        scenario.model,
        scenario.workload,
        scenario.cluster.num_gpus,
        fixed,
        offloads,
        every_cut=not varies_virtual_stages(scenario, require),
        given_stages=len(scenario.layer_ranges or ()),
    )


def more_stages_than_layers(
    scenario: Scenario,
    fixed: Mapping[str, Any],
    require: Sequence[Constraint],
    offloads: Sequence[str],
) -> list[PlanTable]:
    """Return the plans that are legal if the head, or head and embedding, are stages alone."""
    layers, found = scenario.model.num_layers, []
    most = MAX_VIRTUAL_STAGES if len(scenario.model.kinds) == 1 else 1  # see ``best_partition``
    for pipeline in divisors(scenario.cluster.num_gpus):
        virtual = -(-(layers + 1) // pipeline)
        stages = {"pipeline_parallel": pipeline, "virtual_stages": virtual}
        other = any(fixed.get(name, value) != value for name, value in stages.items())
        if other or pipeline == 1 or pipeline * virtual > layers + ENDS:
            continue
        if virtual <= most:
            ranges = split_layers(layers, pipeline * virtual)
            own = replace(scenario, layer_ranges=ranges)
            found.append(Candidates.of(own, {**fixed, **stages}, require, offloads).legal)
    return found


def joined(tables: Sequence[PlanTable]) -> PlanTable:
    """Return the plans of several tables, one after the other."""
    return PlanTable(**{n: concatenate([getattr(each, n) for each in tables]) for n in COLUMNS})


def grid_codes(scenario: Scenario, product: PlanProduct) -> tuple[NDArray[np.int16], list[int]]:
    """Return, for every grid of ranks, 0 or the first rule that all of its plans break.

    Of the rules that read no other column than the degrees of the grid. And the positions of the
    other rules that some plan breaks.
    """
    few, frame = product.factored()
    codes = np.zeros(len(product.num_plans), dtype=np.int16)
    others = []
    for position, broken in broken_rules(scenario, few).items():
        if isinstance(broken, FactoredColumn) and broken.projection.mask == 0:
            codes[values_at(broken.projection, broken)] = position
        else:
            others.append(position)
    frame.release()
    return codes, others


class Candidates(Struct, frozen=True):
    """Legal candidates, and counts of the others by broken rule."""

    space: Space
    legal: PlanTable  # dictionary-encoded: legal plans that satisfy the requirements
    codes: NDArray[np.int64]  # number of candidates for each of CODES
    examples: Mapping[str, str]  # for each broken rule, its message for one candidate
    excluded: NDArray[np.int64]  # legal plans that break a requirement: its position, from 1

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        fixed: Mapping[str, Any],
        require: Sequence[Constraint] = (),
        offloads: Sequence[str] = ("none",),
    ) -> Candidates:
        """Enumerate all candidates and check legality and requirements."""
        counts = np.zeros(len(CODES), dtype=np.int64)
        examples: dict[str, str] = {}
        excluded: list[NDArray[Any]] = [np.zeros(0, dtype=np.int64)]
        legal: list[PlanTable] = []
        space = space_of(scenario, fixed, require, offloads)
        whole = space.product(with_short=scenario.on_gpu)
        of_grids, others = grid_codes(scenario, whole)
        broken_grids = np.bincount(of_grids, weights=whole.num_plans, minlength=len(CODES))
        counts += (broken_grids * (np.arange(len(CODES)) > 0)).astype(np.int64)
        for code, grid in zip(*np.unique(of_grids, return_index=True), strict=True):
            if code:
                plan = whole.first_of(int(grid)).plan(0)
                examples[CODES[code]] = RULES[code - 1].words(scenario, plan)
        for product in slabs(whole.grids(np.flatnonzero(of_grids == 0))):
            few, frame = product.factored()
            broken = broken_rules(scenario, few, others)
            projection = frame.prefix(common_projection(frame, list(broken.values())))
            codes = np.zeros(projection.size, dtype=np.int16)
            for position, flags in broken.items():
                codes[values_at(projection, flags)] = position
            number = np.bincount(codes, weights=projection.num_plans(), minlength=len(CODES))
            counts += number.astype(np.int64)
            for code, row in zip(*np.unique(codes, return_index=True), strict=True):
                if code and CODES[code] not in examples:
                    plan = product.plans(projection, row[None]).plan(0)
                    examples[CODES[code]] = RULES[code - 1].words(scenario, plan)
            plans = product.plans(projection, np.flatnonzero(codes == 0))
            frame.release()
            if require:
                broken_codes = broken_by_plan(require, plans.plain())
                excluded.append(broken_codes[broken_codes > 0])
                plans = plans.rows(broken_codes == 0)
            legal.append(plans)
        legal = legal or [whole.first_of(0).rows(slice(0, 0))]
        return cls(space, joined(legal), counts, examples, np.concatenate(excluded))

    @property
    def illegal(self) -> dict[str, int]:
        """Number of candidates that each rule forbids, in descending order."""
        found = {CODES[i]: int(n) for i, n in enumerate(self.codes) if i and n}
        return dict(sorted(found.items(), key=lambda item: -item[1]))
