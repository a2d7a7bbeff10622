"""Seconds of steps whose pipelines are simulated action by action.

All else is as in the closed form (``estimate.price``), of which the bubble is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cost_models.estimate import Priced, Setting, stages_of
from cost_models.pipeline_time import makespan
from cost_models.plan import Plan, PlanTable
from cost_models.rates import rates
from cost_models.schedules import stages_of_rank
from cost_models.step_time import Hiding, owners, rank_seconds, step_seconds

Floats = NDArray[np.float64]
Known = dict[object, float]  # pipelines that were simulated before, and their seconds
PASSES = ("forward_pass", "backward_pass", "weights")
ROUNDING: Final = 1e-12  # within which a simulated step is its bound


def with_simulated_steps(
    setting: Setting,
    table: PlanTable,
    priced: Priced,
    layer_ranges: Sequence[tuple[int, int]] | None = None,
) -> Priced:
    """Return prices whose bubbles are what the simulation finds, not its lower bound."""
    piped = np.flatnonzero(table.pipeline_parallel > 1)
    if len(piped) == 0:
        return priced
    found = simulated_steps(setting, table.rows(piped), layer_ranges=layer_ranges)
    least = priced.step[piped]
    bubble = np.array(priced.time.bubble, dtype=float)
    bubble[piped] += np.where(found <= (1.0 + ROUNDING) * least, 0.0, found - least)
    return replace(priced, time=replace(priced.time, bubble=bubble))


def simulated_steps(
    setting: Setting,
    table: PlanTable,
    known: Known | None = None,
    layer_ranges: Sequence[tuple[int, int]] | None = None,
) -> Floats:
    """Return the seconds of a step of every plan; stages of one rank are equal shares of its time.

    ``known``: to be asked and added to. ``layer_ranges``: stages, as of ``estimate.price``.
    """
    model, workload, software = setting.model, setting.workload, setting.software
    rate = rates(setting.cluster.accelerator, workload.precision, software)
    steps, known = np.empty(len(table)), {} if known is None else known
    group, contents = stages_of(setting, table, layer_ranges)
    for number, ranks in enumerate(contents):
        rows = np.flatnonzero(group == number)
        few = table.rows(rows)
        seconds = [
            rank_seconds(model, workload, setting.cluster, software, rate, few, rank)
            for rank in ranks
        ]
        places = [rank.positions for rank in ranks]
        passes = np.stack(
            [
                [np.broadcast_to(getattr(each, name), len(rows)) for each in seconds]
                for name in PASSES
            ]
        )
        owner = owners(places)
        time, _ = step_seconds(
            seconds,
            places,
            few,
            Hiding.of(software),
            on_gpu=setting.on_gpu,
            core_share=setting.core_share,
            bound=np.array(
                [_pipeline(few.plan(i), passes[:, owner, i], known) for i in range(len(rows))]
            ),
        )
        steps[rows] = time.step
    return steps


def _pipeline(plan: Plan, passes: Floats, known: Known) -> float:
    """Return the seconds of a pipeline; ``passes``: (kinds, ranks)."""
    key = plan.pipeline_schedule, plan.num_stages, plan.num_microbatches, passes.tobytes()
    if key not in known:
        by_stage = np.zeros((len(PASSES), plan.num_stages))
        for rank in range(plan.pipeline_parallel):
            for stage in stages_of_rank(plan, rank):
                by_stage[:, stage] = passes[:, rank] / plan.virtual_stages
        known[key] = makespan(plan, *by_stage.tolist())
    return known[key]
