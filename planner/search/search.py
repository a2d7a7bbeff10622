"""Search for the best plans: enumerate, price, drop what does not fit, rank, simulate the best."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.arrays import ascending
from cost_models.columnar.dictionary_encoding import decode
from cost_models.plan.plan import SEARCHED_RECOMPUTE, Plan, PlanTable
from cost_models.pricing.table import table_least_states, table_steps
from cost_models.scenario import Scenario
from hardware_profiles.progress import report, stages
from planner.assessment.verdict import near_budget
from planner.request.constraints import (
    Constraint,
    broken_by_result,
    counts_by_text,
    fewest_layers_are_best,
)
from planner.request.limits import limits_of_trainer
from planner.request.objectives import results
from planner.request.options.choices import Objective, Recomputed
from planner.search.candidates import (
    Candidates,
    joined,
    more_stages_than_layers,
    varies_virtual_stages,
)
from planner.search.fast_plans import SLOW, fast_plans
from planner.search.feasible import Feasible, verdicts_of
from planner.search.gc_pause import fewer_collections
from planner.search.priced_candidates import PricedCandidates
from planner.search.ranking import Ranked, Ranking
from planner.search.simplicity import CLOSE, Tie, distinct_first, simplest_first
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
from planner.search.sources.short_pieces import short_pieces
from planner.search.sources.source import CandidateSource, EnumeratedSpace, Leaders
from planner.search.sources.virtual_stages import Interleaved, VirtualStages

Floats = NDArray[np.float64]
# seconds of the stages of a search, relative: memory, steps, simulations, partial recomputation,
# virtual stages
SIZES: Final = (5.0, 1.0, 1.0, 4.0, 2.0)
FEW: Final = 20_000  # plans that are all priced, not only what bounds of states and steps leave


class Counts(Struct, frozen=True, kw_only=True):
    """Numbers of candidates by outcome, in the order of the JSON document."""

    enumerated: int
    illegal: Mapping[str, int]
    excluded: Mapping[str, int] = {}  # legal, but break a requirement
    too_large: int
    tight: int
    priced: int  # legal plans that satisfy the requirements, slow ones too
    slow: int = 0  # slower than the best plans, so that their memory is not priced
    simulated: int = 0
    bounded_away: int = 0  # not simulated: the closed form exceeds the best simulated steps
    short_pieces: int = 0  # additional plans with short pieces of sequences
    part_recomputed: int = 0  # additional plans that recompute some layers of every stage
    more_stages: int = 0  # additional plans with other numbers of virtual stages
    copies: int = 0  # additional plans with a secondary copy of the weights
    seconds: float

    @property
    def legal(self) -> int:
        """Candidates that break no legality rule."""
        return self.enumerated - sum(self.illegal.values())

    @property
    def fitting(self) -> int:
        """Plans that fit with their whole interval."""
        return self.priced - self.slow - self.too_large - self.tight


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best plans, best first, and counts of all candidates."""

    plans: tuple[Plan, ...]
    counts: Counts
    smallest: Plan | None  # the legal plan with the smallest peak
    illegal_example: Mapping[str, str]  # for each broken rule, its message for one candidate
    seconds: tuple[float, ...] = ()  # of a step of each plan
    fits: bool = False  # the plans fit with their whole interval; else they are tight
    smallest_peak: float = np.inf  # bytes of the smallest plan
    tie: Tie | None = None  # if the simplest of the fastest is first
    # if they are asked for and a plan fits: legal plans whose stages may be chosen
    near: PlanTable | None = field(default=None, compare=False, repr=False)
    recomputed: Recomputed = "given"  # how many layers of these are recomputed may be chosen

    def first(self, number: int) -> SearchResult:
        """Return the result with the first plans only."""
        return replace(self, plans=self.plans[:number], seconds=self.seconds[:number])

    def simplest_first(self) -> SearchResult:
        """Return the result with the simplest of the fastest plans first, then other degrees.

        (``planner.search.simplicity``)
        """
        order = distinct_first(self.plans, simplest_first(self.seconds, self.plans))
        plans = tuple(self.plans[row] for row in order)
        seconds = tuple(self.seconds[row] for row in order)
        return replace(self, plans=plans, seconds=seconds, tie=Tie.of(self.seconds, self.plans))


@fewer_collections()
def search(
    scenario: Scenario,
    fixed: Mapping[str, Any] | None = None,
    *,
    top: int = 10,
    require: Sequence[Constraint] = (),
    objective: Objective = "time",
    offloads: Sequence[str] = ("none",),
    front: bool = False,
    distinct: int = 0,
    priced: PricedCandidates | None = None,
    with_near: bool = False,
    below: float = np.inf,
    known: Sequence[Ranked] = (),
) -> SearchResult:
    """Search DP x TP x PP x ZeRO with sequence parallelism, recompute and micro-batch size.

    Exhaustive: every candidate is enumerated, every legal one priced with the formulas that ``fit``
    uses. Plans that fit are sorted by step time, then by peak memory (by memory first for the
    ``objective`` memory); if none fits, plans whose interval contains the budget. Only plans that
    satisfy ``require`` are priced and returned. ``offloads``: allowed values of Plan.offload.
    ``front``: the Pareto front of time and memory instead of the first ``top``. ``distinct``: in
    addition every plan that is nearly as fast as the fastest, and the fastest plan of each of that
    many splits of the ranks (``planner.search.distinct``). ``priced``: the candidates of this
    scenario, if they are priced already (without ``require``). ``with_near``: return the plans
    whose stages may be chosen, too, unless their layers are given. ``below``: seconds of a step;
    only plans that fit and are faster are found, by time, and counts are of some of them.
    ``known``: plans of other searches; only plans that none of them beats are found.
    """
    started = time.perf_counter()
    if priced is None:
        candidates = Candidates.of(scenario, fixed or {}, require, offloads)
    else:
        candidates = priced.candidates
    distinct = 0 if front or objective == "memory" else distinct
    ranking = Ranking(scenario, objective, top, front, distinct, below)
    tally = _Tally()
    with stages(*SIZES) as begin:
        begin(f"searching {len(candidates.legal):,} plans")
        question = _Question(ranking, fixed or {}, require, offloads, begin)
        limits = Leaders(ranking, [*known])
        space = _Space.of(question, candidates.legal, None, limits, priced)
        short: list[_Space] = []  # complete if the first verdict leaves no leaders
        tally.broken += [candidates.excluded, space.broken[space.verdicts < 2]]
        for verdict in (0, 1):  # plans that fit; only if there are none, tight plans
            leaders, feasible = Leaders(ranking, [*known]), Feasible(scenario, require, verdict)
            more: Iterable[_Space] = short
            if verdict == 0:
                tables = _reported(short_pieces(scenario, candidates.space, require, leaders))
                more = (_Space.of(question, *one, leaders) for one in tables)
            for part in itertools.chain([space], more):
                if part is not space and verdict == 0:
                    short.append(part)
                for source in part.sources(feasible, leaders):
                    counted = isinstance(source, EnumeratedSpace) and part is space
                    tally.rank(source, ranking, feasible, leaders, counted=counted)
            for part in (space, *short):
                for source in part.variants(feasible):
                    tally.rank(source, ranking, feasible, leaders, counted=False)
            tight = any(np.any(part.verdicts == 1) for part in (space, *short))
            if leaders.plans or not (feasible.seen_tight or tight) or below < np.inf:
                break
    smallest = min((space, *short), key=lambda part: part.smallest_peak)
    near = None
    if with_near and chooses_stages(scenario, require):
        ends = more_stages_than_layers(scenario, question.fixed, require, offloads)
        most = (1.0 + CLOSE) * min((seconds for seconds, *_ in leaders.plans), default=np.inf)
        fast = [part.near.rows(part.near_bound <= most) for part in (space, *short)]
        near = joined([*fast, *ends]).plain()
    counts = Counts(
        enumerated=int(candidates.codes.sum()),
        illegal=candidates.illegal,
        priced=len(candidates.legal),
        slow=space.slow,
        too_large=len(candidates.legal) - space.slow - int(np.sum(space.verdicts < 2)),
        tight=int(np.sum(space.verdicts == 1)),
        seconds=time.perf_counter() - started,
        simulated=tally.simulated,
        short_pieces=sum(part.number for part in short),
        bounded_away=tally.bounded_away,
        excluded=counts_by_text(require, np.concatenate(tally.broken)),
        part_recomputed=tally.part_recomputed,
        more_stages=tally.more_stages,
        copies=tally.copies,
    )
    others = set(map(id, known))
    ranked = [one for one in leaders.plans if id(one) not in others]
    return SearchResult(
        plans=tuple(plan for *_, plan in ranked),
        counts=counts,
        smallest=smallest.smallest,
        illegal_example=candidates.examples,
        seconds=tuple(seconds for seconds, *_ in ranked),
        fits=bool(leaders.plans) and verdict == 0,
        smallest_peak=smallest.smallest_peak,
        near=near if leaders.plans and verdict == 0 else None,
        recomputed=chosen_recompute(scenario, question.fixed, require),
    )


class _Tally(Struct):
    """What a search simulates and prices besides the enumerated plans (``Counts``)."""

    simulated: int = 0
    bounded_away: int = 0
    part_recomputed: int = 0
    more_stages: int = 0
    copies: int = 0
    broken: list[NDArray[Any]] = []  # the requirement that a plan breaks

    def rank(
        self,
        source: CandidateSource,
        ranking: Ranking,
        feasible: Feasible,
        leaders: Leaders,
        *,
        counted: bool,
    ) -> None:
        """Rank the plans of a source; ``counted``: they are among the enumerated ones."""
        for batch in source.batches(leaders):
            best = ranking.rank(batch, feasible.broken(batch.table, batch.peak))
            leaders.add(best.plans(batch.table, batch.peak))
            self.simulated += best.simulated
            if counted:
                self.bounded_away += best.bounded_away
                self.broken.append(best.broken)
        if isinstance(source, SecondaryCopies):
            self.copies += source.priced
        elif isinstance(source, VirtualStages):
            self.more_stages += source.priced
            self.part_recomputed += source.part_recomputed
        else:
            self.part_recomputed += source.priced


def _reported(tables: Iterator[tuple[PlanTable, Floats]]) -> Iterator[tuple[PlanTable, Floats]]:
    """Yield tables of plans with short pieces; name the activity that finds each."""
    while True:
        report("finding plans with short pieces of sequences")
        try:
            table = next(tables)
        except StopIteration:
            return
        yield table


class _Question(Struct, frozen=True):
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


class _PricedPlans(Struct, frozen=True):
    """Legal plans with peaks and verdicts, without most of those that cannot be the best."""

    table: PlanTable
    step: Floats | None  # seconds; None: not priced yet
    peak: Floats  # bytes; infinity: not priced, since the plan is slow
    verdicts: NDArray[np.int8]
    bound: Floats  # seconds, of the steps of their families; 0: unknown
    slow: int = 0  # plans whose memory is not priced

    @classmethod
    def of(
        cls, question: _Question, legal: PlanTable, bound: Floats | None, leaders: Leaders
    ) -> _PricedPlans:
        """Price the legal plans whose states fit and that may beat the leaders."""
        scenario, ranking, states = question.scenario, question.ranking, np.zeros(len(legal))
        most = Feasible(scenario, (), 1).max_peak_at(1)  # of a plan that is tight
        enough = max(most, near_budget(scenario.cluster))
        if scenario.on_gpu and len(legal) > FEW:
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
    ) -> _PricedPlans:
        """Price the memory of plans."""
        bound = np.zeros(len(table)) if bound is None else bound
        return cls(table, None, *verdicts_of(scenario, table, enough), bound)


class _Space(Struct, frozen=True):
    """Legal plans of a question with peaks, verdicts and bounds on their steps."""

    question: _Question
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
        question: _Question,
        legal: PlanTable,
        bound: Floats | None,
        leaders: Leaders,
        known: PricedCandidates | None = None,
    ) -> _Space:
        """Price the legal plans that may beat the leaders.

        ``bound``: of the steps of their families in seconds (``fast_plans``), if it is known;
        ``known``: prices of these plans.
        """
        scenario, require, varies = question.scenario, question.require, question.varies_layers
        if known is None:
            plans = _PricedPlans.of(question, legal, bound, leaders)
        else:
            prices = known.step, known.peak, known.verdicts
            plans = _PricedPlans(legal, *prices, np.zeros(len(legal)))
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

    def variants(self, feasible: Feasible) -> Iterator[CandidateSource]:
        """Yield the other variants of the plans, which leaders of ``sources`` bound."""
        question, scenario = self.question, feasible.scenario
        modes = {"fewest": self.fewest, "every": self.every is not None}
        modes["smaller"] = question.smaller
        if self.interleaved is not None:
            question.begin("pricing virtual stages")
            yield VirtualStages(scenario, self.interleaved, feasible, **modes)
        if question.policies:
            question.begin("pricing policies of recomputation")
            listed = question.policies, self.table, self.step
            yield ListedRecompute(scenario, *listed, feasible, modes)
        if question.copies:
            question.begin("pricing secondary copies of weights")
            yield SecondaryCopies(scenario, self.table, self.peak, self.none, feasible, modes)


def chooses_stages(scenario: Scenario, require: Sequence[Constraint]) -> bool:
    """Whether plans may have stages of their own.

    None are given, the trainer has them, and all constraints on results are a minimum speed or a
    maximum memory.
    """
    given = scenario.layer_ranges is not None or scenario.stage_recompute_layers is not None
    table = limits_of_trainer(scenario, require)
    has_them = table is None or table.own_stages
    return has_them and not given and fewest_layers_are_best(require)


def chosen_recompute(
    scenario: Scenario, fixed: Mapping[str, Any], require: Sequence[Constraint]
) -> Recomputed:
    """Return which numbers of recomputed layers a search varies, if they are not pinned.

    Only the bundled executor has a number for each stage; Megatron has one for all.
    """
    if not varies_layers(scenario, fixed):
        return "given"
    return "by_stage" if limits_of_trainer(scenario, require) is None else "one_number"


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
