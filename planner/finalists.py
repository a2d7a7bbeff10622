"""The best plans by the simulated step: action by action, but only those that can still win.

A plan's step in closed form is never longer than its simulated one (``pipeline_time``). Plans are
simulated in the order of that bound; once ``top`` of them are done and the next bound is longer
than the longest of the best ones, no plan that is left can be among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cost_models.estimate import Setting
from cost_models.plan import PlanTable
from cost_models.simulated import above, simulated_steps

Rows = NDArray[np.intp]
Floats = NDArray[np.float64]
AT_ONCE: Final = 16  # plans whose ranks are priced together before they are simulated


@dataclass(frozen=True, slots=True)
class Finalists:
    """Rows of a table, best first, and their seconds of a step."""

    rows: Rows
    seconds: Floats
    simulated: int  # action by action; a plan without a pipeline needs none
    bounded_away: int  # not simulated, since they cannot win


def simulate(
    setting: Setting, table: PlanTable, order: Rows, step: Floats, peak: Floats, *, top: int
) -> Finalists:
    """Rank rows that come in the order of ``step``, a lower bound; among equals the first stays."""
    best: list[tuple[float, float, int]] = []  # seconds, peak, position in the order
    simulated = done = 0
    while done < len(order):
        longest = best[top - 1][0] if len(best) >= top else np.inf
        batch = order[done : done + max(AT_ONCE, top)]
        batch = batch[step[batch] <= longest]
        if len(batch) == 0:
            break
        seconds = step[batch]
        piped = table.pipeline_parallel[batch] > 1
        if piped.any():
            found = simulated_steps(setting, table.rows(batch[piped]))
            seconds[piped] = above(seconds[piped], found)
        simulated += int(np.sum(piped))
        best += zip(
            seconds.tolist(), peak[batch].tolist(), range(done, done + len(batch)), strict=True
        )
        best = sorted(best)[:top]
        done += len(batch)
    rows = order[np.array([position for *_, position in best], dtype=np.intp)]
    left = len(order) - done
    return Finalists(rows, np.array([s for s, *_ in best]), simulated, left)
