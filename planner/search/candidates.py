"""The candidates of a question: which of them are legal, and what became of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_models.columnar.columns import common_projection, values_at
from cost_models.columnar.dictionary_encoding import concatenate
from cost_models.legality.rules import CODES, RULES, broken_rules
from cost_models.plan.plan import PlanTable
from cost_models.scenario import Scenario
from planner.request.constraints import Constraint, broken_by_plan
from planner.search.space import plan_products


@dataclass(frozen=True, slots=True)
class Candidates:
    """Every candidate, judged."""

    legal: PlanTable  # by values: those that are also what is required
    codes: NDArray[np.int64]  # how many there are of each of CODES
    examples: Mapping[str, str]  # for each broken rule, the words for one candidate
    unwanted: NDArray[np.int64]  # of legal ones, the requirement that they break

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        fixed: Mapping[str, Any],
        require: Sequence[Constraint] = (),
        offloads: Sequence[str] = ("none",),
    ) -> Candidates:
        """Enumerate and judge."""
        counts = np.zeros(len(CODES), dtype=np.int64)
        examples: dict[str, str] = {}
        unwanted: list[NDArray[Any]] = [np.zeros(0, dtype=np.int64)]
        legal = []
        for product in plan_products(
            scenario.model, scenario.workload, scenario.cluster.num_gpus, fixed, offloads=offloads
        ):
            few, frame = product.factored()
            broken = broken_rules(scenario, few)
            projection = frame.prefix(common_projection(frame, list(broken.values())))
            codes = np.zeros(projection.size, dtype=np.int16)
            for position, flags in broken.items():
                codes[values_at(projection, flags)] = position
            here = np.bincount(codes, weights=projection.num_plans(), minlength=len(CODES))
            counts += here.astype(np.int64)
            for code, row in zip(*np.unique(codes, return_index=True), strict=True):
                if code and CODES[code] not in examples:
                    plan = product.plans(projection, row[None]).plan(0)
                    examples[CODES[code]] = RULES[code - 1].words(scenario, plan)
            plans = product.plans(projection, np.flatnonzero(codes == 0))
            frame.release()
            if require:
                unwilling = broken_by_plan(require, plans.plain())
                unwanted.append(unwilling[unwilling > 0])
                plans = plans.rows(unwilling == 0)
            legal.append(plans)
        columns = {
            f.name: concatenate([getattr(t, f.name) for t in legal]) for f in fields(PlanTable)
        }
        return cls(PlanTable(**columns), counts, examples, np.concatenate(unwanted))

    @property
    def illegal(self) -> dict[str, int]:
        """How many candidates each rule forbids, the most first."""
        found = {CODES[i]: int(n) for i, n in enumerate(self.codes) if i and n}
        return dict(sorted(found.items(), key=lambda item: -item[1]))
