"""Search for the best plans: enumerate, price, drop what does not fit, rank, simulate the best."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_models.plan.plan import SEARCHED_RECOMPUTE, Plan, PlanTable
from cost_models.pricing.table import table_steps
from cost_models.scenario import Scenario
from planner.assessment.verdict import budget_bytes
from planner.request.constraints import (
    Constraint,
    broken_by_result,
    counts_by_text,
    fewest_layers_are_best,
)
from planner.request.objectives import Objective, results
from planner.search.candidates import Candidates
from planner.search.exhaustive_recompute import EveryNumber, FullRecompute, LayerGrids
from planner.search.feasible import Feasible, verdicts_of
from planner.search.gc_pause import seldom_collected
from planner.search.partial_recompute import (
    FULL,
    Families,
    FewestLayers,
    peaks_without,
    rows_too_large,
    varies_layers,
)
from planner.search.ranking import Ranking
from planner.search.sources import CandidateSource, EnumeratedSpace, Leaders

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the candidates."""

    enumerated: int
    illegal: Mapping[str, int]
    priced: int
    too_large: int
    tight: int
    seconds: float
    simulated: int = 0  # event by event
    bounded_away: int = 0  # their step in closed form is longer than the simulated ones
    excluded: Mapping[str, int] = field(default_factory=dict)  # legal, but not what is required
    part_recomputed: int = 0  # more of them, with some layers of every stage recomputed

    @property
    def legal(self) -> int:
        """Candidates that break no rule, as required or not."""
        return self.enumerated - sum(self.illegal.values())

    @property
    def fitting(self) -> int:
        """Plans that fit with their whole interval."""
        return self.priced - self.too_large - self.tight


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best plans, best first, and what the search saw."""

    plans: tuple[Plan, ...]
    counts: Counts
    smallest: Plan | None  # the legal plan with the smallest peak
    illegal_example: Mapping[str, str]  # for each broken rule, the words for one candidate


@seldom_collected()
def search(
    scenario: Scenario,
    fixed: Mapping[str, Any] | None = None,
    *,
    top: int = 10,
    require: Sequence[Constraint] = (),
    objective: Objective = "time",
    offloads: Sequence[str] = ("none",),
    front: bool = False,
) -> SearchResult:
    """Search DP x TP x PP x ZeRO with sequence parallelism, recompute and micro-batch size.

    Exhaustive: every candidate is enumerated, every legal one priced with the formulas that ``fit``
    uses. Plans that fit come first, by step time, then by peak memory (the other way round where
    memory is the ``objective``); where none fits, those whose interval straddles the budget. Only
    plans that satisfy ``require`` are priced, or shown. ``offloads``: what may leave the
    accelerators. ``front``: all plans that no other one beats in time and memory at once, instead
    of the first ``top``.
    """
    started = time.perf_counter()
    candidates = Candidates.of(scenario, fixed or {}, require, offloads)
    ranking = Ranking(scenario, objective, top, front)
    space = _Space.of(candidates.legal, ranking, fixed or {}, require, offloads)
    simulated = bounded_away = priced = 0
    codes: list[NDArray[Any]] = [candidates.unwanted, space.short[space.verdicts < 2]]
    for verdict in (0, 1):  # plans that fit; only where there are none, those that may
        leaders, feasible = Leaders(ranking), Feasible(scenario, require, verdict)
        for source in space.sources(feasible, leaders):
            for batch in source.batches(leaders):
                broken = feasible.broken(batch.table, batch.peak)
                ranked = ranking.rank(batch, broken)
                leaders.add(ranked.plans(batch.table, batch.peak))
                simulated += ranked.simulated
                if source.enumerated:
                    bounded_away += ranked.bounded_away
                    codes.append(ranked.broken)
            priced += source.priced
        if leaders.plans or not (feasible.seen_tight or np.any(space.verdicts == 1)):
            break
    counts = Counts(
        enumerated=int(candidates.codes.sum()),
        illegal=candidates.illegal,
        priced=len(candidates.legal),
        too_large=len(candidates.legal) - int(np.sum(space.verdicts < 2)),
        tight=int(np.sum(space.verdicts == 1)),
        seconds=time.perf_counter() - started,
        simulated=simulated,
        bounded_away=bounded_away,
        excluded=counts_by_text(require, np.concatenate(codes)),
        part_recomputed=priced,
    )
    return SearchResult(
        plans=tuple(plan for *_, plan in leaders.plans),
        counts=counts,
        smallest=space.smallest,
        illegal_example=candidates.examples,
    )


@dataclass(frozen=True, slots=True)
class _Space:
    """The legal plans of a scenario with memory, verdicts and steps."""

    table: PlanTable  # those that fit, are tight, or may fit with fewer recomputed layers
    peak: Floats
    none: Floats  # bytes of the same plan with nothing recomputed; nan: unknown
    step: Floats  # seconds, lower bound
    verdicts: NDArray[np.int8]
    short: NDArray[np.int16]  # position (from 1) of a constraint that the plan breaks at best; 0
    fewest: bool  # of the numbers of recomputed layers the fewest that fit are the best
    every: FullRecompute | None  # plans of which every number of recomputed layers is a candidate
    smallest: Plan | None  # with the smallest peak of all legal plans
    smaller: bool  # a larger peak than with all layers recomputed never wins

    @classmethod
    def of(
        cls,
        legal: PlanTable,
        ranking: Ranking,
        fixed: Mapping[str, Any],
        require: Sequence[Constraint],
        offloads: Sequence[str],
    ) -> _Space:
        """Price the legal plans."""
        scenario, objective = ranking.scenario, ranking.objective
        enough = 4.0 * budget_bytes(scenario.cluster)  # larger peaks need not be exact
        peak, verdicts = verdicts_of(scenario, legal, enough)
        if len(legal) and peak.min() > enough:
            peak, verdicts = verdicts_of(scenario, legal)
        smallest = legal.plan(int(np.argmin(peak))) if len(legal) else None
        apart = len(offloads) * SEARCHED_RECOMPUTE.index("full")
        varies = varies_layers(scenario, fixed)
        fewest = objective != "memory" and not ranking.front and fewest_layers_are_best(require)
        leaves_some = any("activations" in words for words in offloads)
        none = peaks_without(legal, peak, apart) if varies else np.full(len(legal), np.nan)
        every = None
        if varies and (leaves_some or not fewest):
            every = FullRecompute.of(legal, peak, none, offloaded=fewest)
        rows = np.flatnonzero(verdicts < 2)
        if varies and fewest:
            most = Feasible(scenario, require, 1).most
            rows = np.union1d(rows, rows_too_large(scenario, legal, peak, none, most))
        table, peak = legal.rows(rows).plain(), peak[rows]
        step = table_steps(scenario, table)
        at_best = results(scenario, table, step, peak)
        return cls(
            table=table,
            peak=peak,
            none=none[rows],
            step=step,
            verdicts=verdicts[rows],
            short=broken_by_result(require, at_best, len(table), at_best=True),
            fewest=varies and fewest,
            every=every,
            smallest=smallest,
            smaller=objective == "memory" and not any(c.of_result for c in require),
        )

    def sources(self, feasible: Feasible, leaders: Leaders) -> Iterator[CandidateSource]:
        """Yield the sources for one verdict, the enumerated space first.

        The others are bounded by the leaders that the enumerated space leaves behind.
        """
        ranking, scenario = leaders.ranking, feasible.scenario
        mine = np.flatnonzero((self.short == 0) & (self.verdicts == feasible.verdict))
        order = ranking.order(self.table, mine, self.step, self.peak)
        yield EnumeratedSpace(self.table, order, self.step, self.peak)
        # without a leader plans that may be tight are candidates, too
        widest = feasible.most if leaders.plans else feasible.most_at(1)
        sources: list[CandidateSource] = []
        if self.fewest:
            whole = np.flatnonzero(_recomputes_all(self.table))
            whole = whole[~(self.none[whole] <= feasible.most)]  # those are faster, and fit
            peaks = self.peak[whole], self.none[whole]
            families = Families.of(
                scenario, self.table.rows(whole), self.step[whole], peaks, widest
            )
            sources.append(FewestLayers(scenario, families, feasible))
        if self.every is not None:
            grids = LayerGrids.of(scenario, self.every, widest, timed=bool(leaders.plans))
            sources.append(EveryNumber.of(grids, feasible, leaders, smaller=self.smaller))
        yield from sources


def _recomputes_all(table: PlanTable) -> NDArray[np.bool_]:
    """Return which plans recompute all layers and keep their activations on the accelerator."""
    all_of_them: NDArray[np.bool_] = (table.recompute == FULL) & ~table.offloads_activations
    return all_of_them
