"""Answers of ``fit`` and ``plan``, with their text, JSON and drawings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cost_models.legality.executor_proofs import unproven
from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from cost_models.scenario import Scenario
from planner.assessment.assess import Assessment, MemoryAssessment, plan_file
from planner.assessment.documents import cluster_document, model_document
from planner.request.scenario import DEFAULT_SOFTWARE
from planner.text.answer import SCHEMA_VERSION, DetailedAnswer

if TYPE_CHECKING:
    from planner.answer.ranked_plan import RankedPlan


def header(scenario: Scenario) -> dict[str, Any]:
    """Return the first entries of every JSON answer."""
    pinned, by_stage = scenario.layer_ranges, scenario.stage_recompute_layers
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model_document(scenario.model),
        "cluster": cluster_document(scenario.cluster),
        "workload": scenario.workload.to_dict(),
        "software": scenario.software.name,
        **({} if pinned is None else {"layer_ranges": [list(pair) for pair in pinned]}),
        **({} if by_stage is None else {"stage_recompute_layers": list(by_stage)}),
    }


class AssessedAnswer(DetailedAnswer):
    """Answer about one plan that was assessed."""

    __slots__ = ()
    assessment: MemoryAssessment[Any]

    @property
    def verdict(self) -> str:
        """fits, tight or does_not_fit."""
        return self.assessment.verdict


class RankedAnswer(DetailedAnswer):
    """Answer whose plans are ranked, the best first."""

    __slots__ = ()
    ranked: tuple[RankedPlan, ...]

    @property
    def best(self) -> Plan:
        """The best plan; without own stages the simplest of those as fast as the fastest."""
        return self.ranked[0].plan

    @property
    def assessments(self) -> tuple[Assessment, ...]:
        """The assessments of the ranked plans."""
        return tuple(one.assessment for one in self.ranked)

    def plan_file(self, rank: int = 0) -> PlanFile:
        """Return the contents of a plan.json for the plan of that rank (0: the best)."""
        found = self.ranked[rank]
        return plan_file(found.scenario, found.plan, made_by(), found.trainer)

    @abstractmethod
    def notebook_tables(self) -> Iterator[str]:
        """Yield the tables of a notebook."""

    def notebook_parts(self) -> Iterator[str]:
        """Yield the best plan with its verdict, and the tables."""
        from planner.answer import notebook
        from planner.answer.text import model_lines, short_plan_of

        best = self.ranked[0]
        plan = f"best: {short_plan_of(best.scenario, best.plan)}"
        yield notebook.verdict(best.assessment, notebook.step_sentence(best.assessment))
        yield notebook.about(model_lines(best.scenario), best.scenario.cluster, plan)
        yield from self.notebook_tables()
        yield notebook.step_bars(best.assessment)


def made_by() -> str:
    """Return name and version, for files."""
    import importlib.metadata

    return f"shardplan {importlib.metadata.version('shardplan')}"


def not_run(scenario: Scenario, plan: Plan) -> str | None:
    """Return why the bundled executor does not run a plan, in words; None if it does."""
    if scenario.software.name != DEFAULT_SOFTWARE:
        return f"priced for {scenario.software.name}"
    why = unproven(scenario.model, scenario.workload, plan)
    return None if why is None else f"the bundled executor is not proven to run it: {why}"
