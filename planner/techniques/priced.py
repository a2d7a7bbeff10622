"""Lines of techniques that shardplan prices: the best plan of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from cost_models.communication.ring_and_tree import received_bytes
from cost_models.communication.seconds import axis_groups
from cost_models.legality.capabilities import targets
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import rank_communication
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError
from hardware_profiles.progress import report, tracked
from planner.answer.answers import not_run
from planner.answer.text import short_plan
from planner.assessment.assess import Assessment, assess_plans
from planner.request.constraints import parse_requirements
from planner.request.divisors import divisors
from planner.request.pins import parse_fixed
from planner.search.search import search
from planner.techniques.kinds import Technique
from planner.techniques.line import Level, TechniqueLine

FREE: Final = 6.0  # time of a search without pins over that of a technique
LIMIT = "require"  # in a variant: constraints in place of those of the technique


def priced_lines(
    scenario: Scenario, techniques: Sequence[Technique], micro_batch_size: int | None
) -> list[TechniqueLine]:
    """Return the lines of techniques: their best plans, or the smallest ones where none fits."""
    found: dict[str, tuple[Plan | None, str]] = {}
    for technique in tracked(techniques, size=lambda one: 1.0 if one.fixed else FREE):
        report(f"comparing techniques: {technique.title}")
        found[technique.name] = best_of(scenario, technique, micro_batch_size)
    plans = list(dict.fromkeys(plan for plan, _ in found.values() if plan is not None))
    assessed = dict(zip(plans, assess_plans(scenario, plans), strict=True))
    lines = []
    for technique in techniques:
        plan, why_not = found[technique.name]
        if plan is None:
            level = _level(technique, why_not)
            one = TechniqueLine(technique.name, technique.title, level, why_not=why_not)
        else:
            one = _line(scenario, technique, assessed[plan])
        lines.append(one)
    return lines


def _level(technique: Technique, unproven: str | None) -> Level:
    """Return what shardplan does; ``unproven``: why it does not run the plan."""
    if unproven is None:
        return "runs"
    return "plans" if technique.searched else "estimates"


def _line(scenario: Scenario, technique: Technique, one: Assessment) -> TechniqueLine:
    plan = one.plan
    unproven = not_run(scenario, plan)
    return TechniqueLine(
        technique.name,
        technique.title,
        _level(technique, unproven),
        layout=short_plan(plan),
        plan=plan,
        verdict=one.verdict,
        peak_bytes=one.memory.peak_bytes,
        received_bytes=received_by_rank(scenario, plan),
        exposed_seconds=float(one.time.parts.communication),
        step_seconds=one.time.step_seconds,
        exports=exports_of(scenario, plan),
        note="; ".join(filter(None, (technique.note, unproven))),
    )


def best_of(
    scenario: Scenario, technique: Technique, micro_batch_size: int | None
) -> tuple[Plan | None, str]:
    """Return the fastest plan of a technique that fits, else the smallest; or why there is none."""
    mbs = {} if micro_batch_size is None else {"micro_batch_size": micro_batch_size}
    found, reasons = [], []
    for further in tracked(technique.variants):
        require = parse_requirements(further.get(LIMIT, technique.require))
        pins = {name: value for name, value in further.items() if name != LIMIT}
        fixed = {**technique.fixed, **pins, **mbs}
        try:
            result = search(scenario, fixed, top=1, require=require)
        except InputError as error:
            reasons.append(str(error))
            continue
        if result.plans:
            found.append((0 if result.fits else 1, result.seconds[0], result.plans[0]))
        elif result.smallest is not None:
            found.append((2, result.smallest_peak, result.smallest))
        reasons += result.illegal_example.values()
    if found:
        return min(found, key=lambda each: each[:2])[2], ""
    return None, _why_not(scenario, technique, reasons)


def _why_not(scenario: Scenario, technique: Technique, reasons: Sequence[str]) -> str:
    """Return why a technique has no legal plan, of one that has its smallest degree."""
    name, _, value = technique.require.partition(">=")
    if technique.name == "experts" and not scenario.model.has_experts:
        return f"{scenario.model.name} has no experts"
    if scenario.world_size == 1:
        return "there is one accelerator"
    least = next((n for n in divisors(scenario.world_size) if n >= int(value or 1)), 1)
    if name and technique.variants == ({},):
        try:
            found = search(scenario, {**technique.fixed, **parse_fixed(f"{name}={least}")}, top=1)
            reasons = list(found.illegal_example.values())
        except InputError as error:
            reasons = [str(error)]
    return reasons[0] if reasons else f"no legal plan has {technique.require or 'these parts'}"


def received_by_rank(scenario: Scenario, plan: Plan) -> float:
    """Return the bytes that the rank with the most traffic receives in a step."""
    groups = axis_groups(PlanTable.from_plans([plan]))
    totals: Sequence[float] = [
        sum(
            float(np.sum(received_bytes(kind, traffic.size, groups[axis][0])))
            for (axis, kind), traffic in by_axis.items()
            if float(np.sum(traffic.count)) > 0.0
        )
        for by_axis in rank_communication(scenario, plan, default_layer_ranges(scenario, plan))
    ]
    return max(totals, default=0.0)


def exports_of(scenario: Scenario, plan: Plan) -> tuple[str, ...]:
    """Return the trainers that run a plan, to whose files ``export`` writes it."""
    model, workload = scenario.model, scenario.workload
    return tuple(
        name
        for name, target in targets().items()
        if (not target.families or model.family in target.families)
        and not target.problems(plan, workload, experts=model.has_experts)
    )
