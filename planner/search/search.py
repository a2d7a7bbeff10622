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

from cost_models.columnar.dictionary_encoding import decode
from cost_models.plan.plan import SEARCHED_RECOMPUTE, Plan, PlanTable
from cost_models.pricing.table import table_least_states, table_steps
from cost_models.scenario import Scenario
from hardware_profiles.progress import report, stages
from planner.assessment.verdict import budget_bytes
from planner.request.choices import Objective, Recomputed
from planner.request.constraints import (
    Constraint,
    broken_by_result,
    counts_by_text,
    fewest_layers_are_best,
)
from planner.request.limits import limits_of_trainer
from planner.request.objectives import results
from planner.search.candidates import (
    Candidates,
    joined,
    more_stages_than_layers,
    varies_virtual_stages,
)
from planner.search.exhaustive_recompute import EveryNumber, FullRecompute, LayerGrids
from planner.search.feasible import UNKNOWN, Feasible, Peaks, verdicts_of
from planner.search.gc_pause import fewer_collections
from planner.search.listed_recompute import ListedRecompute, listed_recompute
from planner.search.partial_recompute import (
    FULL,
    MOST_SAVED,
    PRICING,
    ROUNDING,
    Families,
    FewestLayers,
    peaks_without,
    rows_too_large,
    varies_layers,
)
from planner.search.priced_candidates import PricedCandidates
from planner.search.ranking import Ranked, Ranking
from planner.search.secondary_copies import SecondaryCopies, has_copies
from planner.search.short_pieces import family_bounds, short_pieces
from planner.search.simplicity import Tie, distinct_first, simplest_first
from planner.search.sources import CandidateSource, EnumeratedSpace, Leaders
from planner.search.virtual_stages import VirtualStages

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
# seconds of the stages of a search, relative: steps, memory and simulations, partial recomputation,
# virtual stages
SIZES: Final = (2.0, 3.0, 3.0, 2.0)
FEW: Final = 20_000  # plans whose model states alone are not priced before their peaks
NEAR: Final = 1.5  # budgets: no stages are chosen with larger peaks, which need not be exact


class Counts(Struct, frozen=True):
    """Numbers of candidates by outcome."""

    enumerated: int
    illegal: Mapping[str, int]
    priced: int
    too_large: int
    tight: int
    seconds: float
    simulated: int = 0
    bounded_away: int = 0  # not simulated: the closed form exceeds the best simulated steps
    excluded: Mapping[str, int] = {}  # legal, but break a requirement
    short_pieces: int = 0  # additional plans with short pieces of sequences
    part_recomputed: int = 0  # additional plans that recompute some layers of every stage
    more_stages: int = 0  # additional plans with other numbers of virtual stages
    copies: int = 0  # additional plans with a secondary copy of the weights
    slower: int = 0  # legal, but slower than the best by their bounds: without a peak

    @property
    def legal(self) -> int:
        """Candidates that break no legality rule."""
        return self.enumerated - sum(self.illegal.values())

    @property
    def fitting(self) -> int:
        """Plans that fit with their whole interval."""
        return self.priced - self.slower - self.too_large - self.tight


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best plans, best first, and counts of all candidates."""

    plans: tuple[Plan, ...]
    counts: Counts
    smallest: Plan | None  # the legal plan with the smallest peak, if all peaks are priced
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
    ``objective`` memory); if none fits, plans whose interval contains the budget. Peaks of plans
    that are slower than the best are not priced. Only plans that satisfy ``require`` are priced and
    returned. ``offloads``: allowed values of Plan.offload.
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
    pins = fixed or {}
    tally = _Tally()
    with stages(*SIZES) as begin:
        begin(f"searching {len(candidates.legal):,} plans")
        space = _Space.of(candidates.legal, ranking, pins, require, offloads, priced, begin)
        short: list[_Space] = []  # complete if the first verdict leaves no leaders
        tally.broken += [candidates.excluded, space.broken[space.peaks.verdicts < 2]]
        for verdict in (0, 1):  # plans that fit; only if there are none, tight plans
            leaders, feasible = Leaders(ranking, [*known]), Feasible(scenario, require, verdict)
            more: Iterable[_Space] = short
            if verdict == 0:
                tables = _reported(short_pieces(scenario, pins, require, offloads, leaders))
                more = (_Space.of(t, ranking, pins, require, offloads, None, begin) for t in tables)
            for part in itertools.chain([space], more):
                if part is not space and verdict == 0:
                    short.append(part)
                for source in part.sources(feasible, leaders, begin):
                    counted = isinstance(source, EnumeratedSpace) and part is space
                    tally.rank(source, ranking, feasible, leaders, counted=counted)
            for part in (space, *short):
                for source in part.variants(feasible, leaders, begin):
                    tally.rank(source, ranking, feasible, leaders, counted=False)
            tight = any(np.any(part.peaks.verdicts == 1) for part in (space, *short))
            if leaders.plans or not (feasible.seen_tight or tight) or below < np.inf:
                break
    smallest_peak, smallest = min(
        (part.smallest() for part in (space, *short)), key=lambda one: one[0]
    )
    near, recomputed = None, chosen_recompute(scenario, pins, require)
    if with_near and chooses_stages(scenario, require):
        ends = more_stages_than_layers(scenario, pins, require, offloads)
        ends = [
            one.rows(_may_win(scenario, one.plain(), leaders)) if len(one) > FEW else one
            for one in ends
        ]
        near = joined(
            [*(part.near(leaders, recomputed) for part in (space, *short)), *ends]
        ).plain()
    counts = Counts(
        enumerated=int(candidates.codes.sum()),
        illegal=candidates.illegal,
        priced=len(candidates.legal),
        too_large=space.without_states + int(np.sum(space.peaks.verdicts == 2)),
        tight=int(np.sum(space.peaks.verdicts == 1)),
        slower=int(np.sum(space.peaks.verdicts == UNKNOWN)),
        seconds=time.perf_counter() - started,
        simulated=tally.simulated,
        short_pieces=sum(len(part.whole) for part in short),
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
        smallest=smallest,
        illegal_example=candidates.examples,
        seconds=tuple(seconds for seconds, *_ in ranked),
        fits=bool(leaders.plans) and verdict == 0,
        smallest_peak=smallest_peak,
        near=near if leaders.plans and verdict == 0 else None,
        recomputed=recomputed,
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


def _reported(tables: Iterator[PlanTable]) -> Iterator[PlanTable]:
    """Yield tables of plans with short pieces; name the activity that finds each."""
    while True:
        report("finding plans with short pieces of sequences")
        try:
            table = next(tables)
        except StopIteration:
            return
        yield table


class _Space(Struct, frozen=True):
    """Legal plans of a scenario with bounds on their steps; peaks are priced where they matter."""

    scenario: Scenario
    table: PlanTable  # legal plans whose model states may fit, dictionary-encoded
    peaks: Peaks
    none: Floats  # row of the same plan without recomputation; nan: none
    step: Floats  # seconds, lower bound; infinite: too large
    broken: NDArray[np.int16]  # position (from 1) of a constraint that the bounds break; 0: none
    timed: bool  # slow plans are dropped before their peaks are priced
    fewest: bool  # the fewest recomputed layers that fit are the best
    every: FullRecompute | None  # plans whose every number of recomputed layers is a candidate
    loops: bool  # every number of virtual stages is a candidate
    smaller: bool  # plans with a larger peak than with full recomputation cannot be the best
    copies: bool  # the weights of ZeRO 3 may have a secondary copy
    policies: Sequence[str]  # further values of recompute that the trainer has
    whole: PlanTable  # all legal plans
    states: Floats  # bytes of these: lower bound

    @classmethod
    def of(
        cls,
        legal: PlanTable,
        ranking: Ranking,
        fixed: Mapping[str, Any],
        require: Sequence[Constraint],
        offloads: Sequence[str],
        priced: PricedCandidates | None,
        begin: Callable[[str], None],
    ) -> _Space:
        """Price the legal plans; ``begin`` names what is done."""
        scenario, objective = ranking.scenario, ranking.objective
        varies = varies_layers(scenario, fixed)
        whole, states, most = legal, np.zeros(len(legal)), _most_bytes(scenario)
        if priced is None and scenario.on_gpu and len(legal) > FEW:
            states = table_least_states(scenario, legal) * (1.0 - ROUNDING)
            legal = legal.rows(np.flatnonzero(states <= most))
        fewest = objective != "memory" and not ranking.front and fewest_layers_are_best(require)
        leaves_some = any("activations" in words for words in offloads)
        every = varies and (leaves_some or not fewest)
        of_result = any(constraint.of_result for constraint in require)
        timed = priced is None and ranking.by_time and not (every or of_result)
        enough = max(most, NEAR * budget_bytes(scenario.cluster))
        peaks = Peaks.of(scenario, legal, enough)
        none = np.full(len(legal), np.nan)
        if varies:
            max_offset = len(offloads) * SEARCHED_RECOMPUTE.index("full")
            none = peaks_without(legal, np.arange(len(legal), dtype=float), max_offset)
        if priced is not None:
            peaks.peak, peaks.verdicts, step = priced.peak, priced.verdicts, priced.step
        elif timed:
            step = table_steps(scenario, legal)
        else:
            peak, step = peaks.of_rows(np.arange(len(legal))), np.full(len(legal), np.inf)
            rows = np.flatnonzero(peaks.verdicts < 2)
            if varies and fewest:
                tight = Feasible(scenario, require, 1)
                limits = tight.max_peak, tight.max_peak_at(1)
                large = rows_too_large(scenario, legal, peak, peaks.of_rows(none), limits)
                rows = np.union1d(rows, large)
            step[rows] = table_steps(scenario, legal.rows(rows))
        broken = np.zeros(len(legal), dtype=np.int16)
        if of_result:
            rows = np.flatnonzero(step < np.inf)
            at_best = results(scenario, legal.rows(rows).plain(), step[rows], peaks.peak[rows])
            broken[rows] = broken_by_result(require, at_best, len(rows), at_best=True)
        return cls(
            scenario,
            legal,
            peaks,
            none,
            step,
            broken,
            timed=timed,
            fewest=varies and fewest,
            every=FullRecompute.of(legal, peaks.peak, peaks.of_rows(none), offloaded=fewest)
            if every
            else None,
            loops="virtual_stages" not in fixed and varies_virtual_stages(scenario, require),
            smaller=objective == "memory" and not of_result,
            copies=objective != "memory" and has_copies(scenario, fixed, require),
            policies=listed_recompute(scenario, fixed, require),
            whole=whole,
            states=states,
        )

    @property
    def without_states(self) -> int:
        """Number of plans whose model states alone are too large."""
        return len(self.whole) - len(self.table)

    def smallest(self) -> tuple[float, Plan | None]:
        """Return the smallest peak in bytes, and its plan; None: some peaks are not priced."""
        peaks, whole = self.peaks, self.whole
        if len(whole) == 0 or np.any(peaks.verdicts == UNKNOWN):
            return np.inf, None
        table, peak = self.table, peaks.peak
        if np.min(peak, initial=np.inf) > peaks.enough:  # none is exact
            peak, _ = verdicts_of(self.scenario, table)
        lowest = np.min(peak, initial=np.inf)
        if lowest > _most_bytes(self.scenario) and self.without_states:
            table = whole.rows(np.flatnonzero(self.states <= lowest))
            peak, _ = verdicts_of(self.scenario, table)
        return float(peak.min()), table.plan(int(np.argmin(peak)))

    def near(self, leaders: Leaders, recomputed: Recomputed) -> PlanTable:
        """Return plans that may fit with stages of their own and may then be the fastest.

        Without a pipeline, every number of recomputed layers is a candidate of the search already.
        """
        piped = decode(self.table.pipeline_parallel) > 1
        rows = np.flatnonzero(piped | (decode(self.table.recompute) != FULL))
        most = NEAR * budget_bytes(self.scenario.cluster)
        rows = rows[~(self.peaks.peak[rows] > most)]
        if np.any(self.peaks.verdicts[rows] == UNKNOWN) and not self.scenario.cluster.levels:
            loops = (decode(self.table.virtual_stages) > 1) & (len(self.scenario.model.kinds) > 1)
            keeps = loops | ~piped  # layers; recomputation makes no step shorter
            longest = leaders.plans[0][0] if leaders.plans else np.inf
            rows = rows[~keeps[rows] | ~(self._without(rows) >= longest)]
            if recomputed == "by_stage":  # plans that recompute all layers stand for them
                full = rows[decode(self.table.recompute)[rows] == FULL]
                rows = np.setdiff1d(rows, self.none[full])
            rows = rows[_may_win(self.scenario, self.table.rows(rows).plain(), leaders)]
        return self.table.rows(rows[self.peaks.of_rows(rows) <= most])

    def sources(
        self, feasible: Feasible, leaders: Leaders, begin: Callable[[str], None]
    ) -> Iterator[CandidateSource]:
        """Yield the enumerated plans of one verdict, then their variants that recompute less."""
        scenario = feasible.scenario
        begin("simulating the best plans")
        rows = np.flatnonzero((self.broken == 0) & (self.step < np.inf))
        columns = self.table, rows, self.step, self.peaks
        yield EnumeratedSpace(*columns, feasible.verdict, timed=self.timed)
        begin(PRICING)
        # without a leader, plans that may be tight are candidates, too
        max_peak = feasible.max_peak if leaders.plans else feasible.max_peak_at(1)
        if self.fewest:
            rows, table = self._recomputing_all(leaders)
            none = self.peaks.of_rows(self.none[rows])
            slower = ~(none <= feasible.max_peak)  # than without recomputation, if that fits
            rows, table, none = rows[slower], table.rows(slower), none[slower]
            peaks = self.peaks.of_rows(rows), none
            families = Families.of(scenario, table, self.step[rows], peaks, max_peak)
            yield FewestLayers(scenario, families, feasible)
        if self.every is not None:
            grids = LayerGrids.of(scenario, self.every, max_peak, timed=bool(leaders.plans))
            yield EveryNumber.of(grids, feasible, leaders, smaller=self.smaller)

    def _recomputing_all(self, leaders: Leaders) -> tuple[Rows, PlanTable]:
        """Return plans that recompute all layers, and may beat the leaders if they do not."""
        rows = np.flatnonzero(decode(self.table.recompute) == FULL)
        bound = np.fmax(self.step[rows] * (1.0 - MOST_SAVED), self._without(rows))
        kept = bound * (1.0 - ROUNDING) < leaders.longest_of_any()
        rows, bound = rows[kept], bound[kept] * (1.0 - ROUNDING)
        table = self.table.rows(rows).plain()
        kept = (bound < leaders.longest(table)) & ~table.offloads_activations
        return rows[kept], table.rows(kept)

    def _without(self, rows: Rows) -> Floats:
        """Return the steps of plans without their recomputation in seconds; nan: unknown."""
        none, step = self.none[rows], np.full(len(rows), np.nan)
        known = np.flatnonzero(~np.isnan(none))
        step[known] = self.step[none[known].astype(np.intp)]
        return step

    def variants(
        self, feasible: Feasible, leaders: Leaders, begin: Callable[[str], None]
    ) -> Iterator[CandidateSource]:
        """Yield the other variants of the plans, which leaders of ``sources`` bound."""
        scenario = feasible.scenario
        modes = {
            "fewest": self.fewest,
            "every": self.every is not None,
            "smaller": self.smaller,
        }

        def peaks_of(rows: Rows) -> tuple[Floats, Floats]:
            return self.peaks.of_rows(rows), self.peaks.of_rows(self.none[rows])

        if self.loops:
            begin("pricing virtual stages")
            table = self.table
            yield VirtualStages(scenario, feasible, table=table, peaks_of=peaks_of, **modes)
        if self.policies:
            begin("pricing policies of recomputation")
            rows, table = self._recomputing_all(leaders)
            yield ListedRecompute(scenario, self.policies, table, self.step[rows], feasible, modes)
        if self.copies:
            begin("pricing secondary copies of weights")
            yield SecondaryCopies(scenario, self.table, peaks_of, feasible, modes)


def _may_win(scenario: Scenario, table: PlanTable, leaders: Leaders) -> NDArray[np.bool_]:
    """Return which plans may be the fastest with any layers of their stages, if time counts."""
    if not (leaders.ranking.by_time and leaders.plans) or scenario.cluster.levels:  # other orders
        return np.ones(len(table), dtype=np.bool_)
    bound = family_bounds(scenario, table, table.virtual_stages)
    found: NDArray[np.bool_] = bound < leaders.plans[0][0]
    return found


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


def _most_bytes(scenario: Scenario) -> float:
    """Return the largest peak in bytes of a plan that is tight."""
    return Feasible(scenario, (), 1).max_peak_at(1)
