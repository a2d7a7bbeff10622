"""Micro-batches that a pipeline rank has under way, and the messages between its stages.

Columns of a plan table whose rows share the stages.
"""

from __future__ import annotations

import numpy as np

from cost_models.activations import FULL, SELECTIVE_OPS, saves_input
from cost_models.arrays import Real
from cost_models.model import ModelSpec
from cost_models.plan import SCHEDULES, PlanTable
from cost_models.schedules import SPLIT_CODES
from cost_models.stages import (
    Moment,
    PipelineRank,
    in_flight_1f1b,
    in_flight_gpipe,
    in_flight_interleaved,
    moments_dualpipev,
    moments_zbv,
    moments_zero_bubble,
)
from cost_models.workload import Workload

GPIPE, ONE_F_ONE_B = (SCHEDULES.index(name) for name in ("gpipe", "1f1b"))


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


def messages(
    model: ModelSpec, workload: Workload, table: PlanTable, rank: PipelineRank, in_flight: Real
) -> Real:
    """Bytes a token of messages between stages: c h (/ t with sequence parallelism) each.

    A received input lives until its backward pass; where the first layer saves its input itself
    (layer norm, fp32, full recomputation) that is the same tensor. An encoder's output lives with
    the message that it came in. Beside them the last message that was sent is there until the next
    one goes, and what the next pass needs comes: an input, or on the first stage a gradient, where
    another backward pass follows while it is fullest. The gradient that a stage received is kept
    until its backward pass is over: a tensor of its own where the last layer ends with a norm.
    """
    compute = workload.compute_bytes
    along = np.where(table.sequence_parallel, 1.0 * table.tensor_parallel, 1.0)
    one = compute * model.hidden_size / along
    saves_itself = saves_input(model.kinds[model.pattern[0]], compute)
    inputs = rank.num_stages - float(rank.first)
    keeps_input = (table.recompute == FULL) | (table.recompute == SELECTIVE_OPS)
    alone = np.where(keeps_input, 1.0 * rank.recomputed_starts, 0.0)
    alone = np.where(saves_itself, inputs, alone)
    # offloaded: the layer's copy leaves, the received tensor stays
    apart = inputs - np.where(table.offloads_activations, 0.0, alone)
    received = (apart + rank.states_received - inputs) * in_flight
    under_way: Real = 2.0
    if rank.first and rank.num_stages == 1:
        follows = np.isin(table.pipeline_schedule, (GPIPE, ONE_F_ONE_B)) & (in_flight > 1.0)
        under_way = np.where(follows, 2.0, 1.0)
    last_kind = model.kinds[model.pattern[-1]]
    if not rank.last and last_kind.norms_after and last_kind.norm == "layer":
        under_way = under_way + 1.0
    found = (received + under_way * rank.states_at_once) * one
    return np.where(table.pipeline_parallel > 1, found, 0.0)
