"""Answers of ``fit`` and ``plan`` for a traced module of unknown layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from cost_models.plan.plan import Plan
from planner.answer.answers import AssessedAnswer
from planner.assessment.assess import amounts
from planner.assessment.documents import cluster_document
from planner.request.executor_process import PREFIX
from planner.text.answer import SCHEMA_VERSION, DetailedAnswer
from planner.traced.scenario import TracedAssessment, TracedCounts, TracedScenario, only_varied
from planner.traced.stages import Cut
from planner.traced.text import fit_text, plan_text
from planner.traced.ways_out import TracedWayOut, largest_micro_batch, ways_out

if TYPE_CHECKING:
    import pandas as pd

CONFIDENCE: Final = "traced"


def header(scenario: TracedScenario) -> dict[str, Any]:
    """Return the first entries of every JSON answer."""
    module = scenario.module
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {
            "name": module.name,
            "family": module.kind,
            "parameters": module.num_parameters,
            "active_parameters": module.num_parameters,
            "trainable_parameters": module.num_trainable_parameters,
            "tied_parameters": module.tied_parameters,
            "buffer_bytes": module.buffer_bytes,
            "output_bytes_per_row": module.output_bytes_per_row,
            "blocks": [
                {"name": name, "parameters": round(float(block.elements()))}
                for name, block in zip(module.block_names, module.blocks, strict=True)
            ],
        },
        "cluster": cluster_document(scenario.cluster),
        "workload": scenario.workload_document(),
        "software": scenario.software.name,
    }


def train_with(scenario: TracedScenario, plan: Plan) -> str:
    """Return a Python expression that trains a module with a plan; "" for a live module."""
    if not scenario.module.name.startswith(PREFIX):
        return ""
    options = ", ".join(
        f"{name}={value!r}"
        for name, value in only_varied(plan).items()
        if value != getattr(Plan(), name)
    )
    module = scenario.module
    return (
        f"ModuleTrainer(load_factory({module.name!r}), Plan({options}), "
        f"precision={module.precision!r}, optimizer={scenario.workload.optimizer!r})"
    )


@dataclass(frozen=True, repr=False)
class TracedFitAnswer(AssessedAnswer):
    """Answer of ``fit``: verdict on one plan, its parts, and ways out.

    Ways out and the largest micro-batch are computed on first access.
    """

    scenario: TracedScenario
    plan: Plan
    assessment: TracedAssessment
    assumptions: tuple[str, ...]

    @cached_property
    def ways_out(self) -> tuple[TracedWayOut, ...]:
        """Changes with which the plan fits; empty if it fits already."""
        return () if self.verdict == "fits" else ways_out(self.scenario, self.plan)

    @cached_property
    def largest_micro_batch(self) -> int | None:
        """Largest micro-batch size that fits; None if the plan does not fit."""
        return largest_micro_batch(self.scenario, self.plan) if self.verdict == "fits" else None

    def notebook_parts(self) -> Iterator[str]:
        """Yield verdict, parts of the memory, and fixes."""
        from planner.answer import notebook
        from planner.answer.text import short_plan
        from planner.traced.text import fixes_of, model_lines, time_line

        found = self.assessment
        yield notebook.verdict(found, f"A step takes {time_line(found.time)}.")
        yield notebook.about(
            model_lines(self.scenario), self.scenario.cluster, short_plan(self.plan)
        )
        yield notebook.memory_bars(amounts(found.memory.parts))
        yield notebook.fixes_table(fixes_of(self.ways_out))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        document = self.assessment.to_dict()
        memory = {k: v for k, v in document["memory"].items() if k != "verdict"}
        return {
            **header(self.scenario),
            "verdict": self.verdict,
            "plan": document["plan"],
            "memory": memory,
            "time": document["time"],
            "train_with": train_with(self.scenario, self.plan),
            "assumptions": list(self.assumptions),
            "confidence": CONFIDENCE,
            "ways_out": [way.to_dict() for way in self.ways_out],
            "reach": {"largest_micro_batch_size": self.largest_micro_batch}
            if self.verdict == "fits"
            else {},
        }

    def text(self, *, verbose: bool = False) -> str:
        """Return the text; ``verbose``: with all assumptions, sources and counts."""
        return fit_text(
            self.scenario,
            self.plan,
            self.assessment,
            assumptions=self.assumptions,
            ways_out=self.ways_out,
            largest_micro_batch=self.largest_micro_batch,
            following=train_with(self.scenario, self.plan),
            verbose=verbose,
        )


@dataclass(frozen=True, slots=True, repr=False)
class TracedPlanAnswer(DetailedAnswer):
    """Answer of ``plan``: the ranked plans and the counts of the search."""

    scenario: TracedScenario
    plans: tuple[Plan, ...]
    assessments: tuple[TracedAssessment, ...]
    search: TracedCounts
    assumptions: tuple[str, ...]
    fixed: Mapping[str, Any]
    cut: Cut | None = None  # into pipeline stages, which the executor does not train
    rows: int | None = None  # of the table; None: as many as a short answer has room for

    @property
    def best(self) -> Plan:
        """The first plan."""
        return self.plans[0]

    @property
    def table(self) -> pd.DataFrame:
        """The ranked plans as a DataFrame, one a row, in SI units."""
        import pandas as pd

        return pd.DataFrame([assessment.row() for assessment in self.assessments])

    def notebook_parts(self) -> Iterator[str]:
        """Yield the best plan with its verdict, and the ranked plans."""
        from planner.answer import notebook
        from planner.answer.text import short_plan
        from planner.text.html_page import table
        from planner.traced.text import model_lines, ranked_rows, time_line

        best = self.assessments[0]
        yield notebook.verdict(best, f"A step takes {time_line(best.time)}.")
        yield notebook.about(
            model_lines(self.scenario), self.scenario.cluster, f"best: {short_plan(best.plan)}"
        )
        (head, *rows), _ = ranked_rows(self.assessments)
        yield table(rows, head)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            **header(self.scenario),
            "plans": [assessment.to_dict() for assessment in self.assessments],
            "fixed": dict(self.fixed),
            "search": self.search.to_dict(),
            "cut": None if self.cut is None else self.cut.to_dict(),
            "train_with": train_with(self.scenario, self.best),
            "assumptions": list(self.assumptions),
            "confidence": CONFIDENCE,
        }

    def text(self, *, verbose: bool = False) -> str:
        """Return the text; ``verbose``: with all assumptions, sources and counts."""
        return plan_text(
            self.scenario,
            self.assessments,
            self.search,
            assumptions=self.assumptions,
            following=train_with(self.scenario, self.best),
            cut=self.cut,
            rows=self.rows,
            verbose=verbose,
        )
