"""Runs that cannot be as their cells say: units mixed up, or two results of one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np

from cost_models.units import GIB
from hardware_profiles.errors import InputError
from planner.learning.effects import Logs, MeasuredRun
from planner.validation.measurement import faster_than_peak
from planner.validation.rows.runs_file import Row

# measured / predicted of 1,094 step times and 525 peaks lies between 0.28 and 23 (the runs of
# `python -m benchmarks.accuracy.learn`); a wrong unit makes it a thousand times larger or smaller
FASTEST, SLOWEST = 1.0 / 30.0, 100.0
AGREE: Final = 1.25  # ratio of two results of one run


def require_plausible(path: Path, runs: Sequence[MeasuredRun], predicted: Logs) -> None:
    """Raise where a measurement is in another unit, or where equal runs contradict each other.

    ``predicted``: logarithms of step time and peak (runs, 2).
    """
    errors = [*_units(runs, np.exp(predicted)), *_contradictions(runs)]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise InputError(f"{path}: {errors[0]}{more}")


def require_positive(path: Path, rows: Sequence[Row]) -> None:
    """Raise where a measured value is zero."""
    for row in rows:
        for column in ("step_time_s", "peak_memory_gib"):
            if getattr(row, column) == 0.0:
                raise InputError(f"{path}: {row.name}: {column} = 0 (must be above 0, or empty)")


def _units(runs: Sequence[MeasuredRun], predicted: Logs) -> Iterator[str]:
    for run, (step, peak) in zip(runs, predicted, strict=True):
        name, chip = run.case.row.name, run.case.scenario.cluster.accelerator
        if run.step and not FASTEST < run.step / step < SLOWEST:
            yield (
                f"{name}: a step of {run.step:,.4g} s, predicted {step:.3g} s (step_time_s must be "
                "in seconds, of an optimizer step of the whole global batch)"
            )
        elif run.step and (reason := faster_than_peak(run.case, run.step)):
            yield f"{name}: {reason}"
        if run.peak is None:
            continue
        whole = chip.memory_capacity.value
        words = (
            "peak_memory_gib must be in GiB, of one accelerator; memory_definition says of what)"
        )
        if run.peak > 1.05 * whole:
            yield (
                f"{name}: a peak of {run.peak / GIB:,.4g} GiB on {chip.name} with "
                f"{whole / GIB:.4g} GiB ({words}"
            )
        elif run.peak < FASTEST * peak:
            yield (
                f"{name}: a peak of {run.peak / GIB:.3g} GiB, predicted {peak / GIB:.3g} ({words}"
            )


def _contradictions(runs: Sequence[MeasuredRun]) -> Iterator[str]:
    for one, other in combinations(runs, 2):
        if _asked(one) != _asked(other):
            continue
        for what, a, b in (
            ("take {:.4g} and {:.4g} s", one.step, other.step),
            (
                "peak at {:.4g} and {:.4g} GiB",
                one.peak and one.peak / GIB,
                other.peak and other.peak / GIB,
            ),
        ):
            if a and b and max(a, b) > AGREE * min(a, b):
                names = f"{one.case.row.name} and {other.case.row.name}"
                yield (
                    f"{names} have the same plan, but {what.format(a, b)} (must agree to "
                    f"{100 * (AGREE - 1):.0f} %; state what differs, or leave one out)"
                )


def _asked(run: MeasuredRun) -> tuple[object, ...]:
    """Return what was run; peaks of one kind alone are compared."""
    case = run.case
    return case.plan, case.scenario, case.row.memory_definition, case.row.notes
