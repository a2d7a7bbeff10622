"""What a target can run: a constraint of a search, a check of pins, and its searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import Struct, structs

from cost_models.legality.capabilities import Capabilities, capabilities, capabilities_of
from cost_models.plan.plan import Plan, PlanTable
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError
from hardware_profiles.software.engine import PLUS
from hardware_profiles.software.trainer import profile_names, software_profile
from planner.request.constraints import Constraint


class Runnable(Constraint, frozen=True):
    """That a target can run a plan."""

    limits: Capabilities
    experts: bool  # whether the model has

    @property
    def may_change(self) -> bool:
        """No weaker constraint exists."""
        return False

    def column(self, table: PlanTable) -> Any:
        """Return whether the target can run each plan of a table."""
        return self.limits.runnable(table, experts=self.experts)


def runnable(name: str, *, experts: bool) -> Runnable:
    """Return the constraint that a target can run a plan; ``experts``: whether the model has.

    >>> runnable("deepspeed", experts=False).text
    '--to deepspeed'
    """
    return Runnable(f"runs on {name}", "==", True, f"--to {name}", capabilities(name), experts)


def limits_of_trainer(scenario: Scenario, require: Sequence[Constraint]) -> Capabilities | None:
    """Return what the trainer of a search can run; None: every plan.

    A target among the constraints goes before the scenario's software.
    """
    named = (one.limits for one in require if isinstance(one, Runnable))
    return next(named, None) or capabilities_of(scenario.software)


def with_limits(scenario: Scenario, trainer: str, of: str = "target") -> Scenario:
    """Return a scenario whose software profile runs what a trainer does; empty: the same one.

    ``of``: where the trainer stands, for the error of an unknown one.
    """
    if not trainer:
        return scenario
    capabilities(trainer, of)  # the name exists
    software = structs.replace(scenario.software, capabilities=trainer)
    return replace(scenario, software=software)


def require_possible(name: str, fixed: Mapping[str, Any]) -> None:
    """Raise where pins alone are beyond a target, whatever the other parts are."""
    plain = {key: value for key, value in fixed.items() if not isinstance(value, (tuple, list))}
    problems = capabilities(name).problems_of_plan(Plan(**plain), only=plain)
    if problems:
        raise InputError(f"--fix contradicts --to {name}: {problems[0]}")


def pins_of(name: str) -> dict[str, Any]:
    """Return the pins that a search needs in addition to the constraint.

    Numbers of recomputed layers are varied where none is pinned.
    """
    limits = capabilities(name).limits()
    return {"recompute_layers": 0} if limits.get("recompute_layers") == [0] else {}


class TrainerSearch(Struct, frozen=True):
    """A search of the plans that one trainer runs, with the prices of its software profile."""

    scenario: Scenario
    pins: Mapping[str, Any]
    require: tuple[Constraint, ...]


def searches_of(scenario: Scenario, name: str) -> list[TrainerSearch]:
    """Return the searches of a software profile, or of a target: one for each ZeRO stage."""
    if name in profile_names():
        return [TrainerSearch(replace(scenario, software=software_profile(name)), {}, ())]
    limits, require = capabilities(name), (runnable(name, experts=scenario.model.has_experts),)
    adapters, found = scenario.workload.adapter != "none", []
    for stage in limits.limits()["zero_stage"]:
        software = software_profile(limits.software_for(stage, adapters=adapters))
        pins = {**pins_of(name), "zero_stage": stage}
        found.append(TrainerSearch(replace(scenario, software=software), pins, require))
    return found


def searches_like(scenario: Scenario, plan: Plan, trainer: str) -> list[TrainerSearch]:
    """Return the searches that found a plan; ``trainer``: of a plan.json.

    The profile of the plan's ZeRO stage, with the engines of its update, is the scenario's. Where
    the trainer does not name it, ``--software`` did, which prices every stage.
    """
    if not trainer:
        return [TrainerSearch(scenario, {}, ())]
    limits, name = capabilities(trainer), scenario.software.name
    own = limits.software_for(plan.zero_stage, adapters=scenario.workload.adapter != "none")
    if not limits.software_of_zero_stage or not f"{name}{PLUS}".startswith(f"{own}{PLUS}"):
        require = (runnable(trainer, experts=scenario.model.has_experts),)
        return [TrainerSearch(scenario, pins_of(trainer), require)]
    engines = name.removeprefix(own)
    return [
        structs.replace(
            one,
            scenario=replace(
                scenario, software=software_profile(one.scenario.software.name + engines)
            ),
        )
        for one in searches_of(scenario, trainer)
    ]
