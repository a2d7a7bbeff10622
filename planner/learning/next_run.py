"""The next short run that would tell most: expected information over a few candidates.

    I = ½ log det(1 + V / s²)      nats, over step time and peak memory of one run

Symbols   V  covariance of the logarithms that the posterior leaves open   s  noise
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec.structs import replace as changed

from planner.assessment.verdict import budget_bytes
from planner.learning.effects import Effects, log_predictions
from planner.learning.mechanisms import Prior
from planner.learning.posterior import Posterior, predictive
from planner.validation.pricing import predict_cases
from planner.validation.rows.case import Case, case_of
from planner.validation.rows.reading import Unpriceable


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run that was not measured."""

    words: str
    case: Case


@dataclass(frozen=True, slots=True)
class NextRun:
    """A candidate and what it is expected to tell."""

    words: str
    nats: float


def candidates(cases: Sequence[Case]) -> list[Candidate]:
    """Return variants of the first run that are legal, fit, and were not measured."""
    seen = {(case.plan, case.scenario.workload, case.scenario.world_size) for case in cases}
    found = []
    for words, cells in _variants(cases[0]):
        row = changed(cases[0].row, row_id=f"candidate: {words}", **cells)
        try:
            case = case_of(row)
        except Unpriceable:
            continue
        same = replace(case.scenario, software=cases[0].scenario.software)
        case = replace(case, scenario=same, key=(*case.key, "candidate"))
        if (case.plan, same.workload, same.world_size) not in seen:
            found.append(Candidate(words, case))
    predictions, _ = predict_cases([candidate.case for candidate in found])
    return [
        candidate
        for candidate in found
        if (predicted := predictions.get(candidate.case.row.name)) is not None
        and predicted.peak < budget_bytes(candidate.case.scenario.cluster)
    ]


def _variants(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the words and the changed cells of variants of a run."""
    plan, workload, gpus = case.plan, case.scenario.workload, case.scenario.world_size
    micro, batch = plan.micro_batch_size, workload.global_batch_size
    unknown = {"step_time_s": None, "peak_memory_gib": None, "data_parallel": None}
    kept = unknown | {"micro_batch_size": micro, "global_batch_size": batch}
    twice = {**kept, "micro_batch_size": 2 * micro, "global_batch_size": 2 * batch}
    yield f"micro-batch of {2 * micro}, batch of {2 * batch}", twice
    if micro > 1 and batch % 2 == 0:
        half = {**kept, "micro_batch_size": micro // 2, "global_batch_size": batch // 2}
        yield f"micro-batch of {micro // 2}, batch of {batch // 2}", half
    more = {**kept, "global_batch_size": 4 * batch}
    yield f"batch of {4 * batch} in more micro-batches", more
    other = "full" if plan.recompute == "none" else "none"
    yield f"recompute {other}", {**kept, "recompute": other}
    longer = {**kept, "seq_len": 2 * workload.seq_len}
    yield f"sequences of {2 * workload.seq_len}", longer
    wider = {**kept, "num_gpus": 2 * gpus, "global_batch_size": 2 * batch}
    yield f"{2 * gpus} accelerators, batch of {2 * batch}", wider
    ranks = plan.tensor_parallel * plan.pipeline_parallel * plan.context_parallel
    if gpus % 2 == 0 and (gpus // 2) % ranks == 0 and batch % 2 == 0:
        fewer = {**kept, "num_gpus": gpus // 2, "global_batch_size": batch // 2}
        if plan.expert_parallel <= gpus // 2:
            yield f"{gpus // 2} accelerator{'s' if gpus > 2 else ''}, batch of {batch // 2}", fewer


def effects_on(cases: Sequence[Case], known: Effects, found: Posterior, prior: Prior) -> Effects:
    """Return the effects of the mechanisms that are still open on other runs.

    An option with less than 1 % of the posterior, and a rate that is known to a tenth of its prior
    width, count as told: their effect is 0.
    """
    software = cases[0].scenario.software
    base = log_predictions(cases, {})
    by_option = []
    for number, switch in enumerate(known.switches):
        chances = found.of_option(number, len(switch.options) + 1)
        changes = [np.zeros_like(base)]
        for option, figures in enumerate(switch.options.values(), start=1):
            open_ = chances[option] >= 0.01
            changes.append(log_predictions(cases, figures) - base if open_ else np.zeros_like(base))
        by_option.append(np.stack(changes))
    by_rate = []
    for rate, deviation in zip(known.rates, found.deviation, strict=True):
        moved = {rate.figure: rate.value(software, prior.widths[rate.figure])}
        told = deviation < 0.1
        by_rate.append(np.zeros_like(base) if told else log_predictions(cases, moved) - base)
    return replace(known, base=base, by_option=tuple(by_option), by_rate=np.stack(by_rate))


def next_runs(
    cases: Sequence[Case], known: Effects, found: Posterior, prior: Prior
) -> list[NextRun]:
    """Return the candidates by expected information, the most first."""
    open_ = candidates(cases)
    if not open_:
        return []
    effects = effects_on([candidate.case for candidate in open_], known, found, prior)
    noise = np.array([prior.noise.time, prior.noise.memory]) ** 2
    told = []
    for number, candidate in enumerate(open_):
        if np.isnan(effects.base[number]).any():
            continue
        _, covariance = predictive(effects, number, found)
        _, log_size = np.linalg.slogdet(np.eye(2) + covariance / noise[:, None])
        told.append(NextRun(candidate.words, 0.5 * float(log_size)))
    return sorted(told, key=lambda run: -run.nats)
