"""Legal plans of a search with their prices, and the sources of candidates that they give.

Most plans that cannot be the best are not priced: those whose states are too large, and in large
tables those that a lower bound of their step shows to be slow (``fast_plans``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.arrays import ascending
from cost_models.columnar.dictionary_encoding import decode
from cost_models.plan.plan import SEARCHED_RECOMPUTE, Plan, PlanTable
from cost_models.pricing.table import table_least_states, table_steps
from cost_models.scenario import Scenario
from planner.assessment.verdict import near_budget
from planner.request.constraints import Constraint, broken_by_result, fewest_layers_are_best
from planner.request.objectives import results
from planner.search.candidates import varies_virtual_stages
from planner.search.fast_plans import SLOW, fast_plans
from planner.search.feasible import Feasible, verdicts_of
from planner.search.priced_candidates import PricedCandidates
from planner.search.ranking import Ranking
from planner.search.sources.exhaustive_recompute import EveryNumber, FullRecompute, LayerGrids
from planner.search.sources.listed_recompute import ListedRecompute, listed_recompute
from planner.search.sources.partial_recompute import (
    FULL,
    PRICING,
    ROUNDING,
    Families,
    FewestLayers,
    peaks_without,
    rows_too_large,
    varies_layers,
)
from planner.search.sources.secondary_copies import SecondaryCopies, has_copies
from planner.search.sources.source import CandidateSource, EnumeratedSpace, Leaders
from planner.search.sources.virtual_stages import Interleaved, VirtualStages

Floats = NDArray[np.float64]
FEW: Final = 20_000  # plans that are all priced, not only what bounds of states and steps leave


class Question(Struct, frozen=True):
    """What is searched, and which variants of the enumerated plans are candidates, too."""

    ranking: Ranking
    fixed: Mapping[str, Any]
    require: Sequence[Constraint]
    offloads: Sequence[str]
    begin: Callable[[str], None]  # names what is done

    @property
    def scenario(self) -> Scenario:
        """The scenario of all plans."""
        return self.ranking.scenario

    @property
    def varies_layers(self) -> bool:
        """Whether plans that recompute some layers of every stage are candidates."""
        return varies_layers(self.scenario, self.fixed)

    @property
    def fewest(self) -> bool:
        """Whether the fewest recomputed layers that fit are the best."""
        return self.ranking.by_step and fewest_layers_are_best(self.require)

    @property
    def smaller(self) -> bool:
        """Whether plans with a larger peak than with full recomputation cannot be the best."""
        of_result = any(constraint.of_result for constraint in self.require)
        return self.ranking.objective == "memory" and not of_result

    @property
    def copies(self) -> bool:
        """Whether the weights of ZeRO 3 may have a secondary copy."""
        of_memory = self.ranking.objective == "memory"
        return not of_memory and has_copies(self.scenario, self.fixed, self.require)

    @property
    def policies(self) -> Sequence[str]:
        """Further values of recompute that the trainer has."""
        return listed_recompute(self.scenario, self.fixed, self.require)

    @property
    def max_offset(self) -> int:
        """Rows between a plan and the same without recomputation (``peaks_without``)."""
        return len(self.offloads) * SEARCHED_RECOMPUTE.index("full")


class PricedPlans(Struct, frozen=True):
    """Legal plans with peaks and verdicts, without most of those that cannot be the best."""

    table: PlanTable
    step: Floats | None  # seconds; None: not priced yet
    peak: Floats  # bytes; infinity: not priced, since the plan is slow
    verdicts: NDArray[np.int8]
    bound: Floats  # seconds, of the steps of their families; 0: unknown
    slow: int = 0  # plans whose memory is not priced

    @classmethod
    def of(
        cls, question: Question, legal: PlanTable, bound: Floats | None, leaders: Leaders
    ) -> PricedPlans:
        """Price the legal plans whose states fit and that may beat the leaders."""
        scenario, ranking, states = question.scenario, question.ranking, np.zeros(len(legal))
        most = Feasible(scenario, (), 1).max_peak_at(1)  # of a plan that is tight
        enough = max(most, near_budget(scenario.cluster))
        # ``short_pieces`` leaves out plans by their states already
        known = bound is not None and leaders.plans and len(question.offloads) == 1
        if scenario.on_gpu and len(legal) > FEW and not known:
            states = table_least_states(scenario, legal) * (1.0 - ROUNDING)
        rows = np.flatnonzero(states <= most)
        small, bound = legal.rows(rows), None if bound is None else bound[rows]
        many, alike = len(small) > FEW, not (scenario.cluster.levels or question.copies)
        # in an order of its own, or with copies, a slow plan may be among the best
        by_time = ranking.by_step and scenario.on_gpu and alike and (bool(leaders.plans) or many)
        if bound is None and not (by_time and many):
            bound = np.zeros(len(small))
        if by_time or ranking.below < np.inf:
            fewer = question.varies_layers or question.policies
            offset = question.max_offset if fewer else 0
            feasible = Feasible(scenario, question.require, 0)
            fast = fast_plans(leaders, feasible, small, bound, enough, max_offset=offset)
            slow = len(small) - int(np.sum(fast.verdicts != SLOW))
            prices = fast.step, fast.peak, fast.verdicts, fast.bound
            found = cls(fast.table, *prices, slow)
        else:
            found = cls.with_memory(scenario, small, enough, bound)
        lowest = np.min(found.peak, initial=np.inf)
        if lowest > most and not found.slow and np.any(states > most):
            return cls.with_memory(scenario, legal.rows(np.flatnonzero(states <= lowest)), enough)
        return found

    @classmethod
    def with_memory(
        cls, scenario: Scenario, table: PlanTable, enough: float, bound: Floats | None = None
    ) -> PricedPlans:
        """Price the memory of plans."""
        bound = np.zeros(len(table)) if bound is None else bound
        return cls(table, None, *verdicts_of(scenario, table, enough), bound)


class LegalPlans(Struct, frozen=True):
    """Legal plans of a question with peaks, verdicts and bounds on their steps."""

    question: Question
    table: PlanTable  # plans that fit, are tight, or may fit with fewer recomputed layers
    peak: Floats
    none: Floats  # peak bytes of the same plan without recomputation; nan: unknown
    step: Floats  # seconds, lower bound
    verdicts: NDArray[np.int8]
    number: int  # of legal plans
    slow: int  # of these: they cannot be among the best
    broken: NDArray[np.int16]  # position (from 1) of a constraint that the bounds break; 0: none
    every: FullRecompute | None  # plans whose every number of recomputed layers is a candidate
    interleaved: Interleaved | None  # plans whose every number of virtual stages is a candidate
    smallest: Plan | None  # with the smallest peak of all legal plans
    smallest_peak: float  # bytes
    near: PlanTable  # legal plans that may fit with stages of their own
    near_bound: Floats  # seconds, of the steps of these with any stages; 0: unknown

    @property
    def fewest(self) -> bool:
        """Whether fewer recomputed layers are candidates, and the fewest that fit the best."""
        return self.question.varies_layers and self.question.fewest

    @classmethod
    def of(
        cls,
        question: Question,
        legal: PlanTable,
        bound: Floats | None,
        leaders: Leaders,
        known: PricedCandidates | None = None,
    ) -> LegalPlans:
        """Price the legal plans that may beat the leaders.

        ``bound``: of the steps of their families in seconds (``fast_plans``), if it is known;
        ``known``: prices of these plans.
        """
        scenario, require, varies = question.scenario, question.require, question.varies_layers
        if known is None:
            plans = PricedPlans.of(question, legal, bound, leaders)
        else:
            prices = known.step, known.peak, known.verdicts
            plans = PricedPlans(legal, *prices, np.zeros(len(legal)))
        found, peak = plans.table, plans.peak
        exact = np.where(peak < np.inf, peak, np.nan)
        none = np.full(len(found), np.nan)
        if varies:
            none = peaks_without(found, exact, question.max_offset)
        interleaved, every = None, None
        leaves_some = any("activations" in words for words in question.offloads)
        if varies and (leaves_some or not question.fewest):
            rows = np.flatnonzero(peak < np.inf)
            offloaded = question.fewest
            every = FullRecompute.of(found.rows(rows), peak[rows], none[rows], offloaded=offloaded)
        if "virtual_stages" not in question.fixed and varies_virtual_stages(scenario, require):
            interleaved = Interleaved.of(scenario, found, exact, none)
        rows = np.flatnonzero(plans.verdicts < 2)
        if varies and question.fewest:
            tight = Feasible(scenario, require, 1)
            limits = tight.max_peak, tight.max_peak_at(1)
            rows = ascending(rows, rows_too_large(scenario, found, peak, none, limits))
        small = exact <= near_budget(scenario.cluster)
        if question.ranking.below == np.inf:
            small |= np.isnan(exact)
        near = _near(found, small)
        question.begin(f"pricing the steps of {len(rows):,} plans")
        table = found.rows(rows).plain()
        step = table_steps(scenario, table) if plans.step is None else plans.step[rows]
        at_best = results(scenario, table, step, peak[rows])
        return cls(
            question=question,
            table=table,
            peak=peak[rows],
            none=none[rows],
            step=step,
            verdicts=plans.verdicts[rows],
            number=len(legal),
            slow=plans.slow,
            broken=broken_by_result(require, at_best, len(table), at_best=True),
            every=every,
            interleaved=interleaved,
            smallest=found.plan(int(np.argmin(peak))) if len(found) else None,
            smallest_peak=float(np.min(peak, initial=np.inf)),
            near=found.rows(near),
            near_bound=plans.bound[near],
        )

    def sources(self, feasible: Feasible, leaders: Leaders) -> Iterator[CandidateSource]:
        """Yield the enumerated plans of one verdict, then their variants that recompute less."""
        ranking, scenario = leaders.ranking, feasible.scenario
        mine = np.flatnonzero((self.broken == 0) & (self.verdicts == feasible.verdict))
        if leaders.plans:
            beaten = ranking.beaten(leaders.plans)
            mine = mine[~beaten(self.table.rows(mine), self.step[mine], self.peak[mine])]
        order = ranking.order(self.table, mine, self.step, self.peak)
        self.question.begin("simulating the best plans")
        yield EnumeratedSpace(self.table, order, self.step, self.peak)
        self.question.begin(PRICING)
        # without a leader, plans that may be tight are candidates, too
        max_peak = feasible.max_peak if leaders.plans else feasible.max_peak_at(1)
        if self.fewest:
            whole = np.flatnonzero(_recomputes_all(self.table))
            whole = whole[~(self.none[whole] <= feasible.max_peak)]  # without recomputation: faster
            peaks = self.peak[whole], self.none[whole]
            families = Families.of(
                scenario, self.table.rows(whole), self.step[whole], peaks, max_peak
            )
            yield FewestLayers(scenario, families, feasible)
        if self.every is not None:
            grids = LayerGrids.of(scenario, self.every, max_peak, timed=bool(leaders.plans))
            yield EveryNumber.of(grids, feasible, leaders, smaller=self.question.smaller)


def variants(parts: Sequence[LegalPlans], feasible: Feasible) -> Iterator[CandidateSource]:
    """Yield the other variants of the plans, which leaders of their ``sources`` bound."""
    question, scenario = parts[0].question, feasible.scenario
    modes = {"fewest": parts[0].fewest, "every": parts[0].every is not None}
    modes["smaller"] = question.smaller
    interleaved = [part.interleaved for part in parts if part.interleaved is not None]
    if interleaved:
        question.begin("pricing virtual stages")
        yield VirtualStages(scenario, Interleaved.joined(interleaved), feasible, **modes)
    for one in parts:
        if question.policies:
            question.begin("pricing policies of recomputation")
            listed = question.policies, one.table, one.step
            yield ListedRecompute(scenario, *listed, feasible, modes)
        if question.copies:
            question.begin("pricing secondary copies of weights")
            yield SecondaryCopies(scenario, one.table, one.peak, one.none, feasible, modes)


def _near(legal: PlanTable, small: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return plans whose peak is small enough for stages of their own, or unknown.

    Without a pipeline, every number of recomputed layers is a candidate of the search already.
    """
    rows = np.flatnonzero(small)
    piped = decode(legal.pipeline_parallel)[rows] > 1
    found: NDArray[np.intp] = rows[piped | (decode(legal.recompute)[rows] != FULL)]
    return found


def _recomputes_all(table: PlanTable) -> NDArray[np.bool_]:
    """Return which plans recompute all layers and keep their activations on the accelerator."""
    rows: NDArray[np.bool_] = (table.recompute == FULL) & ~table.offloads_activations
    return rows
