"""Answer of ``fit``: its JSON, drawings and text, short or with all details."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cost_models.memory.parts import PART_WORDS
from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from cost_models.pricing.prediction import MemoryPrediction
from cost_models.scenario import Scenario
from cost_models.units import format_bytes
from planner.answer.answers import AssessedAnswer, header, made_by, not_run
from planner.answer.text import (
    bottleneck_line,
    budget_words,
    head,
    host_condition,
    own_stages,
    rates_line,
    short_head,
    short_plan,
    short_plan_of,
    time_line,
    verdict_lines,
)
from planner.assessment.assess import Assessment, amounts, plan_file
from planner.assessment.confidence import confidence, confidence_words
from planner.assessment.host_memory import host_text
from planner.assessment.reach import Reach, reach
from planner.assessment.step_memory import StepMemory, step_memory
from planner.assessment.verdict import WORDS
from planner.request.command import describe_plan, plan_command
from planner.run_cost.text import run_lines
from planner.text.assumed import assumed
from planner.text.bars import bars_with_room, part_bars
from planner.text.fixes import fix_lines
from planner.text.paragraphs import MOMENT_WORDS, hanging, labelled, labelled_line, next_command

if TYPE_CHECKING:
    import pandas as pd

    from planner.advice.ways_out import WayOut
    from planner.run_cost.failures import TrainingRun


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
        return fit_text(self, verbose=verbose)

    def largest(self, *, verbose: bool) -> str:
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


def fit_text(answer: FitAnswer, *, verbose: bool) -> str:
    """Return the answer of ``fit`` as text."""
    scenario, plan, assessment = answer.scenario, answer.plan, answer.assessment
    fits, ways_out = assessment.fits, answer.ways_out
    verdict = [*_verdict_lines(assessment), *_another_plan(assessment, ways_out)]
    if verbose:
        above = [*head(scenario), "", *verdict]
        above += labelled("", " ".join([describe_plan(plan), *own_stages(scenario)]))
        above += labelled("", _where(plan, assessment))
    else:
        above = [*short_head(scenario, short_plan_of(scenario, plan)), *verdict]
    lines: list[str] = []
    if verbose:
        lines += labelled("Budget", budget_words(assessment.budget))
        lines += labelled("Memory", _memory_figures(assessment.memory))
    host = None if assessment.is_short_on_the_host_alone else host_text(assessment.host)
    said = assessment.host.unchecked and assessment.margin_bytes >= 0.0  # next to the verdict
    told = verbose or plan.offload != "none" or assessment.host.short_of
    if host is not None and told and not said:
        lines += labelled("Host", host)
    if not fits:
        largest = answer.largest(verbose=verbose)
        shortened = [labelled_line("Largest", largest.split("; "), between="; ")]
        lines += labelled("Largest", largest) if verbose else shortened
    if verbose or fits:
        lines += labelled("Step", time_line(assessment.time))
    if verbose:
        lines += labelled("", rates_line(assessment.time))
    elif fits:
        lines += [bottleneck_line(assessment.time)]
    if answer.job is not None:
        lines += run_lines(answer.job, assessment, plan.world_size, verbose=verbose)
    lines += _reach(answer.reach)
    lines += assumed(answer.assumptions, verbose=verbose)
    if verbose:
        lines += labelled("Confidence", confidence_words(scenario))
        if (why := not_run(scenario, plan)) is not None:
            lines += labelled("Executor", f"not executable: {why}")
    if fits:
        lines += next_command(plan_command(scenario, plan, answer.whole_run))
    others = len(above) + len(lines) + (0 if fits else len(ways_out) + 1)
    most = None if verbose else bars_with_room(others)
    bars = part_bars(amounts(assessment.memory.parts), assessment.budget.size, most)
    lines = [*above, *bars, *lines]
    if not fits:
        from planner.advice.ways_out import fixes_of  # searches: loaded where they are needed

        lines += fix_lines(fixes_of(scenario, assessment, ways_out), len(lines), verbose=verbose)
    return "\n".join(lines)


def _verdict_lines(assessed: Assessment) -> list[str]:
    """Return the verdict, which names the host where that alone is too small."""
    lines = verdict_lines(assessed)
    if not assessed.is_short_on_the_host_alone:
        unchecked = assessed.margin_bytes >= 0.0 and assessed.host.unchecked
        return lines + (labelled("", host_condition(assessed)) if unchecked else [])
    label = f"{WORDS['does_not_fit']} "
    room = lines[0].removeprefix(label), *(line.strip() for line in lines[1:])
    return [
        *hanging(label, f"the host: {host_text(assessed.host)}"),
        *labelled("", f"it fits the accelerator: {' '.join(room)}"),
    ]


def _another_plan(assessment: Assessment, ways_out: Sequence[WayOut]) -> list[str]:
    """Return the first plan with which the same training fits on the same cluster, if any."""
    if assessment.verdict != "does_not_fit":
        return []
    found = next((way for way in ways_out if way.is_another_plan), None)
    if found is None:
        return []
    options = min(found.options, short_plan(found.plan), key=len)
    peak = format_bytes(found.peak_bytes)
    return labelled("", f"FITS with another plan: {peak} with {options}")


def _memory_figures(memory: MemoryPrediction) -> str:
    figures = (
        ("live", memory.peak_allocated_bytes),
        ("reserved by torch", memory.peak_reserved_bytes),
        ("in nvidia-smi", memory.device_used_bytes),
    )
    return ", ".join(f"{format_bytes(size)} {words}" for words, size in figures)


def _where(plan: Plan, assessment: Assessment) -> str:
    memory = assessment.memory
    where = MOMENT_WORDS[memory.moment]
    if plan.pipeline_parallel > 1:
        where = f"stage {memory.limiting_stage} is the fullest, {where}"
    return f"peak {where}"


def _reach(reach: Reach | None) -> list[str]:
    parts = []
    if reach is not None and reach.largest_micro_batch_size:
        parts.append(f"micro-batch size {reach.largest_micro_batch_size:,}")
    if reach is not None and reach.longest_seq_len:
        parts.append(f"sequences of {reach.longest_seq_len:,} tokens")
    return labelled("Maximum", ", or ".join(parts) + ", with this plan") if parts else []
