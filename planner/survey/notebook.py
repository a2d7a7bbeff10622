"""Several clusters or precisions in a notebook: the best plan of each as a table."""

from __future__ import annotations

from collections.abc import Sequence

from planner.survey.compare_cases import SurveyCase, SurveyRequest, sort_key
from planner.survey.text import case_columns, case_rows, reason_without_plan
from planner.text.html_page import Html, joined, listed, note, table


def cases_table(request: SurveyRequest, cases: Sequence[SurveyCase]) -> Html:
    """Return the best plan of every case, best first, and the reasons of those without one."""
    key = sort_key(request)
    good = sorted((case for case in cases if case.found), key=lambda case: key(case.found[0]))
    names = case_columns([case.scenario for case in cases])
    head, *rows = case_rows(request, good, len(good), names)
    without = [f"{case.name}: {reason_without_plan(case)}" for case in cases if not case.found]
    title = note("The best plan of each:")
    return joined([title, table(rows, head), listed(without) if without else Html("")])
