"""The plan that a trainer runs in place of one that it cannot run, priced, with its command."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cost_models.legality.rules import CODES, RULES, legality_codes
from cost_models.plan.plan import Plan, PlanTable
from cost_models.scenario import Scenario
from cost_models.units import format_bytes, format_seconds
from hardware_profiles.errors import InputError
from planner.assessment.assess import assess
from planner.request.command import describe_plan, plan_command
from planner.request.limits import TrainerSearch
from planner.search.search import search


def nearest(title: str, searches: Iterable[TrainerSearch], command: str) -> str:
    """Return the best plan of some searches, in words; ``command``: finds it.

    A plan that fits goes before a tight one, a faster before a slower one.
    """
    from planner.refinement.best_partition import best_staged  # large, and seldom needed

    best: tuple[bool, float, str] | None = None
    for one in searches:
        found = search(one.scenario, one.pins, require=one.require, top=1, with_near=True)
        staged = best_staged(
            one.scenario, found.plans, found.near, recomputed=found.recomputed, require=one.require
        )
        for plan in found.plans:
            scenario, options = one.scenario, describe_plan(plan)
            if staged is not None:
                scenario, plan, options = staged.scenario(scenario), staged.plan, staged.options
            assessment = assess(scenario, plan)
            seconds, tight = assessment.time.step_seconds, assessment.verdict != "fits"
            words = (
                f"{options} ({format_seconds(seconds)} a step under {scenario.software.name}, "
                f"{format_bytes(assessment.memory.peak_bytes)}{', tight' if tight else ''})"
            )
            if best is None or (tight, seconds) < best[:2]:
                best = tight, seconds, words
    if best is None:
        return f"No plan that {title} runs fits the cluster"
    return f"The nearest that it runs: {best[2]}. To write it: {command}"


def require_runnable(scenario: Scenario, plan: Plan) -> None:
    """Raise for a plan that is not legal; where the trainer alone cannot run it, name the nearest.

    Pinned stages are left out of the search for it.
    """
    code = int(legality_codes(scenario, PlanTable.from_plans([plan]))[0])
    if not code:
        return
    words = RULES[code - 1].words(scenario, plan)
    if CODES[code] != "trainer":
        raise InputError(words)
    bare = replace(scenario, layer_ranges=None, stage_recompute_layers=None)
    software = scenario.software.name
    found = nearest("it", [TrainerSearch(bare, {}, ())], plan_command(bare, Plan()))
    raise InputError(f"{words}. --software {software}+any-plan prices it all the same. {found}")
