"""Measured runs as cases whose step time can be compared, for the benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from planner.validation.case import Case, case_of
from planner.validation.measurement import faster_than_peak, measured_step, tests_time
from planner.validation.pricing import why_impossible
from planner.validation.reading import Unpriceable
from planner.validation.runs_file import Row


def timed_cases(rows: Iterable[Row]) -> Iterator[tuple[Case, float]]:
    """Cases that can be priced, and their measured seconds a step."""
    for row in rows:
        if not tests_time(row):
            continue
        try:
            case = case_of(row)
        except Unpriceable:
            continue
        seconds = measured_step(row, case)
        possible = why_impossible(case) is None and faster_than_peak(case, seconds) is None
        if seconds and possible:
            yield case, seconds
