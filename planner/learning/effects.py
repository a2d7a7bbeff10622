"""Predicted step time and peak memory of runs under every mechanism, as logarithms.

Effects add up: the logarithm of a prediction with several mechanisms is that of the profile plus
each mechanism's change. ``refinement`` prices the most likely combinations exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hardware_profiles.progress import tracked
from planner.learning.mechanisms import OWN, RATES, Figures, Prior, Rate, Switch, switches
from planner.validation.measurement import (
    is_partial,
    measured_memory,
    measured_step,
    tests_memory,
    tests_time,
)
from planner.validation.pricing import predict_cases
from planner.validation.rows.case import Case

Logs = np.ndarray[Any, np.dtype[np.float64]]
SMALLEST = 1e-4  # of a logarithm: smaller effects are none


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run with what was measured of it; None: not measured."""

    case: Case
    step: float | None  # seconds
    peak: float | None  # bytes, of the kind of the row

    @property
    def logs(self) -> tuple[float, float]:
        """Logarithms of step time and peak; NaN where it was not measured."""
        return tuple(math.nan if not one else math.log(one) for one in (self.step, self.peak))  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Effects:
    """Logarithms of predictions, and their changes by each mechanism; NaN: refused.

    The last axes are runs and quantities (step time, peak memory).
    """

    base: Logs  # (runs, 2)
    options: tuple[tuple[str, ...], ...]  # of every switch; the first is the profile's own
    switches: tuple[Switch, ...]
    by_option: tuple[Logs, ...]  # per switch (options, runs, 2); zeros for the profile's own
    rates: tuple[Rate, ...]
    by_rate: Logs  # (rates, runs, 2): change by one prior width

    def of(self, runs: Sequence[int]) -> Effects:
        """Return the effects on some of the runs."""
        chosen = list(runs)
        return replace(
            self,
            base=self.base[chosen],
            by_option=tuple(effect[:, chosen] for effect in self.by_option),
            by_rate=self.by_rate[:, chosen],
        )


def measured_run(case: Case) -> MeasuredRun | None:
    """Return a case as a measured run; None if neither time nor memory of it may be compared."""
    row = case.row
    if is_partial(row):
        return None
    step = measured_step(row, case) if tests_time(row) else None
    memory = measured_memory(row) if tests_memory(row) else None
    if not step and memory is None:
        return None
    return MeasuredRun(case, step or None, None if memory is None else memory.size)


def log_predictions(cases: Sequence[Case], figures: Figures) -> Logs:
    """Return logarithms of step time and peak (cases, 2) under changed figures; NaN: refused."""
    label = repr(sorted(figures.items()))
    changed = [
        replace(
            case,
            row=case.row,
            scenario=replace(case.scenario, software=case.scenario.software.changed(figures)),
            key=(*case.key, label),
        )
        for case in cases
    ]
    found, _ = predict_cases(changed)
    logs = np.full((len(cases), 2), math.nan)
    for number, case in enumerate(cases):
        if predicted := found.get(case.row.name):
            logs[number] = math.log(predicted.step), math.log(max(predicted.peak, 1.0))
    return logs


def effects(cases: Sequence[Case], prior: Prior) -> Effects:
    """Return the effects of all mechanisms on runs of one trainer."""
    software = cases[0].scenario.software
    base = log_predictions(cases, {})
    tried = [switch for switch in switches(software) if _concerns(switch, cases)]
    names, by_option = [], []
    for switch in tracked(tried, "switch {number} of {total}", size=lambda one: len(one.options)):
        changes = [log_predictions(cases, figures) - base for figures in switch.options.values()]
        names.append((OWN, *switch.options))
        by_option.append(_rounded(np.stack([np.zeros_like(base), *changes])))
    by_rate = []
    for rate in tracked(RATES, "rate {number} of {total}"):
        width = prior.widths[rate.figure]
        down = -1.0 if rate.value(software, width) >= rate.most else 1.0
        moved = {rate.figure: rate.value(software, down * width)}
        by_rate.append(_rounded(down * (log_predictions(cases, moved) - base)))
    return Effects(base, tuple(names), tuple(tried), tuple(by_option), RATES, np.stack(by_rate))


def _rounded(change: Logs) -> Logs:
    return np.where(np.abs(change) < SMALLEST, 0.0, change)


def _concerns(switch: Switch, cases: Sequence[Case]) -> bool:
    """Whether any of the runs has what a switch is about."""
    plans = [case.plan for case in cases]
    if switch.name in ("data-parallel wrapper", "data-parallel traffic"):
        return any(plan.data_parallel * plan.context_parallel > 1 for plan in plans)
    if switch.name == "tensor-parallel traffic":
        return any(plan.tensor_parallel > 1 for plan in plans)
    if switch.name == "weights":
        return any(case.scenario.workload.precision in ("bf16", "fp16") for case in cases)
    return True
