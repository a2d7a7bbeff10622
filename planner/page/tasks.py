"""The tasks of the page: each answers one question, in a worker process.

Answers are plain values, which another process receives; files are bytes.
"""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cost_models.plan_file import PlanFile, write_plan_file
from cost_models.units import format_count
from hardware_profiles.cluster.build import describe
from hardware_profiles.errors import InputError
from planner.answer.answers import not_run
from planner.answer.fit_answer import FitAnswer
from planner.answer.plan_answer import PlanAnswer
from planner.answer.text import short_plan, short_plan_of
from planner.api.export import export
from planner.api.fit import fit
from planner.api.plan import plan as search_plans
from planner.assessment.verdict import WORDS
from planner.explanation.explain import explain
from planner.page.question import PageQuestion, fields_of
from planner.page.views import (
    BarSegment,
    Figure,
    MemoryChart,
    memory_chart,
    memory_figures,
    plan_cells,
    time_bar,
    time_figures,
)
from planner.request.command import fit_command
from planner.run_cost.text import days, dollars, short_words
from planner.survey.answer import SurveyAnswer
from planner.survey.text import reason_without_plan
from planner.text.paragraphs import MOMENT_WORDS

TABLE: Final = 10  # plans of a search


@dataclass(frozen=True, slots=True)
class PricedView:
    """Memory and time of one plan."""

    verdict: str
    word: str
    heading: str
    plan_words: str
    figures: tuple[Figure, ...]
    memory: MemoryChart
    time: tuple[BarSegment, ...]
    peak: str  # where and when, with its verb
    job: str
    not_run: str
    command: str
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]
    chosen: Mapping[str, str]  # fields of the plan, of which the form may leave some open
    batch: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class TableRow:
    """A plan or a cluster of a table."""

    cells: tuple[str, ...]
    address: str  # of the question about this plan; "": none
    first: bool = False


@dataclass(frozen=True, slots=True)
class TableView:
    """Ranked plans or clusters."""

    heading: str
    heads: tuple[str, ...]
    rows: tuple[TableRow, ...]
    text: str  # the whole answer
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileView:
    """A file to save."""

    name: str
    kind: str
    data: bytes


def _heading(answer: FitAnswer | PlanAnswer | SurveyAnswer) -> str:
    scenario = answer.scenario
    count = format_count(scenario.model.num_parameters)
    return f"{scenario.model.name} ({count} parameters) on {describe(scenario.cluster)}"


def _fit(question: PageQuestion) -> FitAnswer:
    whole: dict[str, Any] = {name: question.get(name) or None for name in ("tokens", "price")}
    if whole["tokens"] is None:
        whole = {}
    answer = fit(question.model, question.cluster, **question.workload, **question.plan, **whole)
    assert isinstance(answer, FitAnswer)
    return answer


def price(question: PageQuestion) -> PricedView:
    """Return memory and time of the plan, of which the parts left open are searched."""
    answer = _fit(question)
    assessment, workload = answer.assessment, answer.scenario.workload
    memory, stages = assessment.memory, answer.plan.pipeline_parallel
    when = MOMENT_WORDS[memory.moment]
    return PricedView(
        verdict=answer.verdict,
        word=WORDS[assessment.verdict],
        heading=_heading(answer),
        plan_words=short_plan(answer.plan),
        figures=(*memory_figures(assessment), *time_figures(assessment.time)),
        memory=memory_chart(assessment),
        time=time_bar(assessment.time),
        peak=f"is on stage {memory.limiting_stage}, {when}" if stages > 1 else f"comes {when}",
        job="" if answer.job is None else short_words(answer.job),
        not_run=not_run(answer.scenario, answer.plan) or "",
        command=fit_command(answer.scenario, answer.plan),
        assumptions=answer.assumptions,
        notes=answer.notes,
        chosen=fields_of(answer.plan),
        batch=workload.global_batch_size,
        seq_len=workload.seq_len,
    )


def _search(question: PageQuestion, **options: Any) -> PlanAnswer | SurveyAnswer:
    options.setdefault("cluster", question.cluster)
    answer = search_plans(
        question.model,
        **options,
        **question.workload,
        fix=question.pins,
        objective=question.get("objective") or "time",
        require=question.get("require") or None,
        price=question.get("price") or None,
        tokens=question.get("tokens") or None,
    )
    assert isinstance(answer, PlanAnswer | SurveyAnswer)
    return answer


def best(question: PageQuestion) -> TableView:
    """Search for the best plans."""
    answer = _search(question, top=TABLE)
    batch = str(answer.scenario.workload.global_batch_size)
    words = [short_plan_of(one.scenario, one.plan) for one in answer.ranked]
    addresses = [  # the form has neither layers by stage nor orders of ranks
        "" if one.is_own else question.address(**{**fields_of(one.plan), "batch": batch})
        for one in answer.ranked
    ]
    rows = tuple(
        TableRow((one, *cells), address, first=place == 0)
        for place, (one, cells, address) in enumerate(
            zip(words, plan_cells(answer.assessments), addresses, strict=True)
        )
    )
    heads = ("Plan", "Memory", "Margin", "Step", "Tokens/s each", "MFU")
    return TableView(
        _heading(answer), heads, rows, answer.text(verbose=True), tuple(answer.assumptions)
    )


def compare_clusters(question: PageQuestion) -> TableView:
    """Search on several clusters, and compare the best plan of each."""
    clusters = question.clusters
    if len(clusters) < 2:
        raise InputError("Clusters: name two or more, such as 8xA100-80GB, 8xH100-SXM")
    answer = _search(question, cluster=clusters)
    assert isinstance(answer, SurveyAnswer)
    first = answer.ranked[0].scenario.cluster.name
    rows: list[tuple[float, TableRow]] = []
    for case in answer.cases:
        number = str(case.scenario.cluster.num_gpus)
        if not case.found:
            cells = (case.name, number, *["–"] * 5, reason_without_plan(case))
            rows.append((float("inf"), TableRow(cells, "")))
            continue
        found = case.found[0]
        (cells_of_plan,) = plan_cells([found.assessment])
        memory, step = cells_of_plan[0], cells_of_plan[2]
        per_token, run = found.step.per_token("cost"), found.run
        whole = None if run is None else run.with_failures
        row = TableRow(
            (
                *(case.name, number, memory, step),
                dollars(None if per_token is None else 1e9 * per_token),
                "–" if whole is None else days(whole.seconds),
                dollars(None if whole is None else whole.dollars),
                short_plan_of(found.scenario, found.plan),
            ),
            ""  # the form has neither layers by stage nor orders of ranks
            if found not in case.usual
            else question.address(
                **fields_of(found.plan),
                cluster=case.name,
                batch=str(case.scenario.workload.global_batch_size),
            ),
            first=case.name == first,
        )
        rows.append((found.assessment.time.step_seconds, row))
    costs = ("$ per 10⁹ tokens", "Days", "$ of the run")
    heads = ("Cluster", "GPUs", "Memory", "Step", *costs, "Best plan")
    ordered = sorted(rows, key=lambda pair: (not pair[1].first, pair[0]))
    model = answer.scenario.model.name
    return TableView(
        f"{model} on {len(clusters)} clusters",
        heads,
        tuple(row for _, row in ordered),
        answer.text(verbose=True),
        tuple(answer.assumptions),
    )


def _plan_file(question: PageQuestion) -> PlanFile:
    """Return the best plan's file, or that of the plan in the form."""
    if question.get("found"):
        return _search(question, top=TABLE).plan_file()
    return _fit(question).plan_file()


def why(question: PageQuestion) -> str:
    """Explain the plan: its moments and terms, comparisons with other plans, ways out."""
    file = _plan_file(question)
    others = [one for one in (question.get("why_not"),) if one]
    words = [explain(file, why_not=others, sensitivity=False).text(verbose=True)]
    if not question.get("found"):
        words.append(_fit(question).explain())
    return "\n\n".join(words)


def report_page(question: PageQuestion) -> FileView:
    """Return the report of the plan: one HTML page."""
    from planner.reports.report import report

    return _of_plan(question, "report.html", "text/html", report)


def step_trace(question: PageQuestion) -> FileView:
    """Return the simulated step for Perfetto."""
    from planner.reports.trace import trace

    return _of_plan(question, "trace.json", "application/json", trace)


def _of_plan(question: PageQuestion, name: str, kind: str, make: Callable[[Path], Any]) -> FileView:
    """Return what is made of a plan.json, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="shardplan-") as folder:
        plan, made = Path(folder, "plan.json"), Path(folder, name)
        write_plan_file(plan, _plan_file(question))
        make(plan).save(made)
        return FileView(name, kind, made.read_bytes())


def plan_json(question: PageQuestion) -> FileView:
    """Return the plan.json."""
    document = _plan_file(question).to_dict()
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    return FileView("plan.json", "application/json", text.encode())


def exported(question: PageQuestion) -> FileView:
    """Return the files of another trainer as one archive."""
    to = question.get("to")
    if not to:
        raise InputError("Export to: choose a trainer")
    answer = export(_plan_file(question), to)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in {**answer.files, "README.txt": f"{answer}\n"}.items():
            file.writestr(zipfile.ZipInfo(name), text)
    return FileView(f"shardplan-{to}.zip", "application/zip", archive.getvalue())


TASKS: Final[Mapping[str, Callable[[PageQuestion], Any]]] = {
    "price": price,
    "best": best,
    "compare": compare_clusters,
    "why": why,
    "plan.json": plan_json,
    "report.html": report_page,
    "trace.json": step_trace,
    "export": exported,
}
