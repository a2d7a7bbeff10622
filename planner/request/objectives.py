"""Objectives: time, cost, memory or energy, and the exact Pareto front of any two.

On one cluster, time, cost and energy give the same order: dollars and joules are the step's seconds
times the price and power of all accelerators. They differ between clusters, or numbers of
accelerators.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cost_models.plan.plan import PlanTable
from cost_models.pricing.utilisation import counted_flops, peak_flops
from cost_models.scenario import Scenario
from planner.request.options.choices import Objective

Floats = NDArray[np.float64]


def sort_keys(objective: Objective, step: Floats, peak: Floats) -> tuple[Floats, Floats]:
    """Return the columns to sort the plans of one scenario by, the last one first (``lexsort``)."""
    return (step, peak) if objective == "memory" else (peak, step)


def results(scenario: Scenario, table: PlanTable, step: Floats, peak: Floats) -> dict[str, Floats]:
    """Return the results that can be constrained, by the names of ``constraints.RESULTS``.

    ``mfu`` is missing where the datasheet has no peak in this precision.
    """
    workload = scenario.workload
    seconds = step * table.world_size
    columns = {
        "memory": peak,
        "step": step,
        "tokens_per_second_per_gpu": workload.tokens_per_step / seconds,
    }
    best = peak_flops(scenario)
    if best is not None:
        columns["mfu"] = counted_flops(scenario).flops / (seconds * best)
    return columns


def pareto_front(first: Floats, second: Floats) -> NDArray[np.int64]:
    """Return the Pareto-optimal rows of two costs, sorted by the first.

    Of equal rows the earliest is kept.

    >>> pareto_front(np.array([3.0, 1.0, 2.0, 2.0]), np.array([1.0, 9.0, 5.0, 7.0])).tolist()
    [1, 2, 0]
    """
    order = np.lexsort((np.arange(len(first)), second, first))
    lowest = np.minimum.accumulate(second[order])
    better = np.ones(len(order), dtype=bool)
    better[1:] = second[order][1:] < lowest[:-1]
    front: NDArray[np.int64] = order[better]
    return front
