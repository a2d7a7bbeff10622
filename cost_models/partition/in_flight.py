"""Micro-batches in flight on a pipeline rank.

Columns of a plan table whose rows share the stages.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Real
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.partition.stages import (
    Moment,
    PipelineRank,
    in_flight_1f1b,
    in_flight_gpipe,
    in_flight_interleaved,
    moments_dualpipev,
    moments_zbv,
    moments_zero_bubble,
)
from cost_models.plan.plan import SCHEDULES, PlanTable


def fullest_moments(table: PlanTable, rank: PipelineRank) -> list[Moment]:
    """Return the moments of which one is a rank's fullest: what is in flight, and what is due.

    Counted in stages (1/v of the rank's layers): stage inputs whose activations it holds, and
    stages of micro-batches whose weight gradients are still to come. A schedule with fewer such
    moments repeats one.
    """
    schedule = table.pipeline_schedule
    microbatches, pipeline = table.num_microbatches, table.pipeline_parallel
    virtual, index = table.virtual_stages, rank.index
    none = np.zeros(len(table))
    by_schedule: dict[str, tuple[Moment, ...]] = {
        "gpipe": ((in_flight_gpipe(microbatches) * virtual, none),),
        "1f1b": ((in_flight_1f1b(microbatches, pipeline, index), none),),
        "interleaved_1f1b": (
            (in_flight_interleaved(microbatches, pipeline, virtual, index), none),
        ),
        "zero_bubble": moments_zero_bubble(microbatches, pipeline, virtual, index),
        "zbv": moments_zbv(pipeline, index),
        "dualpipev": moments_dualpipev(pipeline, index),
    }
    by_schedule["interleaved_zero_bubble"] = by_schedule["zero_bubble"]
    chosen = [schedule == SCHEDULES.index(name) for name in by_schedule]
    chosen = [each & (pipeline > 1) for each in chosen]
    found: list[Moment] = []
    for number in range(max(map(len, by_schedule.values()))):
        of_each = [moments[min(number, len(moments) - 1)] for moments in by_schedule.values()]
        # without a pipeline a micro-batch is walked back before the next one starts
        flying = np.select(chosen, [f for f, _ in of_each], 1.0 * virtual)
        due = np.select(chosen, [d for _, d in of_each], 0.0)
        found.append((flying, due))
    return found


def due_at_the_end(table: PlanTable, rank: PipelineRank) -> Real:
    """Micro-batches whose weight gradients are due when a stage's last ones are computed.

    One stage with one stage a rank; with several the others' are due as well, at most r + 1.
    """
    split = np.isin(table.pipeline_schedule, SPLIT_CODES) & (table.pipeline_parallel > 1)
    stages = 1.0 if rank.num_stages == 1 else rank.index + 1.0
    return np.where(split, stages / rank.num_stages, 0.0)
