"""Why there is no plan: the rules and terms that removed the most candidates."""

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
from planner.assessment.verdict import budget_bytes
from planner.request.command import describe_plan
from planner.request.constraints import Constraint
from planner.search.search import Counts, SearchResult

MOST_REASONS: Final = 3


@dataclass(frozen=True, slots=True)
class Refusal:
    """A search that found nothing: what removed the candidates, and what would help."""

    scenario: Scenario
    result: SearchResult
    assumptions: tuple[str, ...]
    reasons: tuple[tuple[int, str], ...]  # candidates and why, most first
    ways_out: tuple[WayOut, ...]
    changes: tuple[Relaxation, ...] = ()  # of what was required or pinned

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
        """Return what the JSON answer says beside its header."""
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
    """Say why a search found nothing, and look for what fits.

    ``tried``: more ways to offload that were searched in vain.
    """
    reasons = reasons_of(scenario, result)
    # what was searched with nothing pinned or required is not searched again
    nothing = () if fixed or require else (*offloads, *tried)
    ways = () if result.smallest is None else ways_out(scenario, result.smallest, nothing)
    ways = tuple(way for way in ways if satisfies(way, require))
    changes = tuple(smallest_changes(scenario, fixed or {}, require, offloads))
    return Refusal(scenario, result, assumptions, reasons, ways, changes)


def reasons_of(scenario: Scenario, result: SearchResult) -> tuple[tuple[int, str], ...]:
    """Return what removed the candidates: how many, and why, the most first."""
    reasons = [
        (number, result.illegal_example[code]) for code, number in result.counts.illegal.items()
    ]
    reasons += [(number, f"excluded by {text}") for text, number in result.counts.excluded.items()]
    if result.smallest is not None:
        reasons.append((result.counts.too_large, _too_large(scenario, result.smallest)))
    return tuple(sorted(reasons, key=lambda pair: -pair[0]))


def search_document(counts: Counts) -> dict[str, Any]:
    """Return what the search saw, as plain JSON values."""
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
