"""The plan of a report or a trace: legal, with its prediction, and with a run of it, if any."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cost_models.legality.rules import require_legal
from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile, read_plan_file
from cost_models.pricing.prediction import scenario_of
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError
from planner.answer.fit_answer import FitAnswer
from planner.answer.plan_answer import PlanAnswer
from planner.assessment.assess import Assessment, assess
from planner.reports.simulated_step import SimulatedStep, shortened, simulated_step
from planner.runs.run_record import RUN_FILE, RunRecord, read_run

Reportable = str | Path | PlanFile | FitAnswer | PlanAnswer


@dataclass(frozen=True)
class ReportedPlan:
    """A plan of a file, its scenario and its new prediction; ``run``: None for a plan.json."""

    path: Path
    file: PlanFile
    scenario: Scenario
    assessment: Assessment
    run: RunRecord | None

    @property
    def name(self) -> str:
        """Model and cluster."""
        return f"{self.file.model.name} on {self.file.cluster.name}"

    @cached_property
    def drawn_step(self) -> SimulatedStep:
        """The simulated step, with the fewest micro-batches for a drawing."""
        return self.step(shortened(self.file.plan))

    def step(self, drawn: Plan | None = None) -> SimulatedStep:
        """Return the simulated step; ``drawn``: the plan with fewer micro-batches."""
        file = self.file
        return simulated_step(
            self.scenario, file.plan, file.layer_ranges, self.assessment, drawn=drawn
        )


def read_reported(plan: Reportable) -> ReportedPlan:
    """Return the plan of an answer, of a plan.json, or of the folder of a run or its run.json."""
    if isinstance(plan, (FitAnswer, PlanAnswer)):
        plan = plan.plan_file()
    if isinstance(plan, PlanFile):
        return _reported(Path("answer"), plan, None)
    if not isinstance(plan, (str, Path)):
        raise InputError(f"plan = {plan!r} (must be a plan.json, a run's folder, or an answer)")
    path = Path(plan)
    run = read_run(path) if path.is_dir() or path.name == RUN_FILE else None
    file = read_plan_file(path) if run is None else run.plan_file
    return _reported(path, file, run)


def _reported(path: Path, file: PlanFile, run: RunRecord | None) -> ReportedPlan:
    scenario = scenario_of(file)
    require_legal(scenario, file.plan, path)
    return ReportedPlan(path, file, scenario, assess(scenario, file.plan, file.layer_ranges), run)
