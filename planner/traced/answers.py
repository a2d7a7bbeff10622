"""Answers of ``fit`` and ``plan`` for a traced module of unknown layers, and their text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from cost_models.memory.parts import PART_WORDS
from cost_models.plan.plan import Plan
from cost_models.units import format_bytes, format_count, format_gib, format_rate, format_seconds
from hardware_profiles.cluster.build import describe
from planner.answer.answers import AssessedAnswer
from planner.answer.ranked_table import USUAL, shown_rows
from planner.answer.text import (
    budget_words,
    cluster_words,
    largest_parts,
    largest_shares,
    short_plan,
    verdict_lines,
)
from planner.assessment.assess import amounts
from planner.assessment.documents import cluster_document
from planner.request.command import describe_plan
from planner.request.executor_process import PREFIX
from planner.text.answer import SCHEMA_VERSION, DetailedAnswer
from planner.text.assumed import assumed
from planner.text.bars import bars_with_room, part_bars
from planner.text.fixes import Fix, fix_lines
from planner.text.paragraphs import labelled, labelled_line, plain
from planner.text.tables import table_of_plans
from planner.traced.scenario import (
    TracedAssessment,
    TracedCounts,
    TracedScenario,
    TracedTime,
    only_varied,
)
from planner.traced.stages import Cut
from planner.traced.ways_out import TracedWayOut, largest_micro_batch, ways_out

if TYPE_CHECKING:
    import pandas as pd


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
            "confidence": "traced",
            "ways_out": [way.to_dict() for way in self.ways_out],
            "reach": {"largest_micro_batch_size": self.largest_micro_batch}
            if self.verdict == "fits"
            else {},
        }

    def text(self, *, verbose: bool = False) -> str:
        """Return the text; ``verbose``: with all assumptions, sources and counts."""
        return fit_text(self, verbose=verbose)


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
            "confidence": "traced",
        }

    def text(self, *, verbose: bool = False) -> str:
        """Return the text; ``verbose``: with all assumptions, sources and counts."""
        return plan_text(self, verbose=verbose)


CONFIDENCE: Final = (
    "traced: parameters are exact, memory follows the module's operators on fake tensors (without "
    "the workspaces of convolutions); the step time is a roofline of its operators, not validated "
    "by runs"
)
MOST_STAGES: Final = 8  # stages that are listed
COLUMNS: Final = (
    ("dp", "data_parallel"),
    ("rep", "dp_replicate"),
    ("zero", "zero_stage"),
    ("recompute", "recompute"),
    ("micro", "micro_batch_size"),
    ("times", "num_microbatches"),
)


def head(scenario: TracedScenario) -> list[str]:
    """Return the lines that repeat the request: module, workload, cluster with its links."""
    return [*model_lines(scenario), *plain(describe(scenario.cluster))]


def short_head(scenario: TracedScenario, *after: str) -> list[str]:
    """Return the same without links, and more text behind the cluster."""
    cluster = cluster_words(scenario.cluster)
    return [*model_lines(scenario), *plain(" · ".join([cluster, *after]))]


def model_lines(scenario: TracedScenario) -> list[str]:
    """Return model and workload, each line as wide as the terminal at most."""
    module = scenario.module
    size = f"{module.kind}, {format_count(module.num_parameters)} parameters"
    if module.num_trainable_parameters != module.num_parameters:
        size += f", {format_count(module.num_trainable_parameters)} trained"
    size += f" in {len(module.blocks)} blocks" if module.blocks else ", no blocks"
    return [
        *plain(f"{module.name}  {size}"),
        f"{module.precision} {scenario.workload.optimizer} · "
        f"global batch {scenario.global_batch_size:,}",
    ]


def time_line(time: TracedTime) -> str:
    """Return step time and rates in one line."""
    words = (
        f"about {format_seconds(time.step_seconds)} a step, "
        f"{format_rate(time.rows_per_second_per_gpu, 'rows')} per device"
    )
    return words if time.mfu is None else f"{words}, MFU {100 * time.mfu:.1f} %"


def fit_text(answer: TracedFitAnswer, *, verbose: bool) -> str:
    """Return the answer of ``fit`` as text."""
    scenario, plan, assessment = answer.scenario, answer.plan, answer.assessment
    memory, fits, sizes = assessment.memory, assessment.fits, amounts(assessment.memory.parts)
    if verbose:
        lines = [*head(scenario), "", *verdict_lines(assessment)]
        lines += labelled("", describe_plan(plan))
        lines += labelled("", f"peak in {memory.moment}")
    else:
        lines = [*short_head(scenario, short_plan(plan)), *verdict_lines(assessment)]
    above, lines = lines, []
    if verbose:
        lines += labelled("Budget", budget_words(assessment.budget))
    if verbose or fits:
        lines += labelled("Step", time_line(assessment.time))
    if answer.largest_micro_batch:
        lines += labelled("Maximum", f"micro-batch size {answer.largest_micro_batch:,}")
    if not fits:
        largest = max(sizes, key=lambda name: sizes[name])
        if verbose:
            words = f"{PART_WORDS[largest]}: {format_bytes(sizes[largest])}"
            lines += labelled("Largest", words)
    lines += assumed(answer.assumptions, verbose=verbose)
    if verbose:
        lines += labelled("Confidence", CONFIDENCE)
    following = train_with(scenario, plan)
    lines += labelled("Next", following) if fits and following else []
    others = len(above) + len(lines) + (0 if fits else len(answer.ways_out) + 1)
    most = None if verbose else bars_with_room(others)
    lines = [*above, *part_bars(sizes, assessment.budget.size, most), *lines]
    lines += [] if fits else fix_lines(fixes_of(answer.ways_out), len(lines), verbose=verbose)
    return "\n".join(lines)


def fixes_of(ways_out: Sequence[TracedWayOut]) -> list[Fix]:
    """Return the ways out, each with its step time."""
    return [
        Fix(way.change, way.peak_bytes, f"about {format_seconds(way.step_seconds)}", way.options)
        for way in ways_out
    ]


def plan_text(answer: TracedPlanAnswer, *, verbose: bool) -> str:
    """Return the answer of ``plan`` as text."""
    scenario, assessments, search = answer.scenario, answer.assessments, answer.search
    best, cut = assessments[0], answer.cut
    lines = [*head(scenario), ""] if verbose else short_head(scenario)
    if best.verdict == "tight":
        lines += labelled(
            "TIGHT", "no plan fits with its whole interval; these may run out of memory"
        )
    lines += _table(assessments, shown_rows(answer.rows, verbose=verbose))
    lines.append("")
    lines += labelled("Best", time_line(best.time))
    if verbose:
        time, memory, where = best.time, best.memory, f"in {best.memory.moment}"
        words = largest_parts(time.parts, time.step_seconds, memory.parts, memory.peak_bytes, where)
        lines += labelled("Bottleneck", words)
    else:
        lines.append(
            labelled_line("Bottleneck", largest_shares(best.time.parts, best.time.step_seconds))
        )
    if cut is not None and verbose:
        lines += labelled("Stages", cut_words(cut, best.time.step_seconds))
    if verbose:
        lines += labelled(
            "Searched",
            f"{search.enumerated:,} plans: {search.too_large:,} too large, {search.tight:,} tight, "
            f"{search.fitting:,} fit",
        )
    lines += assumed(answer.assumptions, verbose=verbose)
    if verbose:
        lines += labelled("Confidence", CONFIDENCE)
    lines += labelled("Next", train_with(scenario, answer.best))
    return "\n".join(lines)


def cut_words(cut: Cut, step: float | None) -> str:
    """Describe the best pipeline stages, which the executor does not support for such modules.

    ``step``: seconds of the best plan without stages.
    """
    plan, stages = cut.plan, cut.stages
    shown = " | ".join(
        stage.first if stage.first == stage.last else f"{stage.first} to {stage.last}"
        for stage in stages[:MOST_STAGES]
    )
    more = " | …" if len(stages) > MOST_STAGES else ""
    peaks = ", ".join(format_gib(stage.peak) for stage in stages[:MOST_STAGES])
    sent = max(stage.sent for stage in stages)
    time = f"about {format_seconds(cut.step)} a step"
    if step is not None:
        part = cut.step / step - 1.0
        time += f" ({100 * abs(part):.0f} % {'more' if part > 0 else 'less'} than without)"
    ranks = f"{plan.data_parallel} data rank" + ("s" if plan.data_parallel > 1 else "")
    return (
        f"cut into {plan.pipeline_parallel} stages ({shown}{more}), each on {ranks}, "
        f"{plan.num_microbatches} micro-batches of {plan.micro_batch_size}, recompute "
        f"{plan.recompute}, it would take {time} and {peaks} GiB, and send up to "
        f"{format_bytes(sent)} a micro-batch; the executor trains traced modules over data ranks "
        "only (DP, ZeRO), so no stages are among the plans"
    )


def _table(assessments: Sequence[TracedAssessment], most: int | None) -> list[str]:
    rows, choices = ranked_rows(assessments)
    return table_of_plans(rows, choices, ("margin", "MFU"), {}, most=most)[0]


def ranked_rows(assessments: Sequence[TracedAssessment]) -> tuple[list[list[str]], int]:
    """Return the cells of the table with its head, and the number of columns of the plan."""
    columns = [
        (name, field)
        for name, field in COLUMNS
        if any(getattr(one.plan, field) != USUAL.get(field) for one in assessments)
    ]
    rows = [[*(name for name, _ in columns), "GiB", "margin", "step", "rows/s/gpu", "MFU"]]
    for assessment in assessments:
        plan, time = assessment.plan, assessment.time
        rows.append(
            [
                *(str(getattr(plan, field)) for _, field in columns),
                format_gib(assessment.memory.peak_bytes),
                f"{100 * assessment.margin_bytes / assessment.budget.size:.0f} %",
                format_seconds(time.step_seconds),
                f"{time.rows_per_second_per_gpu:,.1f}",
                "–" if time.mfu is None else f"{100 * time.mfu:.1f} %",
            ]
        )
    return rows, len(columns)
