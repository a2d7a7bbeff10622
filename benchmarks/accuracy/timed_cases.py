"""Measured runs as cases whose step time can be compared, for the benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from planner.validation.measurement import faster_than_peak, measured_step, tests_time
from planner.validation.pricing import why_impossible
from planner.validation.rows.case import Case, case_of
from planner.validation.rows.implied import with_named_ends
from planner.validation.rows.reading import Unpriceable
from planner.validation.rows.runs_file import Row


def priced_cases(rows: Iterable[Row]) -> Iterator[Case]:
    """Rows of a table that can be priced, as cases."""
    for row in with_named_ends(list(rows)):
        try:
            case = case_of(row)
        except Unpriceable:
            continue
        if why_impossible(case) is None:
            yield case


def timed_cases(rows: Iterable[Row]) -> Iterator[tuple[Case, float]]:
    """Cases that can be priced, and their measured seconds a step."""
    for case in priced_cases(filter(tests_time, rows)):
        seconds = measured_step(case.row, case)
        if seconds and faster_than_peak(case, seconds) is None:
            yield case, seconds
