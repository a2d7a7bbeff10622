"""A first plan within about a second: the simplest of the fastest that every trainer runs.

Two searches: common plans, with 1F1B pipelines; and, only where none of these fits, all plans of
``search``. So "no plan fits" is exact, and the plan is the best of the common ones, recomputing as
few layers as fit: ``search`` also compares other schedules, replicas of shards, and numbers of
recomputed layers under every plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from msgspec import Struct

from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.table import table_steps
from cost_models.scenario import Scenario
from hardware_profiles.options import Declared, declared
from planner.assessment.reach import fewest_recomputed
from planner.assessment.too_small import too_small
from planner.search.search import search
from planner.search.simplicity import CLOSE
from planner.search.sources.partial_recompute import varies_layers

COMMON: Final[dict[str, Any]] = {
    "pipeline_schedule": "1f1b",
    "virtual_stages": 1,
    "dp_replicate": 1,
    "recompute_layers": 0,
}
WHOLE: Final[dict[str, Any]] = {"dp_replicate": 1}  # replicas of shards never need less memory
FLAT: Final[dict[str, Any]] = {"pipeline_parallel": 1}


class FirstPlan(Struct, frozen=True):
    """Result of a quick search."""

    plan: Plan | None  # fits with its whole interval; None: no plan does
    smallest: Plan | None  # the legal plan with the smallest peak; None: no plan is legal
    priced: int  # plans


def is_complete(fixed: Mapping[str, Any]) -> bool:
    """Whether pinned fields name a whole plan, so that the others are at their defaults."""
    return all(name in fixed for name, one in declared(Plan).items() if _always(one))


def _always(one: Declared) -> bool:
    return one.option is not None and one.option.pasted == "always" and one.option.of is None


def first_plan(
    scenario: Scenario,
    fixed: Mapping[str, Any],
    offloads: Sequence[str] = ("none",),
    *,
    common_only: bool = False,
) -> FirstPlan:
    """Return the simplest of the fastest common plans with the fields in ``fixed``.

    ``offloads``: allowed values of Plan.offload. ``common_only``: without the search of all plans.
    """
    offloads = [fixed["offload"]] if "offload" in fixed else offloads
    device = fixed.get("offload_device", "cpu")
    common_only = common_only or all(too_small(scenario, one, device) for one in offloads)
    found = search(scenario, {**COMMON, **fixed}, top=1, distinct=1, offloads=offloads)
    priced, smallest = found.counts.priced, found
    if not (found.fits or common_only):
        found = search(scenario, {**WHOLE, **fixed}, top=1, distinct=1, offloads=offloads)
        priced = found.counts.priced + found.counts.part_recomputed
        smallest = min(smallest, found, key=lambda one: one.smallest_peak)
    plan = found.simplest_first().plans[0] if found.fits else None
    if plan is not None and varies_layers(scenario, fixed):
        plan = _recomputing_less(scenario, plan)
    return FirstPlan(plan, smallest.smallest, priced)


def _recomputing_less(scenario: Scenario, plan: Plan) -> Plan:
    """Return the plan with the fewest recomputed layers that fit, if that saves over ``CLOSE``."""
    if plan.recompute != "full" or plan.recompute_layers:
        return plan
    fewest = fewest_recomputed(scenario, plan)
    if not fewest:
        return plan
    fewer = replace(plan, recompute_layers=fewest)
    before, after = table_steps(scenario, PlanTable.from_plans([plan, fewer]))
    return fewer if after < (1.0 - CLOSE) * before else plan
