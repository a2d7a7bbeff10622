"""Candidate sources: where the search gets its plans from, and the leaders they have to beat.

The search asks one source after another for batches of plans. A source holds a lower bound on the
step (or the peak) of each of its candidates; before every batch it drops the candidates whose
bound does not beat the leaders, and the leaders improve with every batch that is ranked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cost_models.plan.plan import PlanTable
from planner.search.ranking import Batch, Ranked, Ranking

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]


@dataclass(slots=True)
class Leaders:
    """The best plans so far, best first."""

    ranking: Ranking
    plans: list[Ranked] = field(default_factory=list)

    def add(self, more: list[Ranked]) -> None:
        """Merge in more plans; of equal plans the earlier one stays first."""
        self.plans = self.ranking.merged(self.plans, more)

    @property
    def longest_step(self) -> float:
        """Seconds that a plan has to beat by its step; infinite while there are too few leaders."""
        top = self.ranking.top
        return self.plans[top - 1][0] if len(self.plans) >= top else np.inf


class CandidateSource(Protocol):
    """Plans that the search may rank."""

    @property
    def enumerated(self) -> bool:
        """Whether the plans are rows of the enumerated space, rather than variations of them."""
        ...

    @property
    def priced(self) -> int:
        """Variations priced so far."""
        ...

    def batches(self, leaders: Leaders) -> Iterator[Batch]:
        """Yield the candidates that the leaders do not beat by their bounds."""
        ...


@dataclass(frozen=True, slots=True)
class EnumeratedSpace:
    """Rows of the enumerated space that fit: one batch, priced before."""

    table: PlanTable
    order: Rows
    step: Floats
    peak: Floats
    enumerated: bool = True
    priced: int = 0

    def batches(self, leaders: Leaders) -> Iterator[Batch]:
        """Yield all rows; the simulation bounds them by their steps in closed form."""
        yield Batch(self.table, self.order, self.step, self.peak)
