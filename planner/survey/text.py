"""Text of several cases: a table of clusters, the ranked plans, the training run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from textwrap import shorten
from typing import Any, Final

from cost_models.scenario import Scenario
from cost_models.units import format_count, format_gib, format_per_second, format_seconds
from planner.answer.ranked_plan import RankedPlan
from planner.answer.ranked_table import LEAST_IMPORTANT as LEAST_OF_RANKED
from planner.answer.ranked_table import more_rows, ranked_rows, usual_cells
from planner.answer.text import (
    short_plan_of,
)
from planner.run_cost.text import WATT_HOUR, amount, days, dollars
from planner.survey.compare_cases import SurveyCase, SurveyRequest, sort_key
from planner.text.paragraphs import labelled, plain, width
from planner.text.tables import fitting_table, marked_table, table_of_plans

BILLION: Final = 1e9
MOST_BETWEEN: Final = 3  # from this number on, similar plans share one line
OBJECTIVE_WORDS: Final = {
    "time": "step time",
    "cost": "dollars a token",
    "memory": "peak memory",
    "energy": "energy a token",
}

LABELS: Final = {
    "fewest-gpus": "Fewest",
    "cheapest-cluster": "Cheapest",
    "largest-micro-batch": "Largest",
    "longest-sequence": "Longest",
    "largest-model": "Largest",
    "most-tokens": "Most",
}
MOST_WHY: Final = 3
FEWEST_ROWS: Final = 1  # of a table in a short answer
# columns that are left out first where the terminal is narrow
LEAST_IMPORTANT: Final = ("MFU", "gpu-hours", "GiB", "tok/s", "step")
CASE_NAMES: Final[dict[str, Callable[[Scenario], str]]] = {
    "cluster": lambda scenario: scenario.cluster.name,
    "precision": lambda scenario: scenario.workload.precision,
    "batch": lambda scenario: f"{scenario.workload.global_batch_size:,}",
}
LEAST_OF_PLANS: Final = (*LEAST_OF_RANKED, "micro")


def case_table(
    request: SurveyRequest, cases: Sequence[SurveyCase], room: int | None = None
) -> list[str]:
    """Return the best plan of every case, best first; cases without a plan last, with reasons.

    ``room``: lines; then cases without a plan take one each, and those left out are counted.
    """
    good = sorted(
        (case for case in cases if case.found), key=lambda c: sort_key(request)(c.found[0])
    )
    without = [case for case in cases if not case.found]
    shown, shown_without = len(good), len(without)
    if room is not None and len(cases) > room - 1:
        left = max(FEWEST_ROWS, room - 2)
        shown_without = min(len(without), max(1, left - len(good)))
        shown = min(len(good), left - shown_without)
    names = case_columns([case.scenario for case in cases])
    rows = case_rows(request, good, shown, names)
    lines = fitting_table(rows, LEAST_IMPORTANT, left=("cluster", "precision"))
    for case in without[:shown_without]:
        name = " ".join(_case_name(case.scenario, names))
        words = f"{name}: {reason_without_plan(case)}"
        if room is None:
            lines += plain(words, "  ")
        else:
            lines.append(f"  {shorten(words, width() - 2, placeholder=' …')}")
    hidden = len(cases) - shown - shown_without
    return [*lines, more_rows(hidden)] if hidden else lines


def case_rows(
    request: SurveyRequest, good: Sequence[SurveyCase], most: int, names: Sequence[str]
) -> list[list[str]]:
    """Return the cells of the table with its head; ``names``: columns that name a case."""
    columns = _columns(request, good)
    rows = [[*names, *(heading for heading, _ in columns)]]
    for case in good[:most]:
        found = case.found[0]
        rows.append([*_case_name(case.scenario, names), *(cell(found) for _, cell in columns)])
    return rows


def case_columns(scenarios: Sequence[Scenario], *, cluster: bool = True) -> list[str]:
    """Return the columns that tell cases apart; ``cluster``: also where there is one only."""
    names = [name for name in CASE_NAMES if len({CASE_NAMES[name](s) for s in scenarios}) > 1]
    return ["cluster", *names] if cluster and "cluster" not in names else names


def _case_name(scenario: Scenario, names: Sequence[str]) -> list[str]:
    return [CASE_NAMES[name](scenario) for name in names]


def short_plan_table(request: SurveyRequest, ranked: Sequence[RankedPlan], most: int) -> list[str]:
    """Return a table of the ranked plans with a row each, as that of one cluster.

    ``most``: rows; those of a front are taken evenly from the whole.
    """
    rows, choices = ranked_rows([found.assessment for found in ranked])
    prices = _prices(request, ranked)
    heads, *others = rows
    table = [[*CASE_NAMES, *heads, *(heading for heading, _ in prices)]]
    for found, cells in zip(ranked, others, strict=True):
        named = _case_name(found.scenario, list(CASE_NAMES))
        table.append([*named, *cells, *(cell(found) for _, cell in prices)])
    usual = usual_cells()
    usual |= {name: table[1][at] for at, name in enumerate(CASE_NAMES)}
    lines, hidden = table_of_plans(
        table,
        choices + len(CASE_NAMES),
        LEAST_OF_PLANS,
        usual,
        most=most,
        spread=request.pareto is not None,
        left=("cluster", "precision"),
    )
    return [*lines, more_rows(hidden)] if hidden and request.rows is None else lines


def further_columns(
    request: SurveyRequest, cases: Sequence[SurveyCase], ranked: Sequence[RankedPlan]
) -> dict[str, list[str]]:
    """Return cluster, precision, batch, prices and the whole run of ranked plans, by heading."""
    columns = {
        name: [cell(found.scenario) for found in ranked] for name, cell in CASE_NAMES.items()
    }
    for heading, cell in _columns(request, [case for case in cases if case.found]):
        if heading not in ("GiB", "step", "tok/s", "MFU"):  # a table of plans has them
            columns[heading] = [cell(found) for found in ranked]
    return columns


def reason_without_plan(case: SurveyCase) -> str:
    """Return in one line why a case has no plan."""
    if case.why is not None or case.result is None:
        return f"not priced: {case.why}"
    counts = case.result.counts
    if counts.priced == 0 and not counts.excluded:
        rule = next(iter(case.result.illegal_example.values()), "no candidate")
        return f"has no legal plan: {rule}"
    # first what was asked for: a table cuts the end
    parts = [f"{number:,} plans are excluded by {text}" for text, number in counts.excluded.items()]
    if counts.too_large:
        every = "all " if counts.too_large == counts.priced and not counts.excluded else ""
        parts.append(f"{every}{counts.too_large:,} legal plans are too large")
    return f"{'has no plan' if counts.excluded else 'does not fit'}: {', '.join(parts)}"


Column = tuple[str, Callable[[RankedPlan], str]]  # heading, cell of a plan


def _columns(request: SurveyRequest, cases: Sequence[SurveyCase]) -> list[Column]:
    """Return the columns of the table of cases: memory, rates, dollars, the training run."""
    best = [case.found[0] for case in cases]
    prices = [(True, *column) for column in _prices(request, best)]
    priced = any(found.step.dollars is not None for found in best)
    has_run = request.job.is_given
    columns: list[tuple[bool, str, Callable[[RankedPlan], str]]] = [
        (True, "gpus", lambda found: f"{found.plan.world_size:,}"),
        (True, "GiB", _peak),
        (True, "step", lambda found: format_seconds(found.assessment.time.step_seconds)),
        (True, "tok/s", lambda found: format_per_second(found.step.tokens / found.step.seconds)),
        (True, "MFU", _mfu),
        *prices,
        (has_run and request.job.tokens is None, "tokens", _tokens_of_run),
        (has_run, "days", _of_run("seconds", days)),
        (has_run, "gpu-hours", _of_run("gpu_hours", amount)),
        (has_run and priced, "dollars", _of_run("dollars", dollars)),
    ]
    return [(heading, cell) for wanted, heading, cell in columns if wanted]


def _prices(request: SurveyRequest, plans: Sequence[RankedPlan]) -> list[Column]:
    """Return the columns of dollars and energy a token, where they are known or asked for."""
    columns: list[Column] = []
    if any(found.step.dollars is not None for found in plans):
        columns.append(("$/Btok", lambda found: dollars(_scaled(found, "cost"))))
    if "energy" in (request.objective, *(request.pareto or ())):
        kilowatt_hours = 1e3 * WATT_HOUR
        columns.append(("kWh/Btok", lambda found: amount(_scaled(found, "energy", kilowatt_hours))))
    return columns


def _peak(found: RankedPlan) -> str:
    peak = format_gib(found.assessment.memory.peak_bytes)
    return peak if found.fits else f"{peak} tight"


def _mfu(found: RankedPlan) -> str:
    mfu = found.assessment.time.mfu
    return "–" if mfu is None else f"{100 * mfu:.1f} %"


def _tokens_of_run(found: RankedPlan) -> str:
    return "–" if found.run is None else format_count(found.run.cost.tokens)


def _of_run(name: str, words: Callable[[Any], str]) -> Callable[[RankedPlan], str]:
    """Return a formatter for a figure of the training run with failures; a dash without a run."""
    return lambda found: "–" if found.run is None else words(getattr(found.run.with_failures, name))


def _scaled(found: RankedPlan, objective: str, unit: float = 1.0) -> float | None:
    value = found.step.per_token(objective)
    return None if value is None else value * BILLION / unit


def plan_table(
    request: SurveyRequest, ranked: Sequence[RankedPlan], most: int | None = None
) -> list[str]:
    """Return a table of the ranked plans: cluster, memory, time, cost and plan.

    ``most``: rows.
    """
    names = case_columns([found.scenario for found in ranked], cluster=False)
    prices = _prices(request, ranked)
    rows = [[*names, "gpus", "GiB", "step", *(heading for heading, _ in prices), "plan"]]
    between = _between(ranked) if request.pareto is not None else {}
    others = _other_stages(ranked) if request.pareto is None else {}
    for position, found in enumerate(ranked):
        if position in others and not others[position]:
            continue
        if position in between:
            words = between[position]
            rows += [[*[""] * (len(rows[0]) - 1), words]] if words else []
            continue
        rows.append(
            [
                *_case_name(found.scenario, names),
                f"{found.plan.world_size:,}",
                format_gib(found.assessment.memory.peak_bytes),
                format_seconds(found.step.seconds),
                *(cell(found) for _, cell in prices),
                short_plan_of(found.scenario, found.plan)
                + "".join(f" or {stage}" for stage in others.get(position, []))
                + " (own order of ranks)" * bool(found.placed),
            ]
        )
    shown = rows if most is None else rows[: most + 1]
    lines = _wrapped_last(shown, len(names))
    hidden = len(rows) - len(shown)
    return [*lines, f"  {hidden} more with -v"] if hidden else lines


def _wrapped_last(rows: Sequence[Sequence[str]], texts: int) -> list[str]:
    """Return a table whose last column is wrapped where the terminal is too narrow for it.

    ``texts``: first columns that are aligned to the left.
    """
    lines = marked_table([row[:-1] for row in rows], left=range(texts))
    indent = max(map(len, lines)) + 2
    found = []
    for line, row in zip(lines, rows, strict=True):
        first, *others = plain(row[-1], " " * indent) or [""]
        found += [f"{line:<{indent}}{first.strip()}".rstrip(), *others]
    return found


def _other_stages(ranked: Sequence[RankedPlan]) -> dict[int, list[str]]:
    """Return plans with the same figures and another ZeRO stage, by the position of the first.

    Their options; an empty list at the positions of the plans themselves.
    """
    found: dict[int, list[str]] = {}
    first: dict[object, int] = {}
    for position, one in enumerate(ranked):
        assessment = one.assessment
        figures = (assessment.memory.peak_bytes, assessment.time.step_seconds)
        names = tuple(_case_name(one.scenario, list(CASE_NAMES)))
        key = (names, replace(one.plan, zero_stage=0), *figures)
        if key in first:
            found.setdefault(first[key], []).append(f"--zero {one.plan.zero_stage}")
            found[position] = []
        else:
            first[key] = position
    return found


def _between(ranked: Sequence[RankedPlan]) -> dict[int, str]:
    """Return lines for groups of plans on a front that differ only in recomputed layers.

    By position: the line at the second plan of a group, "" at the following ones; the first and
    the last plan of a group are listed separately.
    """

    def alike(found: RankedPlan) -> tuple[object, ...]:
        names = tuple(_case_name(found.scenario, list(CASE_NAMES)))
        return (names, replace(found.plan, recompute_layers=0))

    lines: dict[int, str] = {}
    start = 0
    for _, group in groupby(ranked, key=alike):
        few = list(group)
        inner = few[1:-1]
        if len(inner) >= MOST_BETWEEN:
            numbers = [found.plan.recompute_layers for found in inner]
            lines[start + 1] = (
                f"… {len(inner)} between, --recompute-layers {numbers[0]} to {numbers[-1]}"
            )
            lines |= dict.fromkeys(range(start + 2, start + 1 + len(inner)), "")
        start += len(few)
    return lines


def inverse_lines(
    find: str, words: str, next_attempt: tuple[str, Sequence[SurveyCase]] | None, *, tried: bool
) -> list[str]:
    """Return the answer of ``plan --find`` above its plan; ``next_attempt``: the next candidate."""
    lines = labelled(LABELS[find], words)
    if next_attempt is not None:
        words, cases = next_attempt
        lines += labelled("Checked", f"{words}: {_why_no_plan(cases)}")
    elif tried:
        lines += labelled("Checked", "no larger or smaller candidate is left to try")
    return [*lines, ""]


def _why_no_plan(cases: Sequence[SurveyCase]) -> str:
    """Return why a candidate has no plan, cluster by cluster."""
    reasons = [f"{case.name} is tight" for case in cases if case.found]
    reasons += [f"{case.name} {reason_without_plan(case)}" for case in cases if not case.found]
    left = len(reasons) - MOST_WHY
    more = f", and {left} more" if left > 0 else ""
    return "; ".join(reasons[:MOST_WHY]) + more
