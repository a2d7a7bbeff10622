"""The best plans by the simulated step: event by event, but only those that can still win.

A plan's step in closed form is never longer than its simulated one (``pipeline_time``). Plans are
simulated in the order of that bound; once ``top`` of them are done and the next bound is longer
than the longest of the best ones, no plan that is left can be among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_models.estimate import Setting
from cost_models.plan import PlanTable
from cost_models.simulated import simulated_step


@dataclass(frozen=True, slots=True)
class Finalists:
    """Rows of a table, best first, and their seconds of a step."""

    rows: NDArray[np.intp]
    seconds: NDArray[np.float64]
    simulated: int  # event by event; a plan without a pipeline needs none
    bounded_away: int  # neither simulated nor able to win


def simulate(
    setting: Setting,
    table: PlanTable,
    order: NDArray[np.intp],
    step: NDArray[np.float64],
    peak: NDArray[np.float64],
    *,
    top: int,
) -> Finalists:
    """Rank rows that come in the order of ``step``, a lower bound; among equals the first stays."""
    best: list[tuple[float, float, int, int]] = []  # seconds, peak, position, row
    simulated = 0
    known: dict[object, float] = {}
    for position, row in enumerate(order.tolist()):
        if len(best) >= top and step[row] > best[top - 1][0]:
            return _ranked(best, top, simulated, len(order) - position)
        seconds = float(step[row])
        if table.pipeline_parallel[row] > 1:
            seconds = max(seconds, simulated_step(setting, table.plan(row), known))
            simulated += 1
        best.append((seconds, float(peak[row]), position, row))
        best.sort()
    return _ranked(best, top, simulated, 0)


def _ranked(
    best: list[tuple[float, float, int, int]], top: int, simulated: int, left: int
) -> Finalists:
    rows = np.array([row for *_, row in best[:top]], dtype=np.intp)
    seconds = np.array([seconds for seconds, *_ in best[:top]])
    return Finalists(rows, seconds, simulated, left)
