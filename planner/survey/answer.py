"""Answer of ``plan`` for several clusters or precisions, with prices or a training run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import asdict

from cost_models.scenario import Scenario
from hardware_profiles.errors import NoLegalPlanError
from planner.advice.refusal import no_plan, reasons_of, search_document
from planner.answer.answers import RankedAnswer, header, not_run
from planner.answer.plan_answer import placed_words, searched, stages_words, tie_words, tight_words
from planner.answer.ranked_plan import RankedPlan
from planner.answer.text import (
    bottleneck,
    head,
    host_lines,
    model_lines,
    short_head,
    short_plan_of,
    time_line,
)
from planner.assessment.assess import assess
from planner.assessment.confidence import confidence, confidence_words
from planner.assessment.verdict import budget_bytes
from planner.refinement.placement import can_be_placed, has_exact_orders
from planner.refinement.rank_orders import EXACT
from planner.run_cost.failures import failure_notes
from planner.run_cost.prices import ABOUT_COST, ABOUT_ENERGY
from planner.run_cost.text import run_lines
from planner.search.search import Counts
from planner.survey.compare_cases import SurveyCase, SurveyRequest, job_limits, sort_key
from planner.survey.text import (
    CASE_NAMES,
    FEWEST_ROWS,
    OBJECTIVE_WORDS,
    case_columns,
    case_rows,
    case_table,
    plan_table,
    reason_without_plan,
    short_plan_table,
)
from planner.text.assumed import assumed
from planner.text.html_page import Html, joined, listed, note, table
from planner.text.paragraphs import LINES, labelled

if TYPE_CHECKING:
    import pandas as pd

NOT_PLACED: Final = (
    "ranks are in the order of the accelerators: "
    f"on fronts of more than {EXACT} it is not optimised"
)
MOST_REFUSALS: Final = 3  # clusters for which changes that would give a plan are searched


@dataclass(frozen=True, slots=True, repr=False)
class SurveyAnswer(RankedAnswer):
    """Ranked plans of several cases, and the best plan of every case."""

    request: SurveyRequest
    cases: tuple[SurveyCase, ...]
    ranked: tuple[RankedPlan, ...]
    assumptions: tuple[str, ...]
    further: tuple[RankedPlan, ...] = ()  # next plans, which fill rows that several plans share

    @property
    def scenario(self) -> Scenario:
        """The scenario of the first plan."""
        return self.ranked[0].scenario

    @property
    def fixed(self) -> Mapping[str, Any]:
        """Pinned fields of plans."""
        return self.request.fixed

    @property
    def documents(self) -> tuple[Mapping[str, Any], ...]:
        """The ranked plans as plain JSON values: assessment, costs, whole run, order of ranks."""
        return tuple(found.to_dict() for found in self.ranked)

    @property
    def table(self) -> pd.DataFrame:
        """The ranked plans as a DataFrame, one a row, in SI units."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "cluster": document["cluster"],
                    "num_gpus": document["num_gpus"],
                    "precision": document["precision"],
                    "global_batch_size": document["global_batch_size"],
                    **document["plan"],
                    "peak_bytes": document["memory"]["peak_bytes"],
                    "step_seconds": document["time"]["step_seconds"],
                    "mfu": document["time"]["mfu"],
                    "dollars_per_step": document["cost"]["dollars_per_step"],
                    "joules_per_step": document["cost"]["joules_per_step"],
                }
                for document in self.documents
            ]
        )

    def notebook_tables(self) -> Iterator[str]:
        """Yield the best plan of each case, and the ranked plans with their clusters and prices."""
        from planner.answer import notebook
        from planner.survey.text import further_columns

        if len(self.cases) > 1:
            yield _cases_table(self.request, self.cases)
        before = further_columns(self.request, self.cases, self.ranked)
        yield notebook.plans_table(self.assessments, before)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            **header(self.scenario),
            "objective": self.request.objective,
            "pareto": None if self.request.pareto is None else list(self.request.pareto),
            "plans": [dict(document) for document in self.documents],
            "cases": [case_document(case) for case in self.cases],
            "fixed": dict(self.request.fixed),
            "require": [constraint.text for constraint in self.request.require],
            "search": search_document(total_counts(self.cases)),
            "not_run": not_run(self.scenario, self.best),
            "assumptions": list(self.assumptions),
            "confidence": confidence(self.scenario),
        }

    def text(self, *, verbose: bool = False, lines_before: int = 0) -> str:
        """Return the text; ``verbose``: with all assumptions, sources and counts.

        ``lines_before``: lines above it, which a short answer counts.
        """
        return survey_text(self, verbose=verbose, lines_before=lines_before)


def survey_text(answer: SurveyAnswer, *, verbose: bool, lines_before: int) -> str:
    """Return the answer of ``plan`` for several clusters, with prices or a training run.

    ``lines_before``: lines above this text, which a short answer counts.
    """
    request, cases, ranked, further = answer.request, answer.cases, answer.ranked, answer.further
    best = ranked[0]
    if verbose:
        lines = [*head(best.scenario), ""]
    elif len({CASE_NAMES["cluster"](case.scenario) for case in cases}) > 1:  # as rows of a table
        lines = model_lines(best.scenario)
    else:
        lines = short_head(best.scenario)
    if not best.fits:
        lines += labelled("TIGHT", tight_words(best.scenario, best.plan))
    if request.pareto is not None:
        first, second = (OBJECTIVE_WORDS[name] for name in request.pareto)
        lines += labelled("Front", f"no plan has less {first} without more {second}")
    below = _below_tables(answer, verbose=verbose)
    if verbose:
        lines += [*case_table(request, cases), ""] if len(cases) > 1 else []
        rows = [*ranked, *further] if request.rows is not None else ranked
        return "\n".join([*lines, *plan_table(request, rows, request.rows), "", *below])
    room = LINES - lines_before - len(lines) - len(below) - 2  # an empty line, the next command
    several = len(cases) > 1 and request.pareto is None
    if several:
        lines += case_table(request, cases, room - (0 if request.rows is None else 1))
    if several and request.rows is not None:
        lines.append("")
    if not several or request.rows is not None:
        most = max(FEWEST_ROWS, room - 2) if request.rows is None else request.rows
        lines += short_plan_table(request, [*ranked, *further], most)
    return "\n".join([*lines, "", *below])


def _below_tables(answer: SurveyAnswer, *, verbose: bool) -> list[str]:
    """Return the paragraphs about the best plan."""
    best, cases = answer.ranked[0], answer.cases
    results = [case.result for case in cases if case.scenario is best.scenario]
    tie = results[0].tie if results and results[0] is not None else None
    lines = [] if verbose else labelled("Best", short_plan_of(best.scenario, best.plan))
    lines += host_lines(best.assessment)
    lines += labelled("Step", time_line(best.assessment.time))
    if verbose:
        lines += labelled("Bottleneck", bottleneck(best.assessment))
    if tie is not None and tie.plans > 1 and (verbose or best.step.seconds > tie.seconds):
        lines += labelled("Tie", tie_words(tie, best.assessment, verbose=verbose))
    if best.staged is not None and (verbose or len(cases) == 1):  # else the rows of clusters count
        lines += labelled("Stages", stages_words(best.staged, verbose=verbose))
    if best.placed is not None:
        lines += labelled("Order", placed_words(best.placed, verbose=verbose))
    job = best.run
    if job is not None and answer.request.job.is_given:
        lines += run_lines(job, best.assessment, best.plan.world_size, verbose=verbose)
    if verbose:
        lines += labelled("Searched", searched(total_counts(cases)))
    lines += assumed(answer.assumptions, verbose=verbose)
    if verbose:
        lines += labelled("Confidence", confidence_words(best.scenario))
    return lines


def _cases_table(request: SurveyRequest, cases: Sequence[SurveyCase]) -> Html:
    """Return the best plan of every case, best first, and the reasons of those without one."""
    key = sort_key(request)
    good = sorted((case for case in cases if case.found), key=lambda case: key(case.found[0]))
    names = case_columns([case.scenario for case in cases])
    head, *rows = case_rows(request, good, len(good), names)
    without = [f"{case.name}: {reason_without_plan(case)}" for case in cases if not case.found]
    title = note("The best plan of each:")
    return joined([title, table(rows, head), listed(without) if without else Html("")])


def survey_answer(
    request: SurveyRequest,
    cases: tuple[SurveyCase, ...],
    found: tuple[RankedPlan, ...],
    assumptions: tuple[str, ...],
) -> SurveyAnswer:
    """Return an answer with as many plans as --top gives, and the plans that follow."""
    top = len(found) if request.rows is None or request.pareto else request.rows
    return SurveyAnswer(request, cases, found[:top], assumptions, found[top:])


def case_document(case: SurveyCase) -> dict[str, Any]:
    """Return the JSON document of one case."""
    scenario, result = case.scenario, case.result
    best = case.found[0].to_dict() if case.found else None
    return {
        "cluster": case.name,
        "num_gpus": scenario.cluster.num_gpus,
        "precision": scenario.workload.precision,
        "global_batch_size": scenario.workload.global_batch_size,
        "best": best,
        "tie": None if result is None or result.tie is None else result.tie.to_dict(),
        "why_not": case.why,
        "search": None if result is None else search_document(result.counts),
    }


def total_counts(cases: tuple[SurveyCase, ...]) -> Counts:
    """Return the sums of the counts of all searches."""
    every = [asdict(case.result.counts) for case in cases if case.result is not None]
    by_reason = ("illegal", "excluded")
    sums: dict[str, Any] = {
        name: _summed(one[name] for one in every)
        if name in by_reason
        else sum(one[name] for one in every)
        for name in Counts.__struct_fields__
    }
    return Counts(**sums)


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total.most_common())


def assumptions_of(
    cases: tuple[SurveyCase, ...], ranked: tuple[RankedPlan, ...], request: SurveyRequest
) -> list[str]:
    """Return the assumptions of all cases and the sources of their prices, without repetition."""
    assumptions = [words for case in cases for words in case.assumptions]
    notes = [
        note
        for case in cases
        for found in case.found[:1]
        for note in found.step.accelerator_cost.notes
    ]
    if notes:
        assumptions += [*notes, ABOUT_COST]
    objectives = {request.objective, *(request.pareto or ())}
    if "energy" in objectives and any(found.step.joules is not None for found in ranked):
        assumptions.append(ABOUT_ENERGY)
    if request.job.is_given and any(found.run for found in ranked[:1]):
        assumptions += failure_notes(request.job)
    clusters = [case.scenario.cluster for case in cases]
    if request.pareto and any(can_be_placed(c) and not has_exact_orders(c) for c in clusters):
        assumptions.append(NOT_PLACED)
    return list(dict.fromkeys(assumptions))


def no_plan_error(
    cases: Sequence[SurveyCase],
    request: SurveyRequest,
    why: str | None = None,
    *,
    suggests: bool = True,
) -> NoLegalPlanError:
    """Return the error if no case has a plan: the reasons of every case, and changes that help.

    ``suggests``: whether such changes are searched.
    """
    case, result = cases[0], cases[0].result
    if len(cases) == 1 and why is None and result is not None:
        scenario = case.scenario
        refusal = no_plan(
            scenario,
            result,
            case.assumptions,
            fixed=request.fixed,
            require=(*request.require, *job_limits(scenario, request)),
            offloads=request.offloads,
        )
        document = {**header(case.scenario), **refusal.to_dict()}
        return NoLegalPlanError(str(refusal), document)
    first = cases[0].scenario
    lines = [why or f"no plan for {first.model.name} on any of {len(cases)} clusters"]
    documents = []
    for one in cases:
        lines.append(f"  {one.name}: {reason_without_plan(one)}")
        document = case_document(one)
        if one.result is not None and one.result.counts.priced:
            reasons = reasons_of(one.scenario, one.result)
            lines += [f"    {number:,} candidates: {reason}" for number, reason in reasons[:3]]
            document["reasons"] = [{"candidates": n, "reason": reason} for n, reason in reasons]
        documents.append(document)
    helps = suggestions(cases, request) if suggests else {"changes": [], "ways_out": []}
    for change in helps["changes"]:
        lines.append(
            f"  smallest change on {change['cluster']}: {change['change']} instead of "
            f"{change['instead_of']} (checked)"
        )
    for way in helps["ways_out"]:
        lines.append(f"  way out on {way['cluster']}: {way['change']}: {way['command']}")
    document = {
        **header(first),
        "plans": [],
        "cases": documents,
        **helps,
        "search": search_document(total_counts(tuple(cases))),
    }
    return NoLegalPlanError("\n".join(lines), document)


def suggestions(
    cases: Sequence[SurveyCase], request: SurveyRequest
) -> dict[str, list[dict[str, Any]]]:
    """Return the smallest changes with which a plan exists, for the cluster that lacks the least.

    If no change helps there, the next clusters are tried, up to MOST_REFUSALS.
    """
    searched = [case for case in cases if case.result is not None]
    for case in sorted(searched, key=_lacking)[:MOST_REFUSALS]:
        scenario, result = case.scenario, case.result
        assert result is not None
        refusal = no_plan(
            scenario,
            result,
            fixed=request.fixed,
            require=(*request.require, *job_limits(scenario, request)),
            offloads=request.offloads,
        )
        if refusal.changes or refusal.ways_out:
            return {
                name: [{"cluster": case.name, **one.to_dict()} for one in of_case]
                for name, of_case in (("changes", refusal.changes), ("ways_out", refusal.ways_out))
            }
    return {"changes": [], "ways_out": []}


def _lacking(case: SurveyCase) -> float:
    """Return the smallest peak as a share of the budget; infinity without a legal plan."""
    result, scenario = case.result, case.scenario
    if result is None or result.smallest is None:
        return float("inf")
    peak = assess(scenario, result.smallest).memory.peak_bytes
    return float(peak / budget_bytes(scenario.cluster))
