"""Price every legal plan, keep those that fit, rank them by step time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.estimate import Setting, price
from cost_models.legality import CODES, RULES, legality_codes, question_of
from cost_models.plan import Plan, PlanTable
from cost_models.price_table import table_memory, table_steps
from cost_models.rule import Question
from cost_models.uncertainty import memory_spread
from planner.constraints import Constraint, broken_by_plan, broken_by_result, counts_by_text
from planner.finalists import simulate, simulate_front, smallest_first
from planner.host_room import host_codes
from planner.objectives import Objective, results, sort_keys
from planner.space import SLAB, plan_slabs
from planner.verdict import budget_bytes, verdict_codes

CHUNK: Final = 600_000  # rows priced at once, and as many more as one slab has
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


def search(
    setting: Setting,
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
    seen, candidates = _Seen(setting), Candidates(setting, fixed or {}, require, offloads)
    for legal in candidates:
        seen.add(legal)
    table, step, peak, verdicts = seen.kept()
    short = broken_by_result(require, results(setting, table, step, peak), len(table))
    order = np.flatnonzero(short == 0)
    if len(order):
        order = order[verdicts[order] == verdicts[order].min()]
    keys = (_rank_of_effort(table), *sort_keys(objective, step, peak))
    order = order[np.lexsort([key[order] for key in keys])]
    if front:
        finalists = simulate_front(setting, table, order, step, peak)
    else:
        rank = smallest_first if objective == "memory" else simulate
        finalists = rank(setting, table, order, step, peak, top=top)
    order = finalists.rows
    counts = Counts(
        enumerated=int(candidates.codes.sum()),
        illegal=_by_reason(candidates.codes),
        priced=seen.priced,
        too_large=seen.too_large,
        tight=int(np.sum(verdicts == 1)),
        seconds=time.perf_counter() - started,
        simulated=finalists.simulated,
        bounded_away=finalists.bounded_away,
        excluded=counts_by_text(require, np.concatenate([candidates.unwanted, short])),
    )
    return SearchResult(
        plans=tuple(table.plan(row) for row in order.tolist()),
        counts=counts,
        smallest=seen.smallest,
        illegal_example=candidates.examples,
    )


class Candidates:
    """The legal plans of a question, in tables of about CHUNK, and what became of the others."""

    def __init__(
        self,
        setting: Setting,
        fixed: Mapping[str, Any],
        require: Sequence[Constraint] = (),
        offloads: Sequence[str] = ("none",),
    ) -> None:
        self.codes = np.zeros(len(CODES), dtype=np.int64)  # candidates by position in CODES
        self.examples: dict[str, str] = {}
        self.unwanted = np.zeros(0, dtype=np.int64)
        self._setting, self._require = setting, require
        self._slabs = plan_slabs(
            setting.model, setting.workload, setting.cluster.num_gpus, fixed, offloads=offloads
        )

    def __iter__(self) -> Iterator[PlanTable]:
        waiting = [_no_plans()]
        for slab in self._slabs:
            waiting.append(self._judged(slab))
            if sum(map(len, waiting)) >= CHUNK:
                yield _joined(waiting)
                waiting = []
        if waiting:
            yield _joined(waiting)

    def _judged(self, slab: PlanTable) -> PlanTable:
        question = question_of(self._setting)
        codes = legality_codes(question, slab)
        self.codes += np.bincount(codes, minlength=len(CODES))
        self.examples = {**_examples(question, slab, codes), **self.examples}
        legal = slab.rows(codes == 0)
        if not self._require:
            return legal
        broken = broken_by_plan(self._require, legal)
        self.unwanted = np.concatenate([self.unwanted, broken[broken > 0]])
        return legal.rows(broken == 0)


class _Seen:
    """Plans whose memory was priced: how many, and all that can fit."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.priced = self.too_large = 0
        self.smallest: Plan | None = None
        self._least = np.inf
        self._kept: list[tuple[PlanTable, Any, Any]] = []

    def add(self, table: PlanTable) -> None:
        """Price some more."""
        peak, host = memory_in_chunks(self.setting, table)
        around = memory_spread(self.setting.software.name)
        fits = verdict_codes(peak, budget_bytes(self.setting.cluster), around)
        verdicts = np.maximum(fits, host)
        rows = np.flatnonzero(verdicts < 2)
        self.priced += len(table)
        self.too_large += len(table) - len(rows)
        self._kept.append((table.rows(rows), peak[rows], verdicts[rows]))
        if len(table) and peak.min() < self._least:
            self._least, self.smallest = peak.min(), table.plan(int(np.argmin(peak)))

    def kept(self) -> tuple[PlanTable, Any, Any, Any]:
        """Return those that can fit, with seconds, bytes and verdicts."""
        tables, *columns = zip(*self._kept, strict=True)
        table = _joined(tables)
        peak, verdicts = (np.concatenate(column) for column in columns)
        return table, steps_in_chunks(self.setting, table), peak, verdicts


def _no_plans() -> PlanTable:
    return PlanTable.from_plans([Plan()]).rows(slice(0, 0))


def _joined(tables: Sequence[PlanTable]) -> PlanTable:
    return PlanTable(
        **{f.name: _one([getattr(t, f.name) for t in tables]) for f in fields(PlanTable)}
    )


def _one(columns: list[NDArray[Any]]) -> NDArray[Any]:
    """Put columns together; one value for all of them stays one value (``PlanTable.rows``)."""
    some = [column for column in columns if len(column)]
    if some and all(column.strides == (0,) and column[0] == some[0][0] for column in some):
        return np.broadcast_to(some[0][0], sum(map(len, some)))
    return np.concatenate(columns)


def steps_in_chunks(setting: Setting, table: PlanTable) -> NDArray[np.float64]:
    """Return seconds of a step of every plan."""
    steps = (table_steps(setting, chunk) for chunk in _chunks(table))
    return np.concatenate([np.zeros(0), *steps])


def memory_in_chunks(
    setting: Setting, table: PlanTable
) -> tuple[NDArray[np.float64], NDArray[np.int8]]:
    """Return bytes, and the verdict on a node's host, of every plan."""
    peaks, hosts = [np.zeros(0)], [np.zeros(0, dtype=np.int8)]
    for chunk in _chunks(table):
        peak, host = table_memory(setting, chunk)
        peaks.append(peak)
        hosts.append(host_codes(setting.cluster, host))
    peak = np.concatenate(peaks)
    near = np.flatnonzero(_at_a_border(setting, peak))
    if len(near):
        peak[near] = price(setting, table.rows(near)).peak
    return peak, np.concatenate(hosts)


def _at_a_border(setting: Setting, peak: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether the last bits of a peak could change its verdict."""
    budget, around = budget_bytes(setting.cluster), memory_spread(setting.software.name)
    ends = (1.0 + around.above, 1.0 - around.below)
    found: NDArray[np.bool_] = np.logical_or.reduce(
        [np.abs(peak * end - budget) <= NEAR * budget for end in ends]
    )
    return found


def _chunks(table: PlanTable) -> Iterator[PlanTable]:
    for start in range(0, len(table), CHUNK + SLAB):
        yield table.rows(slice(start, start + CHUNK + SLAB))


def _rank_of_effort(table: PlanTable) -> NDArray[np.int64]:
    """Among equals, the plan that shards and splits less is the simpler one."""
    simpler: NDArray[np.int64] = (
        table.tensor_parallel * table.pipeline_parallel * 16
        + table.zero_stage * 4
        + table.sequence_parallel
        + table.recompute
    )
    return simpler


def _by_reason(counts: NDArray[np.int64]) -> dict[str, int]:
    found = {CODES[i]: int(n) for i, n in enumerate(counts) if i and n}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _examples(question: Question, table: PlanTable, codes: NDArray[np.int16]) -> dict[str, str]:
    words = {}
    for code in np.unique(codes[codes > 0]).tolist():
        row = int(np.flatnonzero(codes == code)[0])
        words[CODES[code]] = RULES[code - 1].words(question, table.plan(row))
    return words
