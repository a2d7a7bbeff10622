"""Ways out for a plan that does not fit: changes that are priced, and listed only if they fit.

They come in the order in which people try them: smaller micro-batches, more recomputation, more
sharding, another split; an optimizer with smaller states, adapters, shorter sequences; offload; a
larger accelerator, more accelerators in the node, more nodes; weights in 16 bits alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, Final

from msgspec import structs

from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from hardware_profiles.progress import report, stages, tracked
from planner.advice.changes import (
    PLAN,
    Change,
    PinnedPlan,
    larger_accelerators,
    more_accelerators,
    offloads,
    other_plans,
    other_trainings,
    sixteen_bits,
)
from planner.assessment.assess import Assessment, assess
from planner.assessment.reach import is_legal
from planner.assessment.too_small import too_small
from planner.request.command import fit_command
from planner.search.first_plan import FLAT, first_plan
from planner.text.fixes import Fix, pace

# seconds, relative: plans and trainings, offload, larger accelerators, more of them, 16 bits
SIZES: Final = (5.0, 1.0, 1.0, 2.0, 1.0)
MOST_SOFTWARE: Final = 5  # ways on the same accelerators, without their host
RANKS: Final = ("data_parallel", "tensor_parallel", "context_parallel")
# kinds that are left out where one of others fits: more changes than needed
NEEDLESS: Final = {"both": ("micro-batch", "recompute"), "batch": ("micro-batch",)}
MOST_WAYS: Final = MOST_SOFTWARE + 4  # offload, a larger accelerator, more of them, 16 bits


class WayOut(Change, frozen=True, kw_only=True):
    """A priced change with which a plan fits."""

    plan: Plan
    assessment: Assessment

    @property
    def is_another_plan(self) -> bool:
        """Whether the same training fits on the same accelerators, without their host."""
        return self.group == PLAN and self.kind != "offload"

    @property
    def condition(self) -> str:
        """What a node must have for it, where nobody knows whether it has."""
        unchecked = self.assessment.host.unchecked
        return f"with {unchecked}" if unchecked else ""

    @property
    def command(self) -> str:
        """The command that checks the changed plan."""
        return fit_command(self.scenario, self.plan)

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
        return self.scenario.cluster.num_gpus

    @property
    def device_seconds_per_token(self) -> float:
        """Seconds of one accelerator for a token."""
        return self.step_seconds * self.num_gpus / self.scenario.workload.tokens_per_step

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


def fixes_of(scenario: Scenario, assessment: Assessment, ways_out: Iterable[WayOut]) -> list[Fix]:
    """Return the ways out, each with its pace a token relative to an assessed plan."""
    own = assessment.time.step_seconds / scenario.workload.tokens_per_step
    return [
        Fix(
            way.change,
            way.peak_bytes,
            pace(way.step_seconds / way.scenario.workload.tokens_per_step, own),
            way.options,
            way.condition,
        )
        for way in ways_out
    ]


def check(change: Change) -> WayOut | None:
    """Price one change; None unless it is legal and fits."""
    scenario, fixed, plan = change.scenario, change.fixed, change.plan
    words = f"pricing ways out: {change.change}"
    report(words)
    if plan is not None:
        return _fitting(change, plan) if is_legal(scenario, plan) else None
    if too_small(scenario, fixed.get("offload", "none"), fixed.get("offload_device", "cpu")):
        return None
    flat = "pipeline_parallel" not in fixed and scenario.layer_ranges is None
    with stages(1.0, 2.0) as begin:
        if flat:  # few plans, usually enough
            begin(words)
            found = first_plan(scenario, {**FLAT, **fixed}, common_only=True)
            if found.plan is not None:
                given = prod(fixed.get(name, 1) for name in RANKS)
                several = scenario.cluster.num_gpus > given  # ranks that could be pipeline ranks
                options = f"{change.options} --pp 1" if several else change.options
                return _fitting(structs.replace(change, options=options), found.plan)
        begin(words)
        found = first_plan(scenario, fixed, common_only=True)
    return _fitting(change, found.plan) if found.plan is not None else None


def _fitting(change: Change, plan: Plan) -> WayOut | None:
    assessment = assess(change.scenario, plan)
    if not assessment.fits:
        return None
    return WayOut(**{**structs.asdict(change), "plan": plan}, assessment=assessment)


def ways_out(
    scenario: Scenario, plan: Plan, fixed: Mapping[str, Any] | None = None
) -> tuple[WayOut, ...]:
    """Return up to MOST_WAYS changes with which a plan fits, in the order in which people try them.

    ``plan``: does not fit. ``fixed``: its given fields; None: all of them. At most one change of a
    kind, each to another plan.
    """
    pinned = PinnedPlan(scenario, plan, plan.to_dict() if fixed is None else fixed)
    with stages(*SIZES, joint=True) as begin:
        begin("searching for ways out")
        found = _first_of_kinds(_same_hardware(pinned), MOST_SOFTWARE)
        for further in (offloads, larger_accelerators, more_accelerators):
            begin("searching for ways out")
            found += _first_of_kinds(further(pinned), 1)
        begin("searching for ways out")
        if not any(way.kind == "optimizer" for way in found):
            found += _first_of_kinds(sixteen_bits(pinned), 1)
    return tuple(found)


def _same_hardware(pinned: PinnedPlan) -> Iterator[Change]:
    """Yield the changes of plan and training."""
    for changes in tracked((other_plans, other_trainings)):
        yield from tracked(list(changes(pinned)))


def _first_of_kinds(changes: Iterator[Change], most: int) -> list[WayOut]:
    """Return the first way of every kind that fits, in order, without repeated plans."""
    found: dict[str, WayOut] = {}
    for change in changes:
        if not found.keys().isdisjoint((change.kind, *NEEDLESS.get(change.kind, ()))):
            continue
        way = check(change)
        known = [(other.scenario, other.plan) for other in found.values()]
        if way is None or (way.scenario, way.plan) in known:
            continue
        found[change.kind] = way
        if len(found) == most:
            break
    return list(found.values())
