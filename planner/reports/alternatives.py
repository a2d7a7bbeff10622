"""Other plans for the same job: the front of time and memory, runners-up, and usual setups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from cost_models.step_time.parts import TIME_WORDS
from cost_models.units import format_bytes
from hardware_profiles.progress import report, tracked
from planner.assessment.assess import Assessment, assess_plans
from planner.explanation.glossary import signed_seconds
from planner.explanation.why_not import TermDifference, WhyNot, time_terms, why_not
from planner.reports.reported_plan import ReportedPlan
from planner.request.limits import with_limits
from planner.search.priced_candidates import PricedCandidates
from planner.search.search import search
from planner.text.plan_changes import changes

SETUP: Final = "usual setup {number} of {total}"
MOST_FRONT: Final = 40  # plans of a front that are drawn
RUNNERS_UP: Final = 5
MOST_TERMS: Final = 2  # of a reason


@dataclass(frozen=True, slots=True)
class UsualSetup:
    """A way in which such models are often trained, completed to its best plan."""

    name: str
    found: WhyNot


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """A plan of the search: how it differs from the reported one, and what that costs."""

    assessment: Assessment
    differences: str
    reason: str


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Plans to compare with; all empty where nothing fits."""

    front: tuple[Assessment, ...]  # by step time
    runners_up: tuple[RunnerUp, ...]  # best first
    usual: tuple[UsualSetup, ...]
    candidates: int  # legal ones


def alternatives(reported: ReportedPlan) -> Alternatives:
    """Search again for the job of a plan, with even stages."""
    trainer = reported.file.trainer
    scenario = replace(reported.scenario, stage_recompute_layers=None)
    free = with_limits(scenario, trainer, f"{reported.path}: trainer")
    plan, own = reported.file.plan, reported.assessment
    priced = PricedCandidates.of(free)
    best = search(free, top=RUNNERS_UP + 1, distinct=RUNNERS_UP + 1, priced=priced)
    report("searching the front of time and memory")
    front = search(free, front=True, priced=priced).plans
    every = max(1, -(-len(front) // MOST_FRONT))
    ranked = best.simplest_first().plans
    others = [one for one in ranked if changes(plan, one)][:RUNNERS_UP]
    return Alternatives(
        front=tuple(assess_plans(free, front[::every])),
        runners_up=tuple(
            RunnerUp(
                found, changes(plan, found.plan), reason(time_terms(free, found.plan, found, own))
            )
            for found in assess_plans(free, others)
        ),
        usual=tuple(
            UsualSetup(name, why_not(free, plan, own, parts, trainer))
            for name, parts in tracked(list(_usual(reported)), SETUP)
        ),
        candidates=best.counts.priced,
    )


def _usual(reported: ReportedPlan) -> Iterator[tuple[str, str]]:
    """Yield the usual setups for a cluster, as parts of a plan."""
    cluster = reported.file.cluster
    inside = min(cluster.gpus_per_node, cluster.num_gpus)
    flat = "tp=1,pp=1"
    yield "data parallel (DDP)", f"{flat},zero=0"
    yield "sharded optimizer (ZeRO-1)", f"{flat},zero=1"
    yield "fully sharded (FSDP, ZeRO-3)", f"{flat},zero=3,recompute=none"
    yield "the same with full recomputation", f"{flat},zero=3,recompute=full"
    if inside > 1:
        yield "tensor parallel in a node", f"tp={inside},pp=1"
    nodes = cluster.num_gpus // inside
    if nodes > 1:
        deep = min(nodes, reported.file.model.num_layers)
        yield "tensor parallel in a node, pipeline between", f"tp={inside},pp={deep}"


def reason(terms: tuple[TermDifference, ...]) -> str:
    """Return the terms of the time that differ most, in words."""
    most = sorted(terms, key=lambda term: -abs(term.difference))[:MOST_TERMS]
    return ", ".join(f"{TIME_WORDS[t.part]} {signed_seconds(t.difference)}" for t in most)


def setup_reason(setup: UsualSetup) -> str:
    """Return why a usual setup is not the plan, in words."""
    found = setup.found
    if found.kind == "illegal" or found.assessment is None:
        rule = found.rules[0][1] if found.rules else "no legal plan"
        return f"not possible: {rule}"
    if found.kind == "same":
        return "this plan"
    if found.kind == "too_large":
        return f"too large: {format_bytes(found.over_bytes)} over the budget"
    if found.kind == "tight":
        return f"may run out of memory: by {format_bytes(found.over_bytes)}"
    return reason(found.terms)
