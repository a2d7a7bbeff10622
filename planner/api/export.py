"""``export()``: a plan as the configuration of another trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile, read_plan_file
from cost_models.pricing.prediction import scenario_of
from cost_models.scenario import Scenario
from cost_models.units import format_bytes, format_seconds
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile
from planner.assessment.assess import assess
from cost_models.legality.capabilities import Capabilities, capabilities
from planner.exchange.job import Job
from planner.exchange.registry import target
from planner.request.command import describe_plan, plan_command
from planner.request.limits import pins_of, runnable
from planner.search.search import search
from planner.text.paragraphs import labelled


@dataclass(frozen=True)
class Exported:
    """The files of a target, and what they do not hold."""

    target: str
    version: str
    files: Mapping[str, str]  # text by name
    elsewhere: Mapping[str, tuple[Any, str]]  # options that are set elsewhere: value, and where
    launch: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = labelled("Target", f"{self.target} {self.version}")
        for name, (value, where) in self.elsewhere.items():
            lines += labelled("Set", f"{name} = {value}: {where}")
        for note in self.notes:
            lines += labelled("Note", note)
        return "\n".join([*lines, *(f"{'Start':<11}{one}" for one in self.launch.splitlines())])

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "schema_version": 1,
            "target": self.target,
            "version": self.version,
            "files": dict(self.files),
            "set_elsewhere": {
                name: {"value": value, "where": where}
                for name, (value, where) in self.elsewhere.items()
            },
            "launch": self.launch,
            "notes": list(self.notes),
        }


def export(plan: str | Path | PlanFile, to: str) -> Exported:
    """Return the files of a target for a plan, or raise with the nearest plan that it runs.

    ``plan``: a plan.json, or what a search returned (``answer.plan_file()``).
    """
    limits = capabilities(to)
    file = plan if isinstance(plan, PlanFile) else read_plan_file(Path(plan))
    of_plan = limits.problems_of_plan(file.plan, experts=file.model.has_experts)
    problems = [limits.problem_of_workload(file.workload), *of_plan]
    found = [problem for problem in problems if problem is not None]
    if found:
        raise InputError(
            f"{limits.title} {limits.version} cannot run this plan: {'; '.join(found)}. "
            + nearest(file, to, limits)
        )
    one, job = target(to), Job(file)
    files = one.write(job, limits.version)
    header = one.header(job, limits.version)
    notes = () if file.rank_order is None else ("the order of ranks is that of the launcher",)
    return Exported(limits.title, limits.version, files, header.elsewhere, header.launch, notes)


def nearest(file: PlanFile, to: str, limits: Capabilities) -> str:
    """Return the best plan that a target runs for the same job, priced, and its command.

    A plan that fits goes before a tight one, a faster before a slower one.
    """
    problem = limits.problem_of_workload(file.workload)
    if problem is not None:
        return "Choose another value of it, with shardplan plan"
    scenario = replace(scenario_of(file), layer_ranges=None, stage_recompute_layers=None)
    require = (runnable(to, experts=file.model.has_experts),)
    best: tuple[bool, float, str] | None = None
    for stage in limits.limits()["zero_stage"]:
        name = limits.software_for(stage, adapters=file.workload.adapter != "none")
        priced = replace(scenario, software=software_profile(name))
        pins = {**pins_of(to), "zero_stage": stage}
        result = search(priced, pins, require=require, top=1)
        for plan in result.plans:
            assessment = assess(priced, plan)
            seconds, tight = assessment.time.step_seconds, assessment.verdict != "fits"
            words = (
                f"{describe_plan(plan)} ({format_seconds(seconds)} a step, "
                f"{format_bytes(assessment.memory.peak_bytes)}{', tight' if tight else ''})"
            )
            if best is None or (tight, seconds) < best[:2]:
                best = tight, seconds, words
    if best is None:
        return f"No plan that {limits.title} runs fits {scenario.cluster.name}"
    return f"The nearest that it runs: {best[2]}; {_command(scenario, to)}"


def _command(scenario: Scenario, to: str) -> str:
    """Return the command that searches the plans of a target."""
    bare = replace(scenario, software=software_profile("shardplan"))
    command = plan_command(bare, Plan())
    return command.replace(" -o plan.json", f" --to {to} -o plan.json")
