"""Price every legal plan, keep those that fit, rank them by step time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.plan.plan import SEARCHED_RECOMPUTE, Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.pricing.table import table_memory, table_steps
from cost_models.scenario import Scenario
from cost_models.uncertainty import memory_spread
from planner.assessment.host_memory import host_codes
from planner.assessment.verdict import budget_bytes, most_bytes, verdict_codes
from planner.request.constraints import (
    Constraint,
    broken_by_result,
    counts_by_text,
    fewest_layers_are_best,
    most_memory,
)
from planner.request.objectives import Objective, results
from planner.search.candidates import Candidates
from planner.search.exhaustive_recompute import Grids, Whole, every_number
from planner.search.finalists import Broken, nothing_broken
from planner.search.gc_pause import seldom_collected
from planner.search.partial_recompute import (
    FULL,
    Families,
    peaks_without,
    recompute_less,
    rows_too_large,
    varies_layers,
)
from planner.search.ranking import Ranked, Ranking

NEAR: Final = 1e-9  # of a budget: such peaks are added up in the order of one plan's


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
    legal = candidates.legal
    budget, around = budget_bytes(scenario.cluster), memory_spread(scenario.software.name)
    enough = 4.0 * budget  # far too large: by how much does not matter, unless all plans are
    peak, verdicts = _judged(scenario, legal, enough)
    if len(legal) and peak.min() > enough:
        peak, verdicts = _judged(scenario, legal)
    smallest = legal.plan(int(np.argmin(peak))) if len(legal) else None
    apart = len(offloads) * SEARCHED_RECOMPUTE.index("full")
    varies = varies_layers(scenario, fixed or {})
    fewest_count = objective != "memory" and not front and fewest_layers_are_best(require)
    leaves_some = any("activations" in words for words in offloads)
    every = None  # plans of which every number of recomputed layers is tried
    none = peaks_without(legal, peak, apart) if varies else np.full(len(legal), np.nan)
    if varies and (leaves_some or not fewest_count):
        every = Whole.of(legal, peak, none, offloaded=fewest_count)
    rows = np.flatnonzero(verdicts < 2)
    if varies and fewest_count:
        most = most_memory(require, most_bytes(budget, around, 1))
        rows = np.union1d(rows, rows_too_large(scenario, legal, peak, none, most))
    table, peak, verdicts = legal.rows(rows).plain(), peak[rows], verdicts[rows]
    none = none[rows]
    step = table_steps(scenario, table)
    at_best = results(scenario, table, step, peak)
    short = broken_by_result(require, at_best, len(table), at_best=True)
    broken = partial(_broken, scenario, require)
    ranking = Ranking(scenario, objective, top, front)
    chosen: list[Ranked] = []
    simulated = bounded_away = priced = 0
    codes: list[NDArray[Any]] = [candidates.unwanted, short[verdicts < 2]]
    for verdict in (0, 1):  # those that fit; only where there are none, those that may
        mine = np.flatnonzero((short == 0) & (verdicts == verdict))
        finalists = ranking.finalists(table, mine, step, peak, broken=broken(table, peak))
        simulated += finalists.simulated
        bounded_away += finalists.bounded_away
        codes.append(finalists.broken)
        chosen = finalists.plans(table, peak)
        most = most_memory(require, most_bytes(budget, around, verdict))
        fits, may = _Fits(scenario, verdict, most), partial(_may, scenario, require)
        # where nothing fits so far those that may be tight are looked at in one go
        widest = most if chosen else most_memory(require, most_bytes(budget, around, 1))
        found = []
        if varies and fewest_count:
            whole = np.flatnonzero(_recomputes_all(table))
            whole = whole[~(none[whole] <= most)]  # without recomputation it is faster, and fits
            families = Families.of(
                scenario, table.rows(whole), step[whole], (peak[whole], none[whole]), widest
            )
            best = finalists.seconds.tolist()
            found.append(
                recompute_less(scenario, families, best, top=top, fits=fits, may=may, broken=broken)
            )
        if every is not None:
            found.append(
                every_number(
                    Grids.of(scenario, every, widest, timed=bool(chosen)),
                    ranking,
                    chosen,
                    fits=fits,
                    may=may,
                    broken=broken,
                    smaller=objective == "memory" and not any(c.of_result for c in require),
                )
            )
        for less in found:
            simulated, priced = simulated + less.simulated, priced + less.priced
            chosen = ranking.merged(chosen, less.plans)
        if chosen or not (fits.tight or np.any(verdicts == 1)):
            break
    counts = Counts(
        enumerated=int(candidates.codes.sum()),
        illegal=candidates.illegal,
        priced=len(legal),
        too_large=len(legal) - int(np.sum(verdicts < 2)),
        tight=int(np.sum(verdicts == 1)),
        seconds=time.perf_counter() - started,
        simulated=simulated,
        bounded_away=bounded_away,
        excluded=counts_by_text(require, np.concatenate(codes)),
        part_recomputed=priced,
    )
    return SearchResult(
        plans=tuple(plan for *_, plan in chosen),
        counts=counts,
        smallest=smallest,
        illegal_example=candidates.examples,
    )


def _broken(
    scenario: Scenario, require: Sequence[Constraint], table: PlanTable, peak: NDArray[np.float64]
) -> Broken:
    """Return what says which constraints on results the simulated steps of a table break."""
    if not any(constraint.of_result for constraint in require):
        return nothing_broken
    return lambda rows, seconds: broken_by_result(
        require, results(scenario, table.rows(rows), seconds, peak[rows]), len(rows)
    )


def _recomputes_all(table: PlanTable) -> NDArray[np.bool_]:
    """Whether plans recompute all layers, and keep their activations on the accelerator."""
    all_of_them: NDArray[np.bool_] = (table.recompute == FULL) & ~table.offloads_activations
    return all_of_them


def _may(
    scenario: Scenario,
    require: Sequence[Constraint],
    table: PlanTable,
    step: NDArray[np.float64],
    peak: NDArray[np.float64] | None = None,
) -> NDArray[np.bool_]:
    """Return which plans may be as is required; ``step``: what they take at least."""
    found = results(scenario, table, step, np.zeros(len(table)) if peak is None else peak)
    kept: NDArray[np.bool_] = broken_by_result(require, found, len(table), at_best=True) == 0
    return kept


@dataclass(slots=True)
class _Fits:
    """Says which plans have a verdict and no larger peak, and the peaks of all."""

    scenario: Scenario
    verdict: int
    most: float
    tight: bool = False  # whether one that was asked is

    def __call__(self, table: PlanTable) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Price some plans."""
        peak, found = _judged(self.scenario, table)
        self.tight = self.tight or bool(np.any(found == 1))
        return (found == self.verdict) & (peak <= self.most), peak


def _judged(
    scenario: Scenario, table: PlanTable, enough: float = np.inf
) -> tuple[NDArray[np.float64], NDArray[np.int8]]:
    """Return bytes and verdicts: of the accelerator or of its host, the worse one."""
    peak, on_host = peaks_and_hosts(scenario, table, enough)
    around = memory_spread(scenario.software.name)
    fits = verdict_codes(peak, budget_bytes(scenario.cluster), around)
    return peak, np.maximum(fits, on_host)


def peaks_and_hosts(
    scenario: Scenario, table: PlanTable, enough: float = np.inf
) -> tuple[NDArray[np.float64], NDArray[np.int8]]:
    """Return bytes, and the verdict on a node's host, of every plan (``table_memory``)."""
    peak, host = table_memory(scenario, table, enough)
    near = np.flatnonzero(_at_a_border(scenario, peak))
    if len(near):
        peak[near] = price(scenario, table.rows(near).plain()).peak
    return peak, host_codes(scenario.cluster, host)


def _at_a_border(scenario: Scenario, peak: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether the last bits of a peak could change its verdict."""
    budget, around = budget_bytes(scenario.cluster), memory_spread(scenario.software.name)
    ends = (1.0 + around.above, 1.0 - around.below)
    found: NDArray[np.bool_] = np.logical_or.reduce(
        [np.abs(peak * end - budget) <= NEAR * budget for end in ends]
    )
    return found
