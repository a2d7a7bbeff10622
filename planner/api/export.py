"""``export()``: a plan as the configuration of another trainer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models.legality.capabilities import Capabilities, capabilities
from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile, read_plan_file
from cost_models.pricing.prediction import scenario_of
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile
from planner.advice.nearest import nearest
from planner.exchange.job import Job
from planner.exchange.registry import target
from planner.request.command import plan_command
from planner.request.limits import searches_of
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

    def renamed(self, name: str) -> Exported:
        """Return the same with another name for its only file."""
        ((before, text),) = self.files.items()
        stems = {before: name, Path(before).stem: Path(name).stem}
        launch = re.sub(
            rf"\b{re.escape(before)}|(?<=--module ){re.escape(Path(before).stem)}\b",
            lambda found: stems[found[0]],
            self.launch,
        )
        return replace(self, files={name: text.replace(self.launch, launch)}, launch=launch)

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
    problems = limits.problems(file.plan, file.workload, experts=file.model.has_experts)
    if problems:
        raise InputError(
            f"{limits.name} cannot run this plan: {'; '.join(problems)}. "
            + _nearest(file, to, limits)
        )
    one, job = target(to), Job(file)
    files = one.write(job, limits.version)
    header = one.header(job, limits.version)
    notes = () if file.rank_order is None else ("the order of ranks is that of the launcher",)
    return Exported(limits.title, limits.version, files, header.elsewhere, header.launch, notes)


def _nearest(file: PlanFile, to: str, limits: Capabilities) -> str:
    """Return the best plan that a target runs for the same job, and its command."""
    if limits.problem_of_workload(file.workload) is not None:
        return "Choose another value of it, with shardplan plan"
    scenario = replace(scenario_of(file), layer_ranges=None, stage_recompute_layers=None)
    return nearest(limits.title, searches_of(scenario, to), _command(scenario, to))


def _command(scenario: Scenario, to: str) -> str:
    """Return the command that searches the plans of a target."""
    bare = replace(scenario, software=software_profile("shardplan"))
    command = plan_command(bare, Plan())
    return command.replace(" -o plan.json", f" --to {to} -o plan.json")
