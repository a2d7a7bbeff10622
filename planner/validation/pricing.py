"""Predictions for many cases with the formulas of ``fit``; cases of one scenario at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

import numpy as np

from cost_models.legality.rules import CODES, RULES, legality_codes
from cost_models.memory.allocator import shown_bytes
from cost_models.memory.ledger import OPTIMIZER
from cost_models.memory.outside_torch import outside_bytes
from cost_models.memory.parts import MemoryParts
from cost_models.memory.peak import timelines
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import PlanTable
from cost_models.pricing.estimate import (
    paged_states,
    price,
    rank_memories,
    reserved_free_bytes,
    throughput,
)
from cost_models.pricing.simulated_steps import with_simulated_steps
from cost_models.pricing.utilisation import hardware_utilisation, time_interval
from cost_models.uncertainty import (
    TYPICAL_MEMORY,
    TYPICAL_TIME,
    UNKNOWN,
    MemoryKind,
    interval,
    memory_spread,
    widened,
)
from hardware_profiles.errors import InputError
from hardware_profiles.progress import tracked
from planner.assessment.verdict import Verdict, budget_bytes
from planner.validation.measurement import measured_memory
from planner.validation.rows.case import Case
from planner.validation.rows.stand_ins import ASSUMED_RATE, has_assumed_rate
from planner.validation.rows.trainer import compared_trainer
from planner.validation.rows.unstated_plan import (
    assumed_settings,
    checkpointed_otherwise,
    row_verdict,
)

# rules of torch's schedules, of the executor and of releases that other trainers do not have
PRICED_ANYWAY: Final = (
    "num_kv_heads",  # copied where there are fewer than tensor-parallel ranks
    "schedule_microbatches",
    "interleaved_microbatches",
    "sequence_length",
    "positions",
    "context_dropout",
    "dp_replicate",  # of ranks that share a sequence, some share weights (InternEvo's mode ISP)
    "dp_replicate_alone",
    "trainer",  # of a profile that the row names, or that has none to inherit
)


@dataclass(frozen=True, slots=True)
class CasePrediction:
    """Prediction for one case in seconds and bytes, with 90 % intervals."""

    step: float
    step_low: float
    step_high: float
    peak: float  # of the measured kind (allocated, reserved, device); device without a measurement
    peak_low: float
    peak_high: float
    verdict: Verdict


def predict_cases(cases: Sequence[Case]) -> tuple[dict[str, CasePrediction], dict[str, str]]:
    """Return predictions by name of the row, and the reasons of the rows that are not priced.

    A row is not priced where its plan is illegal, or where its price needs a figure that nobody
    knows (an offload over a host link of unknown bandwidth).
    """
    groups: dict[tuple[Any, ...], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.key].append(case)
    found: dict[str, CasePrediction] = {}
    refused: dict[str, str] = {}
    for group in tracked(list(groups.values()), "pricing job {number} of {total}", size=len):
        legal = []
        for case in group:
            reason = why_impossible(case)
            if reason is None:
                legal.append(case)
            else:
                refused[case.row.name] = reason
        priced, reasons = _price_all(legal)
        found |= priced
        refused |= reasons
    return found, refused


def _price_all(cases: Sequence[Case]) -> tuple[dict[str, CasePrediction], dict[str, str]]:
    """Price cases of one scenario together; one by one where the price of one is unknown."""
    if not cases:
        return {}, {}
    try:
        return _price(cases), {}
    except InputError as error:
        if len(cases) == 1:
            return {}, {cases[0].row.name: str(error)}
    found: dict[str, CasePrediction] = {}
    refused: dict[str, str] = {}
    for case in cases:
        priced, reasons = _price_all([case])
        found |= priced
        refused |= reasons
    return found, refused


def why_impossible(case: Case) -> str | None:
    """Return why a case's plan is illegal in every trainer; None if it is legal in one."""
    code = int(legality_codes(case.scenario, PlanTable.from_plans([case.plan]))[0])
    if not code or CODES[code] in PRICED_ANYWAY:
        return None
    return RULES[code - 1].words(case.scenario, case.plan)


def _price(cases: Sequence[Case]) -> dict[str, CasePrediction]:
    scenario = cases[0].scenario
    table = PlanTable.from_plans([case.plan for case in cases])
    priced = with_simulated_steps(scenario, table, price(scenario, table))  # as in ``fit``
    budget = budget_bytes(scenario.cluster)
    found = {}
    for number, case in enumerate(cases):
        step, device = float(priced.step[number]), float(priced.peak[number])
        mfu = throughput(scenario, case.plan, step)[1]
        time = priced.row(number).time
        hfu = hardware_utilisation(mfu, float(np.sum(time.compute)), float(np.sum(time.recompute)))
        rank = int(priced.limiting_rank[number])
        peak = _compared_peak(case, priced.row(number).memory, rank, device, budget)
        typical = float(priced.typical_peak[number])
        judged = row_verdict(case.row, case.defaults, scenario, device, typical)
        times = time_interval(scenario, step, hfu, float(np.sum(time.communication)))
        if case.is_typical:
            times = widened(times, TYPICAL_TIME)
            peak = (peak[0], *widened(peak[1:], TYPICAL_MEMORY))
        if has_assumed_rate(case.defaults):
            times = widened(times, ASSUMED_RATE)
        found[case.row.name] = CasePrediction(step, *times, *peak, judged)
    found |= _either_checkpointed(cases, found)
    return found | {case.row.name: _with_others(case, found[case.row.name]) for case in cases}


def _with_others(case: Case, stated: CasePrediction) -> CasePrediction:
    """Return a prediction whose intervals reach to those of all that the row may stand for.

    The verdict is tight where it hangs on that.
    """
    for other in case.others:
        if why_impossible(other) is not None:
            continue
        priced = _price_all([other])[0].get(case.row.name)
        if priced is not None:
            stated = replace(
                stated,
                step_low=min(stated.step_low, priced.step_low),
                step_high=max(stated.step_high, priced.step_high),
                peak_low=min(stated.peak_low, priced.peak_low),
                peak_high=max(stated.peak_high, priced.peak_high),
                verdict=stated.verdict if stated.verdict == priced.verdict else "tight",
            )
    return stated


def _either_checkpointed(
    cases: Sequence[Case], found: Mapping[str, CasePrediction]
) -> dict[str, CasePrediction]:
    """Return predictions of cases that may compute layers again or not: memory from that upwards.

    The verdict is tight where it hangs on that.
    """
    unsaid = [case for case in cases if case.may_checkpoint]
    if not unsaid:
        return {}
    others = _price(
        [
            replace(case, plan=checkpointed_otherwise(case.plan), may_checkpoint=False, others=())
            for case in unsaid
        ]
    )
    return {
        name: replace(
            stated,
            peak_low=min(stated.peak_low, other.peak_low),
            verdict=stated.verdict if stated.verdict == other.verdict else "tight",
        )
        for name, other in others.items()
        for stated in (found[name],)
    }


def _compared_peak(
    case: Case, parts: MemoryParts, number: int, device: float, budget: float
) -> tuple[float, float, float]:
    """Return the predicted peak of the kind and rank that the row measured, and its interval.

    ``parts``, ``device``: of the fullest pipeline rank, which is ``number``. Where a row does not
    say which kind it measured, the interval covers all kinds, and is as wide as that of an unknown
    trainer.
    """
    measured, scenario = measured_memory(case.row), case.scenario
    trainer, assumed = (
        compared_trainer(case.row, scenario.software.name),
        assumed_settings(case.defaults) > 0,
    )
    experts = scenario.model.has_experts
    if measured is None:
        return device, *interval(device, memory_spread(trainer, assumed=assumed, experts=experts))
    ranks, copies = {number: parts}, 1
    if measured.rank != "fullest" and case.plan.pipeline_parallel > 1:
        found = rank_memories(scenario, case.plan, default_layer_ranges(scenario, case.plan))
        every = {place: rank[0] for place, rank in enumerate(found)}
        chosen = {"first": [0], "last": [len(found) - 1]}.get(measured.rank, every)
        ranks = {place: every[place] for place in chosen}
    if measured.rank == "all":
        copies = scenario.cluster.num_gpus // case.plan.pipeline_parallel
    if measured.of_update:
        lines = timelines(scenario, case.plan, default_layer_ranges(scenario, case.plan))
        ranks = {place: lines[place][OPTIMIZER] for place in ranks}
    table = PlanTable.from_plans([case.plan])
    outside = outside_bytes(scenario.software, scenario.cluster, table)
    kinds = (measured.kind,) if measured.is_stated else get_args(MemoryKind)
    peaks: dict[str, float] = dict.fromkeys(kinds, 0.0)
    for place, memory in ranks.items():
        paged = paged_states(scenario, case.plan, place)
        free = reserved_free_bytes(scenario, case.plan, place) if kinds != ("allocated",) else None
        for kind in kinds:
            shown = shown_bytes(
                kind, memory, outside, scenario.software, table, budget, paged, free
            )
            peaks[kind] += copies * float(np.ravel(shown)[0])
    described = trainer if measured.is_stated else UNKNOWN
    ends = [
        end
        for kind in kinds
        for end in interval(
            peaks[kind], memory_spread(described, kind, assumed=assumed, experts=experts)
        )
    ]
    return peaks[measured.kind], min(ends), max(ends)
