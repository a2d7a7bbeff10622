"""Search for the best plans: enumerate, price, drop what does not fit, rank, simulate the best."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.plan.plan import Plan, PlanTable
from cost_models.scenario import Scenario
from hardware_profiles.progress import report, stages
from planner.request.constraints import Constraint, counts_by_text, fewest_layers_are_best
from planner.request.limits import limits_of_trainer
from planner.request.options.choices import Objective, Recomputed
from planner.search.candidates import Candidates, joined, more_stages_than_layers
from planner.search.feasible import Feasible
from planner.search.gc_pause import fewer_collections
from planner.search.legal_plans import FEW, LegalPlans, Question, variants
from planner.search.priced_candidates import PricedCandidates
from planner.search.ranking import Ranked, Ranking
from planner.search.simplicity import CLOSE, Tie, distinct_first, simplest_first
from planner.search.sources.partial_recompute import varies_layers
from planner.search.sources.secondary_copies import SecondaryCopies
from planner.search.sources.short_pieces import family_bounds, short_pieces
from planner.search.sources.source import CandidateSource, EnumeratedSpace, Leaders
from planner.search.sources.virtual_stages import VirtualStages

Floats = NDArray[np.float64]
# seconds of the stages of a search, relative: memory, steps, simulations, partial recomputation,
# virtual stages
SIZES: Final = (5.0, 1.0, 1.0, 4.0, 2.0)


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
        question = Question(ranking, fixed or {}, require, offloads, begin)
        limits = Leaders(ranking, [*known])
        space = LegalPlans.of(question, candidates.legal, None, limits, priced)
        short: list[LegalPlans] = []  # complete if the first verdict leaves no leaders
        tally.broken += [candidates.excluded, space.broken[space.verdicts < 2]]
        for verdict in (0, 1):  # plans that fit; only if there are none, tight plans
            leaders, feasible = Leaders(ranking, [*known]), Feasible(scenario, require, verdict)
            more: Iterable[LegalPlans] = short
            if verdict == 0:
                tables = _reported(short_pieces(scenario, candidates.space, require, leaders))
                more = (LegalPlans.of(question, *one, leaders) for one in tables)
            for part in itertools.chain([space], more):
                if part is not space and verdict == 0:
                    short.append(part)
                for source in part.sources(feasible, leaders):
                    counted = isinstance(source, EnumeratedSpace) and part is space
                    tally.rank(source, ranking, feasible, leaders, counted=counted)
            for source in variants((space, *short), feasible):
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
        if scenario.on_gpu and sum(map(len, ends)) > FEW:
            ends = [one.rows(family_bounds(scenario, one)[0] <= most) for one in ends if len(one)]
        near = joined([*fast, *ends]).plain()
    others = set(map(id, known))
    ranked = [one for one in leaders.plans if id(one) not in others]
    return SearchResult(
        plans=tuple(plan for *_, plan in ranked),
        counts=tally.counts(candidates, space, short, require, time.perf_counter() - started),
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

    def counts(
        self,
        candidates: Candidates,
        space: LegalPlans,
        short: Sequence[LegalPlans],
        require: Sequence[Constraint],
        seconds: float,
    ) -> Counts:
        """Return the counts of a search of ``seconds``."""
        return Counts(
            enumerated=int(candidates.codes.sum()),
            illegal=candidates.illegal,
            priced=len(candidates.legal),
            slow=space.slow,
            too_large=len(candidates.legal) - space.slow - int(np.sum(space.verdicts < 2)),
            tight=int(np.sum(space.verdicts == 1)),
            seconds=seconds,
            simulated=self.simulated,
            short_pieces=sum(part.number for part in short),
            bounded_away=self.bounded_away,
            excluded=counts_by_text(require, np.concatenate(self.broken)),
            part_recomputed=self.part_recomputed,
            more_stages=self.more_stages,
            copies=self.copies,
        )

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
