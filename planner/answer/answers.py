"""Answers of ``fit`` and ``plan``, with their text, JSON and drawings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cost_models.legality.executor_proofs import unproven
from cost_models.memory.parts import PART_WORDS
from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from cost_models.scenario import Scenario
from cost_models.units import format_bytes
from planner.assessment.assess import Assessment, MemoryAssessment, amounts, assess, plan_file
from planner.assessment.confidence import confidence
from planner.assessment.documents import cluster_document, model_document
from planner.assessment.reach import Reach, reach
from planner.assessment.step_memory import StepMemory, step_memory
from planner.request.scenario import DEFAULT_SOFTWARE
from planner.text.answer import SCHEMA_VERSION, DetailedAnswer
from planner.text.paragraphs import MOMENT_WORDS

if TYPE_CHECKING:
    import pandas as pd

    from planner.advice.savings import Saving
    from planner.advice.trainers import BestOfTrainer
    from planner.advice.ways_out import WayOut
    from planner.answer.ranked_plan import RankedPlan
    from planner.request.constraints import Constraint
    from planner.run_cost.failures import TrainingRun
    from planner.search.search import SearchResult
    from planner.search.simplicity import Tie


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


@dataclass(frozen=True, repr=False)
class FitAnswer(AssessedAnswer):
    """Answer of ``fit``: verdict on one plan, its parts, and ways out.

    Ways out need searches, which run on first access.
    """

    scenario: Scenario
    plan: Plan
    assessment: Assessment
    assumptions: tuple[str, ...]
    job: TrainingRun | None = None  # if tokens are given
    fixed: Mapping[str, Any] = field(default_factory=dict)  # the given parts of the plan
    notes: tuple[str, ...] = ()  # about the file of another trainer that was read
    whole_run: Mapping[str, Any] = field(default_factory=dict)  # its given options

    @cached_property
    def ways_out(self) -> tuple[WayOut, ...]:
        """Changes with which a plan fits, each with its command; empty if the plan fits already."""
        if self.verdict == "fits":
            return ()
        from planner.advice.ways_out import ways_out

        return ways_out(self.scenario, self.plan, self.fixed)

    @property
    def fits_with_another_plan(self) -> bool:
        """Whether the plan does not fit, and another one fits on the same cluster."""
        return any(way.is_another_plan for way in self.ways_out)

    @cached_property
    def reach(self) -> Reach | None:
        """Largest micro-batch size and longest sequence that fit; None if the plan does not fit."""
        if self.verdict != "fits":
            return None
        return reach(self.scenario, self.plan, self.assessment.memory.peak_bytes)

    @property
    def step_memory(self) -> StepMemory:
        """Memory of one step: moments of the limiting stage, peaks of all stages, largest terms."""
        return step_memory(self.scenario, self.plan, self.assessment.memory)

    @property
    def moments(self) -> pd.DataFrame:
        """Bytes of every part (columns) at the moments of a step (rows) on the fullest stage."""
        import pandas as pd

        shown = self.step_memory.shown_moments
        rows = {MOMENT_WORDS[moment.name]: amounts(moment.parts) for moment in shown}
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("moment")

    @property
    def stages(self) -> pd.DataFrame:
        """Bytes of every part at the peak of every pipeline rank, its layers and micro-batches."""
        import pandas as pd

        rows = [
            {"layers": one.layers, "in_flight": one.in_flight, **amounts(one.parts)}
            for one in self.step_memory.stages
        ]
        return pd.DataFrame(rows).rename_axis("stage")

    def plan_file(self) -> PlanFile:
        """Return the contents of a plan.json for this plan."""
        return plan_file(self.scenario, self.plan, made_by())

    def explain(self) -> str:
        """Return an explanation of the peak, moment by moment."""
        from planner.answer.memory_explanation import memory_explanation_text

        return memory_explanation_text(self.step_memory, self.assessment)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        assessment = self.assessment.to_dict()
        memory = {**assessment["memory"], **self.step_memory.to_dict()}
        memory.pop("verdict")
        return {
            **header(self.scenario),
            "verdict": self.verdict,
            "plan": assessment["plan"],
            "memory": memory,
            "time": assessment["time"],
            "job": None if self.job is None else self.job.to_dict(),
            "not_run": not_run(self.scenario, self.plan),
            "assumptions": list(self.assumptions),
            **({"notes": list(self.notes)} if self.notes else {}),
            "confidence": confidence(self.scenario),
            "fits_with_another_plan": self.fits_with_another_plan,
            "ways_out": [way.to_dict() for way in self.ways_out],
            "reach": {} if self.reach is None else self.reach.to_dict(),
        }

    def text(self, *, verbose: bool = False) -> str:
        """Return the text; ``verbose``: with all assumptions, sources and counts."""
        from planner.answer.fit_text import fit_text

        return fit_text(
            self.scenario,
            self.plan,
            self.assessment,
            assumptions=self.assumptions,
            ways_out=self.ways_out,
            reach=self.reach,
            largest="" if self.verdict == "fits" else self._largest(verbose=verbose),
            job=self.job,
            whole_run=self.whole_run,
            not_run=not_run(self.scenario, self.plan),
            verbose=verbose,
        )

    def _largest(self, *, verbose: bool) -> str:
        """Return the largest part of the memory and the formula of its largest term."""
        if self.assessment.is_short_on_the_host_alone:
            from planner.advice.changes import OFFLOADED

            return f"offloaded {OFFLOADED.get(self.plan.offload, 'pages of optimizer states')}"
        parts = amounts(self.assessment.memory.parts)
        name = max(parts, key=lambda part: parts[part])
        words = f"{PART_WORDS[name]}: {format_bytes(parts[name])}"
        terms = [term for term in self.step_memory.terms if term.part == name]
        if not terms:
            return words
        term = max(terms, key=lambda term: term.size)
        if not verbose:
            return "; ".join([f"{PART_WORDS[name]}: {term.name}", term.numbers or term.formula])
        numbers = f" = {term.numbers}" if term.numbers else ""
        return f"{words}; {term.name}: {term.formula}{numbers}"

    def to_svg(self) -> str:
        """Return a drawing of the memory at the moments of a step."""
        from planner.answer.memory_svg import memory_svg

        return memory_svg(self.step_memory, self.assessment, self._title)

    def to_html(self) -> str:
        """Return a self-contained page: the drawing, the largest terms, the answer."""
        from planner.answer.memory_html import memory_html

        answer = f"{self.text(verbose=True)}\n\n{self.explain()}"
        return memory_html(self.step_memory, self.assessment, self._title, answer)

    @property
    def _title(self) -> str:
        from planner.answer.memory_html import drawing_title

        name = f"{self.scenario.model.name} on {self.scenario.cluster.name}"
        return drawing_title(name, self.assessment)

    def notebook_parts(self) -> Iterator[str]:
        """Yield verdict, drawing of the memory, parts of the step, and fixes."""
        from planner.advice.ways_out import fixes_of
        from planner.answer import notebook
        from planner.answer.memory_html import fragment
        from planner.answer.text import model_lines, short_plan
        from planner.text.html_page import Html

        yield notebook.verdict(self.assessment, notebook.step_sentence(self.assessment))
        yield notebook.about(
            model_lines(self.scenario), self.scenario.cluster, short_plan(self.plan)
        )
        yield Html(fragment(self.step_memory, self.assessment, self._title))
        yield notebook.fixes_table(fixes_of(self.scenario, self.assessment, self.ways_out))
        yield notebook.step_bars(self.assessment)


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
        return plan_file(found.scenario, found.plan, made_by())

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


@dataclass(frozen=True, repr=False)
class PlanAnswer(RankedAnswer):
    """Answer of ``plan``: the ranked plans and the counts of the search.

    What other techniques would save and what other trainers reach needs searches, which run on
    first access.
    """

    scenario: Scenario
    result: SearchResult  # plans with even stages and the default order of ranks
    ranked: tuple[RankedPlan, ...]  # the best, which may have its own stages or order, first
    assumptions: tuple[str, ...]
    fixed: Mapping[str, Any]
    further: tuple[RankedPlan, ...] = ()  # next plans, which fill rows that several plans share
    rows: int | None = None  # of the table; None: as many as a short answer has room for
    require: tuple[Constraint, ...] | None = None  # None: no further techniques are tried
    compares_trainers: bool = False  # where none was named

    @cached_property
    def savings(self) -> tuple[Saving, ...]:
        """Techniques that the search leaves out and that would make the best plan faster."""
        if self.require is None:
            return ()
        from planner.advice.savings import savings

        first = self.result.plans[0]
        even = next((o.assessment for o in self.ranked if not o.is_own and o.plan == first), None)
        even = even or assess(self.scenario, first)
        fastest = self.ranked[0].step.seconds
        return savings(self.scenario, even, self.result, self.fixed, self.require, fastest)

    @cached_property
    def trainers(self) -> tuple[BestOfTrainer, ...]:
        """The best plan of each common trainer, the fastest first."""
        if self.require is None or not self.compares_trainers:
            return ()
        from planner.advice.trainers import best_of_trainers

        return best_of_trainers(self.scenario, self.fixed, self.require)

    @property
    def tie(self) -> Tie | None:
        """Plans that are as fast as the best one, which is the simplest of them."""
        return None if self.ranked[0].is_own else self.result.tie

    @property
    def fastest(self) -> Plan:
        """The plan with the shortest step (of the objective memory: the best plan)."""
        return self.best if self.tie is None else self.tie.fastest

    @property
    def table(self) -> pd.DataFrame:
        """The ranked plans as a DataFrame, one a row, in SI units."""
        import pandas as pd

        return pd.DataFrame([assessment.row() for assessment in self.assessments])

    def candidates(self) -> pd.DataFrame:
        """Return every legal plan with the pinned parts, a row each, in SI units; in seconds.

        Step times are those of the closed form (the search simulates the best), peaks far above the
        budget are lower bounds. Requirements (``require``) are not applied.
        """
        from planner.search.priced_candidates import PricedCandidates, candidates_table

        return candidates_table(PricedCandidates.of(self.scenario, self.fixed))

    def notebook_tables(self) -> Iterator[str]:
        """Yield the ranked plans."""
        from planner.answer import notebook

        yield notebook.plans_table(self.assessments)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        from planner.advice.refusal import search_document

        return {
            **header(self.scenario),
            "plans": [{**one.assessment.to_dict(), **one.own_document()} for one in self.ranked],
            "tie": None if self.tie is None else self.tie.to_dict(),
            "fixed": dict(self.fixed),
            **self.ranked[0].own_document(),
            "savings": [saving.to_dict() for saving in self.savings],
            "trainers": [one.to_dict() for one in self.trainers],
            "search": search_document(self.result.counts),
            "not_run": not_run(self.scenario, self.best),
            "assumptions": list(self.assumptions),
            "confidence": confidence(self.scenario),
        }

    def text(self, *, verbose: bool = False) -> str:
        """Return the text; ``verbose``: with all assumptions, sources and counts."""
        from planner.answer.plan_text import plan_text

        return plan_text(
            self.scenario,
            self.result.counts,
            self.ranked,
            assumptions=self.assumptions,
            further=self.further,
            rows=self.rows,
            tie=self.tie,
            savings=self.savings,
            trainers=self.trainers,
            verbose=verbose,
        )


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
