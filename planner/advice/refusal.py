"""Explanation of a search without a result: what removed most candidates, and what would fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from cost_models.units import format_bytes
from planner.advice.relax import Relaxation, satisfies, smallest_changes
from planner.advice.ways_out import WayOut, ways_out
from planner.assessment.assess import amounts, assess
from planner.assessment.too_small import least_bytes, too_small
from planner.assessment.verdict import budget_bytes
from planner.request.command import describe_plan
from planner.request.constraints import Constraint
from planner.search.search import Counts, SearchResult

MOST_REASONS: Final = 3


@dataclass(frozen=True, slots=True)
class Refusal:
    """A search without a plan: what removed the candidates, and changes that help."""

    scenario: Scenario
    result: SearchResult
    assumptions: tuple[str, ...]
    reasons: tuple[tuple[int, str], ...]  # number of candidates and reason, in descending order
    ways_out: tuple[WayOut, ...]
    changes: tuple[Relaxation, ...] = ()  # of requirements or pins

    def __str__(self) -> str:
        counts = self.result.counts
        lines = [
            f"no plan for {self.scenario.model.name} on {self.scenario.cluster.name}: "
            f"{counts.enumerated:,} candidates, {counts.legal:,} legal, "
            + ("none of them fits as required" if counts.excluded else "0 fit")
        ]
        lines += [f"  {number:,} candidates: {why}" for number, why in self.reasons[:MOST_REASONS]]
        for change in self.changes:
            lines.append(
                f"  smallest change: {change.change} instead of {change.instead_of} (checked)"
            )
        for way in self.ways_out:
            lines.append(f"  way out: {way.change}: {way.command}")
        if self.assumptions:
            lines.append(f"  assumed: {'; '.join(self.assumptions)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document without its header."""
        return {
            "plans": [],
            "reasons": [{"candidates": n, "reason": why} for n, why in self.reasons],
            "changes": [change.to_dict() for change in self.changes],
            "ways_out": [way.to_dict() for way in self.ways_out],
            "search": search_document(self.result.counts),
            "assumptions": list(self.assumptions),
        }


def no_plan(
    scenario: Scenario,
    result: SearchResult,
    assumptions: tuple[str, ...] = (),
    *,
    fixed: Mapping[str, Any] | None = None,
    require: Sequence[Constraint] = (),
    offloads: Sequence[str] = ("none",),
    tried: Sequence[str] = (),
) -> Refusal:
    """Return the reasons why a search found no plan, and changes with which one exists.

    ``tried``: more values of Plan.offload that were searched without a result.
    """
    reasons = reasons_of(scenario, result)
    ways = () if result.smallest is None else ways_out(scenario, result.smallest, fixed or {})
    ways = tuple(way for way in ways if satisfies(way, require))
    changes = tuple(smallest_changes(scenario, fixed or {}, require, offloads))
    return Refusal(scenario, result, assumptions, reasons, ways, changes)


def reasons_of(scenario: Scenario, result: SearchResult) -> tuple[tuple[int, str], ...]:
    """Return what removed the candidates: number and reason, in descending order."""
    reasons = [
        (number, result.illegal_example[code]) for code, number in result.counts.illegal.items()
    ]
    reasons += [(number, f"excluded by {text}") for text, number in result.counts.excluded.items()]
    if result.smallest is not None:
        reasons.append((result.counts.too_large, _too_large(scenario, result.smallest)))
    if too_small(scenario):
        reasons.append((result.counts.enumerated, _states_too_large(scenario)))
    return tuple(sorted(reasons, key=lambda pair: -pair[0]))


def _states_too_large(scenario: Scenario) -> str:
    """Return why no plan on the accelerators alone can fit."""
    cluster = scenario.cluster
    room = budget_bytes(cluster) * cluster.num_gpus
    return (
        f"one copy of weights and optimizer states takes {format_bytes(least_bytes(scenario))}, "
        f"all {cluster.num_gpus} accelerators have {format_bytes(room)}"
    )


def search_document(counts: Counts) -> dict[str, Any]:
    """Return the counts of a search as plain JSON values."""
    return {
        "enumerated": counts.enumerated,
        "illegal": dict(counts.illegal),
        "excluded": dict(counts.excluded),
        "too_large": counts.too_large,
        "tight": counts.tight,
        "priced": counts.priced,
        "simulated": counts.simulated,
        "bounded_away": counts.bounded_away,
        "part_recomputed": counts.part_recomputed,
        "seconds": counts.seconds,
    }


def _too_large(scenario: Scenario, plan: Plan) -> str:
    memory = assess(scenario, plan).memory
    sizes = amounts(memory.parts)
    budget = format_bytes(budget_bytes(scenario.cluster))
    largest = max(sizes, key=lambda name: sizes[name])
    return (
        f"too large; the smallest ({describe_plan(plan)}) needs "
        f"{format_bytes(memory.peak_bytes)} of {budget} on stage {memory.limiting_stage}, "
        f"most of it {largest} ({format_bytes(sizes[largest])})"
    )
