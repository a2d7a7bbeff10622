"""The timeline of one step's memory: the parts on every pipeline rank at every moment of a step.

Units: bytes. The peak that ``estimate.price`` finds is the largest of these moments.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import asdict

from cost_models.memory.parts import MemoryParts
from cost_models.memory.peak import rank_timeline
from cost_models.partition.plan_stages import pipeline_rank
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import Plan, PlanTable
from cost_models.scenario import Scenario


def timelines(
    scenario: Scenario, plan: Plan, layer_ranges: Sequence[tuple[int, int]]
) -> list[tuple[MemoryParts, ...]]:
    """Return, for every pipeline rank of one plan, the parts at each of ``memory.MOMENTS``."""
    table = PlanTable.from_plans([plan])
    numbers = range(plan.pipeline_parallel)
    ranks = [pipeline_rank(scenario, plan, layer_ranges, number) for number in numbers]
    return [
        tuple(_plain(parts) for parts in rank_timeline(RankView(scenario, table, rank)))
        for rank in ranks
    ]


def _plain(parts: MemoryParts) -> MemoryParts:
    """Return the first row as plain numbers."""
    return MemoryParts(**{name: float(np.ravel(value)[0]) for name, value in asdict(parts).items()})
