"""The candidates of a question: which of them are legal, and what became of the others."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_models.coded import joined
from cost_models.estimate import Setting
from cost_models.legality import CODES, RULES, legality_codes, question_of
from cost_models.plan import PlanTable
from cost_models.rule import Question
from planner.constraints import Constraint, broken_by_plan
from planner.space import plan_slabs


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
        setting: Setting,
        fixed: Mapping[str, Any],
        require: Sequence[Constraint] = (),
        offloads: Sequence[str] = ("none",),
    ) -> Candidates:
        """Enumerate and judge."""
        question = question_of(setting)
        counts = np.zeros(len(CODES), dtype=np.int64)
        examples: dict[str, str] = {}
        unwanted: list[NDArray[Any]] = [np.zeros(0, dtype=np.int64)]
        legal = []
        for slab in plan_slabs(
            setting.model, setting.workload, setting.cluster.num_gpus, fixed, offloads=offloads
        ):
            codes = legality_codes(question, slab)
            here = np.bincount(codes, minlength=len(CODES))
            counts += here
            examples |= _examples(question, slab, codes, np.flatnonzero(here).tolist(), examples)
            plans = slab.rows(codes == 0)
            if require:
                broken = broken_by_plan(require, plans.plain())
                unwanted.append(broken[broken > 0])
                plans = plans.rows(broken == 0)
            legal.append(plans)
        columns = {f.name: joined([getattr(t, f.name) for t in legal]) for f in fields(PlanTable)}
        return cls(PlanTable(**columns), counts, examples, np.concatenate(unwanted))

    @property
    def illegal(self) -> dict[str, int]:
        """How many candidates each rule forbids, the most first."""
        found = {CODES[i]: int(n) for i, n in enumerate(self.codes) if i and n}
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def _examples(
    question: Question,
    table: PlanTable,
    codes: NDArray[np.int16],
    there: Sequence[int],
    known: Container[str],
) -> dict[str, str]:
    """Return the words for the first candidate of each code that is not known yet."""
    words = {}
    for code in there:
        if code and CODES[code] not in known:
            row = int(np.argmax(codes == code))
            words[CODES[code]] = RULES[code - 1].words(question, table.plan(row))
    return words
