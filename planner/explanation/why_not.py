"""Comparison with another plan: given fields are completed to the best plan that has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from msgspec import Struct

from cost_models.legality.rules import RULES, legality_codes
from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError
from planner.assessment.assess import Assessment, amounts, assess
from planner.explanation.glossary import MEMORY_EXPLANATIONS, explain_time
from planner.refinement.best_partition import StagedPlan, best_staged
from planner.request.command import describe_plan
from planner.request.limits import TrainerSearch, searches_like, with_limits
from planner.request.pins import check_fixed, parse_fixed
from planner.request.stage_layers import without_list
from planner.search.distinct import DISTINCT, TOP
from planner.search.search import SearchResult, search
from planner.search.space import enumerate_plans

Kind = Literal["illegal", "too_large", "tight", "slower", "faster", "same"]
LEAST: Final = 0.02  # share of the largest difference; smaller terms are left out
MOST_RULES: Final = 3
SAME: Final = 1e-9  # relative
OPTION: Final = "--why-not"


@dataclass(frozen=True, slots=True)
class TermDifference:
    """One term of time (seconds) or memory (bytes) of the other plan and of this one."""

    part: str
    other: float
    this: float
    words: str

    @property
    def difference(self) -> float:
        """Additional time or memory of the other plan."""
        return self.other - self.this

    def to_dict(self, unit: str) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "part": self.part,
            f"other_{unit}": self.other,
            f"this_{unit}": self.this,
            f"difference_{unit}": self.difference,
            "words": self.words,
        }


@dataclass(frozen=True, slots=True)
class WhyNot:
    """Another plan, completed from the requested fields, and the reasons against it."""

    requested: str  # as typed
    kind: Kind
    plan: Plan | None  # None: no legal completion
    assessment: Assessment | None
    staged: StagedPlan | None = None  # the plan, if stages of its own make it the fastest
    rules: tuple[
        tuple[str, str, int], ...
    ] = ()  # code, words and number of candidates that break it
    every: bool = False  # whether all candidates break the rules
    candidates: int = 0
    legal: int = 0
    over_bytes: float = 0.0  # above the budget; of the upper end of the interval if tight
    terms: tuple[TermDifference, ...] = ()  # of the time; of the memory if too large or tight

    @property
    def options(self) -> str:
        """The options of the plan and of its stages."""
        assert self.plan is not None
        return describe_plan(self.plan) if self.staged is None else self.staged.options

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        unit = "bytes" if self.kind in ("too_large", "tight") else "seconds"
        memory = None if self.assessment is None else self.assessment.memory
        time = None if self.assessment is None else self.assessment.time
        return {
            "asked": self.requested,
            "reason": self.kind,
            "plan": None if self.plan is None else self.plan.to_dict(),
            "staged": None if self.staged is None else self.staged.to_dict(),
            "rules": [
                {"code": code, "words": words, "candidates": n} for code, words, n in self.rules
            ],
            "candidates": self.candidates,
            "legal": self.legal,
            "step_seconds": None if time is None else time.step_seconds,
            "peak_bytes": None if memory is None else memory.peak_bytes,
            "stage": None if memory is None else memory.limiting_stage,
            "over_bytes": self.over_bytes,
            "terms": [term.to_dict(unit) for term in self.terms],
        }


def parse_other_plan(requested: str | Mapping[str, Any]) -> dict[str, Any]:
    """Read the given fields of another plan."""
    if not requested:
        raise InputError(f"{OPTION}: is empty (must be parts of a plan, such as tp=16,pp=4)")
    fixed = (
        parse_fixed(requested, OPTION)
        if isinstance(requested, str)
        else check_fixed(requested, "why_not")
    )
    if without_list(fixed)[1] is not None:
        raise InputError(f"{OPTION}: recompute_layers takes one number, for every stage")
    return fixed


def why_not(
    scenario: Scenario,
    plan: Plan,
    assessment: Assessment,
    requested: str | Mapping[str, Any],
    trainer: str = "",
) -> WhyNot:
    """Complete the requested fields to the best plan, and compare it with this one.

    ``trainer``: whose plans alone are searched, each ZeRO stage with the profile that prices it.
    """
    text = (
        requested
        if isinstance(requested, str)
        else ",".join(f"{k}={v}" for k, v in requested.items())
    )
    fixed = parse_other_plan(requested)
    stage = fixed.get("zero_stage")
    found = [
        _completed(one, fixed)
        for one in searches_like(scenario, plan, trainer)
        if stage in (None, one.pins.get("zero_stage", stage))
    ]
    has_it = all(getattr(plan, name) == value for name, value in fixed.items())
    if has_it and assessment.fits and not any(one.result.fits for one in found):
        # searched with offload allowed, or given
        return WhyNot(text, "same", plan, assessment)
    best = min((one for one in found if one.result.plans), key=_Completed.order, default=None)
    if best is not None:
        return _against(best.scenario, text, (plan, assessment), best.result, best.staged)
    legal = [one for one in found if one.result.smallest is not None]
    if legal:
        least = min(legal, key=lambda one: one.result.smallest_peak)
        return _too_large(least.scenario, text, assessment, least.result)
    own = found[0].scenario if len(found) == 1 else scenario
    return _illegal(with_limits(own, trainer), text, fixed)


class _Completed(Struct, frozen=True):
    """The best plans of one search with the requested fields."""

    scenario: Scenario
    result: SearchResult
    staged: StagedPlan | None

    def order(self) -> tuple[bool, float]:
        """Return the key by which searches are ranked: plans that fit, the fastest first."""
        step = self.result.seconds[0] if self.staged is None else self.staged.step
        return not self.result.fits, step


def _completed(one: TrainerSearch, fixed: Mapping[str, Any]) -> _Completed:
    result = search(
        one.scenario,
        {**one.pins, **fixed},
        top=TOP,
        require=one.require,
        distinct=DISTINCT,
        with_near=True,
    )
    staged = None
    if result.plans:
        staged = best_staged(
            one.scenario,
            result.plans,
            result.near,
            recomputed=result.recomputed,
            require=one.require,
        )
    return _Completed(one.scenario, result, staged)


def _illegal(scenario: Scenario, text: str, fixed: Mapping[str, Any]) -> WhyNot:
    """Return the rules that all candidates break; else those that break most candidates first."""
    table = enumerate_plans(scenario.model, scenario.workload, scenario.cluster.num_gpus, fixed)
    broken = {
        position: int(np.sum(np.broadcast_to(rule.broken(scenario, table), (len(table),))))
        for position, rule in enumerate(RULES)
    }
    always = [position for position, number in broken.items() if number == len(table)]
    first = legality_codes(scenario, table).astype(int) - 1
    if always:
        chosen = dict.fromkeys(always[:MOST_RULES], 0)  # any candidate breaks it
    else:
        counts = np.bincount(first, minlength=len(RULES))
        most = np.argsort(-counts, kind="stable")[:MOST_RULES].tolist()
        chosen = {n: int(np.flatnonzero(first == n)[0]) for n in most if counts[n]}
    rules = tuple(
        (RULES[n].code, RULES[n].words(scenario, table.plan(row)), broken[n])
        for n, row in chosen.items()
    )
    return WhyNot(
        text, "illegal", None, None, rules=rules, every=bool(always), candidates=len(table), legal=0
    )


def _too_large(
    scenario: Scenario, text: str, assessment: Assessment, result: SearchResult
) -> WhyNot:
    """Compare the memory of the smallest plan, on its limiting stage, with this plan's."""
    smallest = result.smallest
    assert smallest is not None
    other = assess(scenario, smallest)
    return WhyNot(
        text,
        "too_large",
        smallest,
        other,
        candidates=result.counts.enumerated,
        legal=result.counts.priced,
        over_bytes=_over(other),
        terms=_memory_terms(other, assessment),
    )


def _over(assessment: Assessment) -> float:
    """Return bytes above the budget: of the peak, or of its upper end if the peak is below."""
    memory, budget = assessment.memory, assessment.budget.size
    return (memory.peak_bytes if memory.peak_bytes > budget else memory.high_bytes) - budget


def _memory_terms(other: Assessment, this: Assessment) -> tuple[TermDifference, ...]:
    theirs, ours = amounts(other.memory.parts), amounts(this.memory.parts)
    terms = [
        TermDifference(name, theirs[name], ours[name], words)
        for name, words in MEMORY_EXPLANATIONS.items()
        if name in ours
    ]
    return tuple(sorted(terms, key=lambda term: -term.other))


def _against(
    scenario: Scenario,
    text: str,
    this: tuple[Plan, Assessment],
    result: SearchResult,
    staged: StagedPlan | None,
) -> WhyNot:
    """Compare the best plan with the requested fields, with its best stages, with this plan."""
    plan, assessment = this
    best = result.plans[0]
    if staged is not None:
        best, scenario = staged.plan, staged.scenario(scenario)
    other = assess(scenario, best)
    slower = other.time.step_seconds - assessment.time.step_seconds
    tight = other.verdict == "tight" and assessment.verdict == "fits"
    same = best == plan and abs(slower) <= SAME * assessment.time.step_seconds
    kind: Kind
    if same:
        kind = "same"
    elif tight:
        kind = "tight"
    else:
        kind = "slower" if slower >= -SAME * assessment.time.step_seconds else "faster"
    terms = _memory_terms(other, assessment) if kind == "tight" else ()
    return WhyNot(
        text,
        kind,
        best,
        other,
        staged,
        candidates=result.counts.enumerated,
        legal=result.counts.priced,
        over_bytes=_over(other) if tight else 0.0,
        terms=terms or time_terms(scenario, best, other, assessment),
    )


def time_terms(
    scenario: Scenario, plan: Plan, other: Assessment, this: Assessment
) -> tuple[TermDifference, ...]:
    """Return the terms of the time that differ; the largest loss of the other plan first."""
    theirs, ours = amounts(other.time.parts), amounts(this.time.parts)
    parts = [
        TermDifference(name, theirs[name], ours[name], explain_time(scenario, plan, name))
        for name in ours
    ]
    most = max(abs(term.difference) for term in parts)
    shown = [term for term in parts if abs(term.difference) > LEAST * most]
    return tuple(sorted(shown, key=lambda term: -term.difference))
