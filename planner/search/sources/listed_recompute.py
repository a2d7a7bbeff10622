"""Candidate source: further ways to recompute that a trainer's table lists.

Every search tries no recomputation, the attention core and whole layers. A trainer may also have
policies that recompute some operators (torchtitan: ``ops:every-2nd-mm``). With T of the same plan
that recomputes all layers:

    T(policy) >= T(none) >= 2/3 T

Only such plans that may beat the leaders by this bound are priced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.plan.plan import SEARCHED_RECOMPUTE, PlanTable
from cost_models.plan.recompute import RECOMPUTE
from cost_models.scenario import Scenario
from hardware_profiles.progress import stages
from planner.request.constraints import Constraint
from planner.request.limits import limits_of_trainer
from planner.search.feasible import Feasible
from planner.search.ranking import CandidateBatch
from planner.search.sources.partial_recompute import FULL, MOST_SAVED
from planner.search.sources.source import Leaders
from planner.search.sources.virtual_stages import VARIANTS, Interleaved, VirtualStages


def listed_recompute(
    scenario: Scenario, fixed: Mapping[str, object], require: Sequence[Constraint]
) -> tuple[str, ...]:
    """Return the further values of recompute that a trainer's table lists, if none is pinned."""
    if "recompute" in fixed or any(one.name == "recompute" for one in require):
        return ()
    table = limits_of_trainer(scenario, require)
    listed = () if table is None else table.limits().get("recompute", ())
    return tuple(word for word in listed if word not in SEARCHED_RECOMPUTE)


class ListedRecompute(Struct):
    """Variants of plans that recompute all layers."""

    scenario: Scenario
    words: Sequence[str]
    table: PlanTable  # legal plans that fit, or may fit with fewer recomputed layers
    step: NDArray[np.float64]  # seconds
    feasible: Feasible
    modes: Mapping[str, bool]  # ``fewest``, ``every`` and ``smaller`` of ``VirtualStages``
    priced: int = 0

    def batches(self, leaders: Leaders) -> Iterator[CandidateBatch]:
        """Yield the variants that fit and whose bounds beat the leaders."""
        bound = self.step * (1.0 - MOST_SAVED)
        wanted = (self.table.recompute == FULL) & (bound < leaders.longest(self.table))
        rows = np.flatnonzero(wanted)
        for word in self.words if len(rows) else ():
            code = np.full_like(self.table.recompute[rows], RECOMPUTE.index(word))
            some = replace(self.table.rows(rows), recompute=code)
            plans = Interleaved(some, np.zeros(len(rows)), np.full(len(rows), np.nan))
            source = VirtualStages(self.scenario, plans, self.feasible, **self.modes)
            with stages(*VARIANTS) as begin:
                yield from source.variants(plans, leaders, begin)
            self.priced += source.priced
