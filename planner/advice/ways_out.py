"""What to change when a plan does not fit: every way out is priced, and listed only if it fits.

Three groups, in this order: *the same training on the same machines* (only the plan changes),
*another training* (adapters, an optimizer that remembers less, shorter sequences), *more hardware*.
The first and the last are ordered by what a token costs, in seconds of one accelerator; of ways of
one kind the cheapest is listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from planner.advice.changes import (
    HARDWARE,
    PLAN,
    TRAINING,
    Change,
    other_hardware,
    other_plans,
    other_trainings,
)
from planner.assessment.assess import Assessment, assess
from planner.assessment.reach import is_legal
from planner.request.command import fit_command

MOST_OF_GROUP: Final = {PLAN: 4, TRAINING: 3, HARDWARE: 2}
MOST_WAYS: Final = sum(MOST_OF_GROUP.values())


@dataclass(frozen=True, slots=True)
class _Way:
    """A change that was priced and fits."""

    change: Change
    assessment: Assessment

    @property
    def step(self) -> float:
        """Seconds."""
        return self.assessment.time.step_seconds

    @property
    def cost(self) -> float:
        """Seconds of one accelerator for a token."""
        scenario = self.change.scenario
        return self.step * scenario.cluster.num_gpus / scenario.workload.tokens_per_step

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        change = self.change
        return {
            "change": change.words,
            "group": change.group,
            "kind": change.kind,
            "options": change.options,
            "command": fit_command(change.scenario, change.plan),
            "plan": change.plan.to_dict(),
            "peak_bytes": self.assessment.memory.peak_bytes,
            "step_seconds": self.step,
            "device_seconds_per_token": self.cost,
            "mfu": self.assessment.time.mfu,
            "num_gpus": change.scenario.cluster.num_gpus,
        }


def check(change: Change) -> _Way | None:
    """Price one change; None unless it is legal and fits."""
    if not is_legal(change.scenario, change.plan):
        return None
    assessment = assess(change.scenario, change.plan)
    return _Way(change, assessment) if assessment.fits else None


def ways_out(
    scenario: Scenario, plan: Plan, nothing: Sequence[str] = ()
) -> tuple[dict[str, Any], ...]:
    """Return up to MOST_WAYS changes that make it fit, cheapest first in every group.

    ``nothing``: ways to offload with which no plan of the scenario fits, as is known.
    """
    found = [
        *_cheapest_of_kinds(other_plans(scenario, plan, nothing), plan),
        *_in_order(other_trainings(scenario, plan)),
        *_cheapest_of_kinds(other_hardware(scenario, plan), None),
    ]
    return tuple(way.to_dict() for way in found)


def _cheapest_of_kinds(changes: Iterator[Change], same: Plan | None) -> list[_Way]:
    """Return the cheapest way of every kind, the cheapest kinds first; no plan twice."""
    best: dict[str, _Way] = {}
    for change in changes:
        if change.plan == same:
            continue
        way = check(change)
        if way is None:
            continue
        known = best.get(change.kind)
        if known is None or way.cost < known.cost:
            best[change.kind] = way
    ordered = sorted(best.values(), key=lambda way: way.cost)
    different: list[_Way] = []
    for way in ordered:
        if way.change.plan not in [other.change.plan for other in different] or same is None:
            different.append(way)
    return different[: MOST_OF_GROUP[ordered[0].change.group]] if ordered else []


def _in_order(changes: Iterator[Change]) -> list[_Way]:
    """Return the first way of every kind that fits, as they come."""
    found: dict[str, _Way] = {}
    for change in changes:
        if change.kind not in found and (way := check(change)) is not None:
            found[change.kind] = way
    return list(found.values())[: MOST_OF_GROUP[TRAINING]]
