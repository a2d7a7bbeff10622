"""Ways out for a plan that does not fit: changes that are priced, and listed only if they fit.

Three groups, in this order: *same training* (only the plan changes), *another training* (adapters,
an optimizer with smaller states, shorter sequences), *more hardware*. The first and the last group
are sorted by accelerator seconds per token; only the cheapest way of each kind is listed.
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

MOST_OF_GROUP: Final = {PLAN: 4, TRAINING: 4, HARDWARE: 2}
MOST_WAYS: Final = sum(MOST_OF_GROUP.values())


@dataclass(frozen=True, slots=True)
class WayOut:
    """A priced change with which a plan fits."""

    to: Change
    assessment: Assessment

    @property
    def change(self) -> str:
        """The change in words."""
        return self.to.words

    @property
    def group(self) -> str:
        """Another plan, another training or other hardware."""
        return self.to.group

    @property
    def kind(self) -> str:
        """Kind of change; at most one way of each kind is listed."""
        return self.to.kind

    @property
    def options(self) -> str:
        """The change as options of the command line."""
        return self.to.options

    @property
    def command(self) -> str:
        """The command that checks the changed plan."""
        return fit_command(self.to.scenario, self.to.plan)

    @property
    def plan(self) -> Plan:
        """The changed plan."""
        return self.to.plan

    @property
    def peak_bytes(self) -> float:
        """Peak memory of the changed plan."""
        return self.assessment.memory.peak_bytes

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of the changed plan."""
        return self.assessment.time.step_seconds

    @property
    def num_gpus(self) -> int:
        """Accelerators of the changed cluster."""
        return self.to.scenario.cluster.num_gpus

    @property
    def device_seconds_per_token(self) -> float:
        """Seconds of one accelerator for a token."""
        return self.step_seconds * self.num_gpus / self.to.scenario.workload.tokens_per_step

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "change": self.change,
            "group": self.group,
            "kind": self.kind,
            "options": self.options,
            "command": self.command,
            "plan": self.plan.to_dict(),
            "peak_bytes": self.peak_bytes,
            "step_seconds": self.step_seconds,
            "device_seconds_per_token": self.device_seconds_per_token,
            "mfu": self.assessment.time.mfu,
            "num_gpus": self.num_gpus,
        }


def check(change: Change) -> WayOut | None:
    """Price one change; None unless it is legal and fits."""
    if not is_legal(change.scenario, change.plan):
        return None
    assessment = assess(change.scenario, change.plan)
    return WayOut(change, assessment) if assessment.fits else None


def ways_out(scenario: Scenario, plan: Plan, known_unfit: Sequence[str] = ()) -> tuple[WayOut, ...]:
    """Return up to MOST_WAYS changes with which a plan fits, cheapest first in every group.

    ``known_unfit``: values of Plan.offload for which a search found no plan that fits.
    """
    plans = _cheapest_of_kinds(other_plans(scenario, plan, known_unfit), plan)
    # a smaller batch helps where the same batch in smaller micro-batches does not fit
    kept = any(way.kind == "micro-batch" for way in plans)
    trainings = (c for c in other_trainings(scenario, plan) if not (kept and c.kind == "batch"))
    return (
        *plans,
        *_in_order(trainings),
        *_cheapest_of_kinds(other_hardware(scenario, plan), None),
    )


def _cheapest_of_kinds(changes: Iterator[Change], same: Plan | None) -> list[WayOut]:
    """Return the cheapest way of every kind, the cheapest kinds first, without repeated plans."""
    best: dict[str, WayOut] = {}
    for change in changes:
        if change.plan == same:
            continue
        way = check(change)
        if way is None:
            continue
        known = best.get(change.kind)
        if known is None or way.device_seconds_per_token < known.device_seconds_per_token:
            best[change.kind] = way
    ordered = sorted(best.values(), key=lambda way: way.device_seconds_per_token)
    different: list[WayOut] = []
    for way in ordered:
        if way.plan not in [other.plan for other in different] or same is None:
            different.append(way)
    return different[: MOST_OF_GROUP[ordered[0].group]] if ordered else []


def _in_order(changes: Iterator[Change]) -> list[WayOut]:
    """Return the first way of every kind that fits, in the order of ``changes``."""
    found: dict[str, WayOut] = {}
    for change in changes:
        if change.kind not in found and (way := check(change)) is not None:
            found[change.kind] = way
    return list(found.values())[: MOST_OF_GROUP[TRAINING]]
