"""Candidate sources of a search, and the leaders: the best plans so far.

The search takes batches of plans from one source after another. A source has a lower bound on the
step (or the peak) of each candidate; before every batch it drops the candidates whose bound does
not beat the leaders. Every ranked batch updates the leaders.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.plan.plan import PlanTable
from planner.search.feasible import Peaks
from planner.search.ranking import CandidateBatch, Ranked, Ranking

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
FIRST: Final = 4_000  # plans whose peaks are priced before any is known to fit
MORE: Final = 4  # times as many are priced next


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

    def longest_of_any(self) -> float:
        """Return the largest of these steps of any plan."""
        return self.ranking.longest_of_any(self.plans)


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
    """Rows of the enumerated space with one verdict; their closed-form steps are bounds."""

    table: PlanTable
    rows: Rows
    step: Floats
    peaks: Peaks
    verdict: int
    timed: bool  # peaks are priced in the order of the steps, until the leaders are faster
    priced: int = 0

    def batches(self, leaders: Leaders) -> Iterator[CandidateBatch]:
        """Yield the rows that the leaders do not beat."""
        left, size = self.rows, FIRST if self.timed else len(self.rows)
        left = left[np.argsort(self.step[left], kind="stable")] if self.timed else left
        while len(left):
            last = self.step[left[min(size, len(left)) - 1]]  # equal steps stay together
            if self.timed:
                limit = leaders.longest_of_any()
                last = last if limit == np.inf else limit
                size = int(np.searchsorted(self.step[left], last, "right"))
            some, left, size = left[:size], left[size:], MORE * size
            table = self.table.rows(some).plain()
            peak = np.zeros(len(some)) if self.timed else self.peaks.of_rows(some)
            kept = ~leaders.ranking.beaten(leaders.plans)(table, self.step[some], peak)
            some, table = some[kept], table.rows(kept)
            peak = self.peaks.of_rows(some)
            mine = np.flatnonzero(self.peaks.verdicts[some] == self.verdict)
            order = leaders.ranking.order(table, mine, self.step[some], peak)
            yield CandidateBatch(table, order, self.step[some], peak)
            if self.timed:
                left = left[self.step[left] <= leaders.longest_of_any()]
