"""Candidate source: plans of ZeRO 3 with a secondary copy of the weights (hpZ of ZeRO++).

The backward pass gathers from a copy that n neighbours share, over faster links where the shards
span nodes; the numbers stay the same. Candidates are the plans of ZeRO 3 whose shards do, with
every divisor n of their ranks:

    M(n) >= M(1)     the copy needs memory
    T(n) >= T(2)     more neighbours take no less time: T of the smallest divisor bounds the others

Only a trainer that has such copies is asked (``capabilities.toml``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.arrays import ascending
from cost_models.legality.executor_limits import SUPPORTED_FIELDS
from cost_models.plan.plan import PlanTable
from cost_models.pricing.table import table_steps
from cost_models.scenario import Scenario
from hardware_profiles.progress import stages
from planner.request.constraints import Constraint
from planner.request.divisors import divisors
from planner.request.limits import limits_of_trainer
from planner.search.feasible import Feasible
from planner.search.ranking import CandidateBatch
from planner.search.sources.partial_recompute import FULL, MOST_SAVED
from planner.search.sources.source import Leaders
from planner.search.sources.virtual_stages import VARIANTS, Interleaved, VirtualStages, times_first

FIELD: Final = "secondary_ranks"
Floats = NDArray[np.float64]


def has_copies(scenario: Scenario, fixed: Mapping[str, Any], require: Sequence[Constraint]) -> bool:
    """Whether the search varies the secondary copies: the trainer has them, none are pinned."""
    if FIELD in fixed or not scenario.on_gpu or any(one.name == FIELD for one in require):
        return False
    table = limits_of_trainer(scenario, require)
    return FIELD in SUPPORTED_FIELDS if table is None else FIELD not in table.limits()


class SecondaryCopies(Struct):
    """Variants of plans of ZeRO 3, with all numbers of neighbours and of recomputed layers."""

    scenario: Scenario
    table: PlanTable  # legal plans that fit, or may fit with fewer recomputed layers
    peak: Floats  # bytes
    none: Floats  # of the same plans without recomputation; nan: unknown
    feasible: Feasible
    modes: Mapping[str, bool]  # ``fewest``, ``every`` and ``smaller`` of ``VirtualStages``
    priced: int = 0

    def batches(self, leaders: Leaders) -> Iterator[CandidateBatch]:
        """Yield the variants that fit and whose bounds beat the leaders."""
        cluster, table = self.scenario.cluster, self.table
        spans = table.tensor_parallel * table.shard_ranks > cluster.gpus_per_node
        rows = np.flatnonzero((table.zero_stage == 3) & (spans | bool(cluster.levels)))
        numbers = {int(n): divisors(int(n))[1:-1] for n in ascending(table.shard_ranks[rows])}
        rows = rows[[len(numbers[n]) > 0 for n in table.shard_ranks[rows].tolist()]]
        if len(rows) and times_first(leaders, table):
            some = table.rows(rows)
            least = np.array([numbers[n][0] for n in some.shard_ranks.tolist()])
            saved = np.where(some.recompute == FULL, MOST_SAVED, 0.0)
            bound = table_steps(self.scenario, replace(some, secondary_ranks=least))
            rows = rows[bound * (1.0 - saved) < leaders.longest(some)]
        shards = table.shard_ranks[rows].tolist()
        for number in sorted({each for n in shards for each in numbers[n]}):
            mine = rows[[number in numbers[n] for n in shards]]
            some = table.rows(mine)
            some = replace(some, secondary_ranks=np.full(len(mine), number))
            plans = Interleaved(some, self.peak[mine], self.none[mine])
            source = VirtualStages(self.scenario, plans, self.feasible, **self.modes)
            with stages(*VARIANTS) as begin:
                yield from source.variants(plans, leaders, begin)
            self.priced += source.priced + source.part_recomputed
