"""Explanation of a search without a result: what removed most candidates, and what would fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, structs

from cost_models.memory.parts import PART_WORDS
from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from cost_models.units import format_bytes
from hardware_profiles.options import declared
from planner.advice.relax import Relaxation, satisfies, smallest_changes
from planner.advice.ways_out import WayOut, fixes_of, ways_out
from planner.assessment.assess import amounts, assess
from planner.assessment.host_memory import host_text
from planner.assessment.too_small import least_bytes, too_small
from planner.assessment.verdict import budget_bytes
from planner.request.command import describe_plan, scenario_command
from planner.request.constraints import Constraint
from planner.search.search import Counts, SearchResult
from planner.text.assumed import MORE, assumed_line
from planner.text.fixes import fix_lines
from planner.text.paragraphs import next_command, plain

MOST_REASONS: Final = 3


class Refusal(Struct, frozen=True):
    """A search without a plan: what removed the candidates, and changes that help."""

    scenario: Scenario
    result: SearchResult
    assumptions: tuple[str, ...]
    reasons: tuple[tuple[int, str], ...]  # number of candidates and reason, in descending order
    ways_out: tuple[WayOut, ...]
    changes: tuple[Relaxation, ...] = ()  # of requirements or pins
    fixed: Mapping[str, Any] = {}  # pinned fields of the plan

    def __str__(self) -> str:
        counts = self.result.counts
        lines = [  # wrapped with the words that are put before it
            f"no plan for {self.scenario.model.name} on {self.scenario.cluster.name}: "
            f"{counts.enumerated:,} candidates, {counts.legal:,} legal, "
            + ("none of them fits as required" if counts.excluded else "0 fit")
        ]
        for number, why in self.reasons[:MOST_REASONS]:
            lines += _item(f"{number:,} candidates: {why}")
        for change in self.changes:
            lines += _item(
                f"smallest change: {change.change} instead of {change.instead_of} (checked)"
            )
        if self.ways_out and self.result.smallest is not None:
            smallest = assess(self.scenario, self.result.smallest)
            fixes = fixes_of(self.scenario, smallest, self.ways_out)
            lines += fix_lines(fixes, len(lines), verbose=False)[:-1]
            lines += next_command(self._command, "append the options of a fix to ")
        short = assumed_line(self.assumptions)
        return "\n".join([*lines, *(line.removesuffix(MORE) for line in short)])

    @property
    def _command(self) -> str:
        """The question as a command of ``fit``."""
        pins = [declared(Plan)[name].as_option(value) for name, value in self.fixed.items()]
        return " ".join([scenario_command(self.scenario), *pins])

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


def _item(text: str) -> list[str]:
    """Return an indented item; its other lines are indented further."""
    first, *others = plain(text, "  ")
    return [first, *(f"  {line}" for line in others)]


def no_plan(
    scenario: Scenario,
    result: SearchResult,
    assumptions: tuple[str, ...] = (),
    *,
    fixed: Mapping[str, Any] | None = None,
    require: Sequence[Constraint] = (),
    offloads: Sequence[str] = ("none",),
) -> Refusal:
    """Return the reasons why a search found no plan, and changes with which one exists."""
    pinned = (fixed or {}).get("offload")
    reasons = reasons_of(scenario, result, offloads if pinned is None else (pinned,))
    ways = () if result.smallest is None else ways_out(scenario, result.smallest, fixed or {})
    ways = tuple(way for way in ways if satisfies(way, require))
    changes = tuple(smallest_changes(scenario, fixed or {}, require, offloads))
    return Refusal(scenario, result, assumptions, reasons, ways, changes, fixed or {})


def reasons_of(
    scenario: Scenario, result: SearchResult, offloads: Sequence[str] = ("none",)
) -> tuple[tuple[int, str], ...]:
    """Return what removed the candidates: number and reason, in descending order."""
    reasons = [
        (number, result.illegal_example[code]) for code, number in result.counts.illegal.items()
    ]
    reasons += [(number, f"excluded by {text}") for text, number in result.counts.excluded.items()]
    if result.smallest is not None:
        reasons.append((result.counts.too_large, _too_large(scenario, result.smallest)))
    if "none" in offloads and too_small(scenario):
        without = " (without offload)" if len(offloads) > 1 else ""
        reasons.append((result.counts.enumerated, _states_too_large(scenario) + without))
    return tuple(sorted(reasons, key=lambda pair: -pair[0]))


def _states_too_large(scenario: Scenario) -> str:
    """Return why no plan on the accelerators alone can fit."""
    cluster = scenario.cluster
    room, several = budget_bytes(cluster) * cluster.num_gpus, cluster.num_gpus > 1
    return (
        f"one copy of weights and optimizer states takes {format_bytes(least_bytes(scenario))}, "
        + (f"all {cluster.num_gpus} accelerators have " if several else "the accelerator has ")
        + format_bytes(room)
    )


def search_document(counts: Counts) -> dict[str, Any]:
    """Return the counts of a search as plain JSON values."""
    found = structs.asdict(counts)
    return {**found, "illegal": dict(counts.illegal), "excluded": dict(counts.excluded)}


def _too_large(scenario: Scenario, plan: Plan) -> str:
    assessed = assess(scenario, plan)
    memory = assessed.memory
    if assessed.is_short_on_the_host_alone:
        return f"too large for the host; the smallest needs {host_text(assessed.host)}"
    sizes = amounts(memory.parts)
    budget = format_bytes(budget_bytes(scenario.cluster))
    if memory.peak_bytes <= budget_bytes(scenario.cluster):  # others fit, and are excluded
        return f"too large for the {budget} of an accelerator"
    largest = max(sizes, key=lambda name: sizes[name])
    return (
        f"too large; the smallest ({describe_plan(plan)}) needs "
        f"{format_bytes(memory.peak_bytes)} of {budget} on stage {memory.limiting_stage}, "
        f"most of it {PART_WORDS[largest]} ({format_bytes(sizes[largest])})"
    )
