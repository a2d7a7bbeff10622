"""Candidate sources of a search, and the leaders: the best plans so far.

The search takes batches of plans from one source after another. A source has a lower bound on the
step (or the peak) of each candidate; before every batch it drops the candidates whose bound does
not beat the leaders. Every ranked batch updates the leaders.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.plan.plan import PlanTable
from planner.search.ranking import CandidateBatch, Ranked, Ranking

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]


class Leaders(Struct):
    """The best plans so far, best first."""

    ranking: Ranking
    plans: list[Ranked] = []

    def add(self, more: list[Ranked]) -> None:
        """Merge more plans into the ranking; among ties earlier plans stay first."""
        self.plans = self.ranking.merged(self.plans, more)

    def longest(self, table: PlanTable) -> Floats:
        """Return the step in seconds that every plan has to beat; infinity: none."""
        return self.ranking.longest(self.plans, table)


class CandidateSource(Protocol):
    """Plans that the search may rank."""

    @property
    def priced(self) -> int:
        """Number of variants priced so far."""
        ...

    def batches(self, leaders: Leaders) -> Iterator[CandidateBatch]:
        """Yield the candidates whose bounds beat the leaders."""
        ...


class EnumeratedSpace(Struct, frozen=True):
    """Feasible rows of the enumerated space: one batch, already priced."""

    table: PlanTable
    order: Rows
    step: Floats
    peak: Floats
    priced: int = 0

    def batches(self, leaders: Leaders) -> Iterator[CandidateBatch]:
        """Yield all rows; their closed-form steps bound the simulation."""
        yield CandidateBatch(self.table, self.order, self.step, self.peak)
