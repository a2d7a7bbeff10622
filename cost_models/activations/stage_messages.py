"""Bytes of the messages between pipeline stages that a rank holds."""

from __future__ import annotations

import numpy as np

from cost_models.activations.saved import saves_input
from cost_models.arrays import Real, holds
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import GPIPE, ONE_F_ONE_B
from cost_models.plan.recompute import FULL, by_operator


def messages(view: RankView, in_flight: Real) -> Real:
    """Bytes a token of messages between stages: c h (/ t with sequence parallelism) each.

    A received input lives until its backward pass; where the first layer saves its input itself
    (layer norm, fp32, full recomputation) that is the same tensor. An encoder's output lives with
    the message that contains it. In addition, the last sent message lives until the next one is
    sent, and the next pass's message is received: an input, or on the first stage a gradient, if
    another backward pass follows at the peak. The gradient that a stage received is kept
    until its backward pass is over: a tensor of its own where the last layer ends with a norm.
    """
    model, workload, table = view.model, view.workload, view.table
    rank = view.rank
    compute = workload.compute_bytes
    along = np.where(table.sequence_parallel, 1.0 * table.tensor_parallel, 1.0)
    one = compute * model.hidden_size / along
    saves_itself = saves_input(model.kinds[model.pattern[0]], compute, view.software)
    inputs = rank.num_stages - 1.0 * rank.first
    keeps_input = (table.recompute == FULL) | by_operator(table.recompute)
    alone = np.where(keeps_input, 1.0 * rank.recomputed_first_layers, 0.0)
    alone = np.where(saves_itself, inputs, alone)
    # offloaded: the layer's copy leaves, the received tensor stays
    apart = inputs - np.where(table.offloads_activations, 0.0, alone)
    received = (apart + rank.hidden_states_received - inputs) * in_flight
    under_way: Real = 2.0
    if holds(rank.first):
        follows = np.isin(table.pipeline_schedule, (GPIPE, ONE_F_ONE_B)) & (in_flight > 1.0)
        receives = np.logical_not(rank.first) | np.greater(rank.num_stages, 1)
        under_way = np.where(follows | receives, 2.0, 1.0)
    last_kind = model.kinds[model.pattern[-1]]
    if last_kind.norms_after and last_kind.norm == "layer":
        under_way = under_way + (1.0 - rank.last)
    found = (received + under_way * rank.max_message_states) * one
    return np.where(table.pipeline_parallel > 1, found, 0.0)
