"""Peak memory of one accelerator: the parts, at the moment when their sum is largest.

A training step has few moments that can be the peak; all of them are priced and the largest counts:

    loss_forward    every in-flight micro-batch's activations; the logits and fp32 copies
    loss_backward   the same; the logits, their gradient and fp32 copies
    head            the same activations; the head's gradient on its way
    backward        the same activations; what walking one layer backward needs
    later_backward  one micro-batch less in flight, and gradients of the ones that are done
    last_layer      gradients of all later layers; the last layer's activations and its walk
    embedding       gradients of all layers, and the embedding's on its way
    optimizer       reduced gradients, no activations

Units: bytes. Every argument may be a column of a plan table whose rows share the stages
and the layers that are recomputed (what a rank holds is found once for them, see ``stages``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cost_models.activations.fp8 import fp8_weight_bytes
from cost_models.activations.live import Held, held_activations
from cost_models.arrays import Real, pick
from cost_models.columnar.columns import by_value
from cost_models.communication.host_link import without_offload
from cost_models.communication.zero_plus_plus import (
    gathering_buffer,
    reducing_buffer,
    secondary_bytes,
)
from cost_models.memory.autocast_copies import absent_copies
from cost_models.memory.fsdp1 import flat_buffers, flat_gradients, units
from cost_models.memory.fsdp2 import Blocks
from cost_models.memory.gradients import Gradients, gradients_of, shares
from cost_models.memory.head_gradients import HeadGradients, head_gradients
from cost_models.memory.host import HostBytes, offloaded_bytes
from cost_models.memory.model_states import (
    master_copy_bytes,
    optimizer_shards,
    weight_bytes,
)
from cost_models.memory.moments import AtMoment, Moment, fullest, total
from cost_models.memory.optimizer_states import RULES, StateBytes, rank_states, update_bytes
from cost_models.memory.parts import MemoryParts
from cost_models.partition.rank_parameters import (
    RankParameters,
    dequantised_bytes,
    frozen_bytes,
)
from cost_models.partition.rank_view import RankView
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.plan.plan import PlanTable
from hardware_profiles.software.trainer import SoftwareProfile

MOMENTS = (
    "loss_forward",
    "loss_backward",
    "head",
    "backward",
    "later_backward",
    "last_layer",
    "embedding",
    "optimizer",
)


def rank_memory(view: RankView) -> tuple[MemoryParts, Real]:
    """Return the parts at the peak of one pipeline rank, and the index of the peak's moment.

    Shapes: columns of the table's length. Source: the formulas named in ``model_states`` and
    ``activations``; what torch's FSDP holds while it gathers and reduces (compute-precision weights
    and gradient, fp32 reduction buffer) is counted in ``buffers``.
    """
    software, on_gpu = view.software, view.on_gpu
    states, passing, places = rank_places(view)
    moments = _at_moments(places, passing)
    moment = np.argmax(np.stack([total(parts) for parts in moments]), axis=0)
    at_peak = [pick([parts[part] for parts in moments], moment) for part in range(5)]
    return _with_runtime(states, at_peak, software, on_gpu=on_gpu), moment


def rank_timeline(view: RankView) -> tuple[MemoryParts, ...]:
    """Return the parts of one pipeline rank at every one of ``MOMENTS``; columns, as above.

    The largest of them is what ``rank_memory`` returns. ``runtime`` is that of each moment: the
    device's own share, and the allocator's slack on what is allocated then.
    """
    software, on_gpu = view.software, view.on_gpu
    states, passing, places = rank_places(view)
    moments = _at_moments(places, passing)
    return tuple(_with_runtime(states, parts, software, on_gpu=on_gpu) for parts in moments)


States = tuple[Real, Real]  # weights and optimizer


def _with_runtime(
    states: States, at: Sequence[Real], software: SoftwareProfile, *, on_gpu: bool
) -> MemoryParts:
    """Return all parts at a moment, what no tensor holds included."""
    weights, optimizer = states
    zeros = np.zeros_like(weights)
    parts = MemoryParts(weights - at[4], at[0], optimizer, at[1], at[2], at[3], zeros)
    if not on_gpu:
        return parts
    runtime = software.memory.context_bytes + software.memory.allocator_slack * parts.allocated
    return replace(parts, runtime=runtime)


def _at_moments(places: Sequence[Sequence[Moment]], passing: Real) -> list[AtMoment]:
    """Return each moment's fullest place, with what is on its way between stages all the time."""
    zeros = np.zeros_like(passing)
    beside: AtMoment = (zeros, zeros, zeros, passing, zeros)
    return [_sum(fullest(moment), beside) for moment in places]


def rank_places(view: RankView) -> tuple[States, Real, list[list[Moment]]]:
    """Return what stays through a step, what is on its way between stages, and what else there is.

    That at each of ``MOMENTS``, at every place that can be its fullest.
    """
    if not view.on_gpu:
        view = view.with_table(without_offload(view.table))
    model, workload, software = view.model, view.workload, view.software
    table, rank, on_gpu = view.table, view.rank, view.on_gpu
    compute, master = workload.compute_bytes, workload.master_bytes
    params = view.parameters
    weights, optimizer = np.zeros(len(table)), np.zeros(len(table))
    for numel, ranks in shares(params, table):
        # a tensor that one rank holds alone, in one precision, is left as it is: no shard beside it
        zero = np.where((ranks > 1) | (compute != master), table.zero_stage, 0)
        shared = (numel, ranks, zero, compute, master)
        weights = weights + weight_bytes(*shared)
        optimizer = optimizer + master_copy_bytes(*shared)
    # offloaded weights: shards of the layer that runs and of the next one come from the host
    fetched = 2.0 * master * params.largest_layer / np.maximum(1, table.shard_ranks)
    weights = np.where(table.offloads_weights, fetched, weights)
    optimizer = np.where(table.offloads_weights, 0.0, optimizer)
    weights = weights + secondary_bytes(params.total - params.expert_total, compute, table)
    if workload.precision == "fp8":
        weights = weights + fp8_weight_bytes(model, table, rank, software.fp8.weight_copies)
    weights = weights + frozen_bytes(model, rank, table, workload, software)
    # offloaded states are off the device; master weights stay, gradients go straight to the host
    states = _states(view)
    optimizer = optimizer + np.where(table.offloads_optimizer, 0.0, states.resident)
    updated = _updated(params, table)
    update = update_bytes(view, updated)
    update = np.where(table.offloads_optimizer, 0.0, update)

    held = held_activations(view)
    gradients = gradients_of(workload, software, table, params, held.in_flight + held.due)
    gradients = gradients.where_offloaded(table, workload.reduction_bytes * params.largest_layer)
    matrix, helping = dequantised_bytes(model, rank, table, compute)
    single = np.where(
        table.pipeline_parallel > 1, 0.0, software.memory.buffer_bytes_without_pipeline
    )
    passing = held.messages + (software.memory.buffer_bytes + single) * on_gpu
    if software.sharding.blockwise_backward:
        blocks = Blocks.of(view, held.in_flight + held.due)
        packed = any(w.quantised for kind in model.kinds for w in kind.weights)
        used = (matrix, helping) if packed else None
        moments = _by_blocks(blocks, gradients, held, used, update)
    else:
        buffers = _buffers(view, held.in_flight + held.due)
        if software.sharding.flat_parameters:
            whole = units(view)
            buffers = replace(buffers, **flat_buffers(software, table, whole, buffers))
            gradients = replace(gradients, **flat_gradients(software, table, whole, gradients))
        waiting = head_gradients(view, held.logits_gradient)
        gone: Sequence[Real] = [np.zeros(len(table))] * len(MOMENTS)
        if software.precision.autocasts_weights and compute != master:
            gone = absent_copies(params, rank, table, compute, tied=model.tie_embeddings)
        moments = _by_layers(buffers, gradients, held, matrix + helping, update, waiting, gone)
    return (weights, optimizer), passing, moments


def _by_layers(
    buffers: Buffers,
    gradients: Gradients,
    held: Held,
    used: Real,
    update: Real,
    waiting: HeadGradients,
    gone: Sequence[Real],
) -> list[list[Moment]]:
    """Return each of ``MOMENTS`` as one sum: a layer on its way backward is one place.

    ``gone``: bytes of weights that are not there, at each of them.
    """
    zeros = np.zeros_like(held.saved)
    flight, backward = gradients.full_flight, buffers.backward + used + waiting.layers
    last = buffers.last_layer + used
    head: list[AtMoment] = [
        (flight, held.saved, logits, np.maximum(buffers.head, fresh), gone[2])
        for fresh, logits in waiting.head
    ]
    embedding = np.maximum(buffers.embedding, waiting.embedding)
    later = held.saved_later + held.working
    moments: list[list[AtMoment]] = [
        [(flight, held.saved, held.logits_forward, buffers.loss_forward, gone[0])],
        [(flight, held.saved, held.logits_backward, buffers.loss_backward, gone[1])],
        head,
        [(flight, held.saved + held.working, zeros, backward, gone[3])],
        [(gradients.later, later, held.logits_later, backward, gone[4])],
        [(gradients.last_layer, held.last_layer, zeros, last + waiting.layers, gone[5])],
        [(gradients.embedding, zeros, zeros, embedding, gone[6])],
        [(gradients.reduced, zeros, zeros, zeros + update, gone[7])],
    ]
    return [[Moment(parts) for parts in places] for places in moments]


def _by_blocks(
    blocks: Blocks,
    gradients: Gradients,
    held: Held,
    used: tuple[Real, Real] | None,
    update: Real,
) -> list[list[Moment]]:
    """Return the places of each of ``MOMENTS``."""
    zeros = np.zeros_like(held.saved)
    flight, later = gradients.full_flight, replace(held, saved=held.saved_later)
    ways = blocks.ways_back(held, used)
    losses = (
        (held.logits_forward, blocks.at_loss_forward()),
        (held.logits_backward, blocks.at_loss_backward()),
    )
    return [
        *(
            [
                Moment((now, saved, logits, buffers, zeros))
                for now, saved in blocks.at_the_turn(flight, held)
            ]
            for logits, buffers in losses
        ),
        blocks.at_head(flight, held),
        blocks.at_layer(flight, held, zeros, ways),
        [
            *blocks.at_layer(gradients.later, later, held.logits_later, ways),
            blocks.at_embedding_of_others(gradients.later, later),
        ],
        blocks.at_last_layer(gradients.last_layer, held, used),
        blocks.at_embedding(gradients.embedding),
        [Moment((gradients.reduced, zeros, zeros, zeros + update, blocks.all_gone()))],
    ]


def _sum(one: AtMoment, other: AtMoment) -> AtMoment:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def rank_host_bytes(view: RankView) -> HostBytes:
    """Return what one rank has in host memory and on drives; nothing where it is the host."""
    workload, table = view.workload, view.table
    zeros = np.zeros(len(table))
    paged = RULES[workload.optimizer].paged
    if not view.on_gpu or not (paged or np.any(table.offload > 0)):
        return HostBytes(zeros, zeros)
    params = view.parameters
    states = _states(view)
    held = held_activations(view)
    return offloaded_bytes(
        workload,
        table,
        _updated(params, table),
        states.resident + states.paged,
        states.paged,
        held.offloaded,
    )


def _updated(params: RankParameters, table: PlanTable) -> Real:
    """Return the elements that a rank's optimizer updates."""
    parts_of = shares(params, table)
    return sum(
        (numel / optimizer_shards(ranks, table.zero_stage) for numel, ranks in parts_of),
        start=np.zeros(len(table)),
    )


def _states(view: RankView) -> StateBytes:
    """Return the optimizer's states: k s a parameter, or tensor by tensor where these differ."""
    workload, table = view.workload, view.table
    rule = RULES[workload.optimizer]
    if rule.is_uniform and not rule.paged:
        each = workload.state_bytes * rule.states
        return StateBytes(each * _updated(view.parameters, table), np.zeros(len(table)))
    return rank_states(view)


@dataclass(frozen=True, slots=True)
class Buffers:
    """Bytes of gathered weights and of gradients on their way, at the moments of ``MOMENTS``."""

    loss_forward: Real
    loss_backward: Real
    head: Real
    backward: Real
    last_layer: Real
    embedding: Real


def _buffers(view: RankView, in_flight: Real) -> Buffers:
    """What FSDP2 holds beside shards: a block is a layer, the embedding, or norm and head.

        gathered   c P_block under ZeRO-3; its gathering writes one more copy
        reducing   (c + g) P_block: the gradient, and its copy in the precision of the reduction
        left over  g P_block of the block that was reduced last, until the next reduction (torch
                   2.13, FSDPCommContext.reduce_scatter_state)

    Under ZeRO 0 and 1 reduction starts with the last micro-batch, when only one is in flight.
    """
    params = view.parameters
    workload, table, rank = view.workload, view.table, view.rank
    compute, reduction = workload.compute_bytes, workload.reduction_bytes
    zero, sharded = table.zero_stage, table.zero_stage >= 1
    every = zero >= 2
    last_block = params.embedding if rank.first else params.largest_layer
    several = by_value(table.num_microbatches > 1)
    left_over = np.where(every & several, reduction * last_block, 0.0)
    head, mixed = params.head, compute != workload.master_bytes
    alone = (table.expert_shard_ranks <= 1) & (not mixed)  # experts: nothing to gather or reduce
    layer = params.largest_layer - np.where(alone, params.expert_layer, 0.0)
    gathering = np.where(
        zero >= 3,
        2.0 * head,
        np.where(sharded & np.logical_not(several), head, 0.0),
    )
    gathered = np.where(zero >= 3, compute + gathering_buffer(table), 0.0)
    reduced = reducing_buffer(reduction, table)
    reducing = np.where(sharded, compute + reduced, compute if mixed else 0.0)
    now = every | by_value(in_flight <= 1.0)
    # before it is added up: a layer's gradient in compute precision (FSDP), or those of the two
    # matrices that share an input
    apart = mixed | (table.shard_ranks > 1)
    added = np.where(several, compute * params.largest_pair, 0.0)
    fresh = np.where(apart, compute * layer if mixed else 0.0, added)
    flying = np.where(now, (gathered + reducing) * layer, 0.0)
    # weight gradients that come last are reduced while others are still due: the copy in the
    # precision of the reduction, and what comes out of it beside what was accumulated
    ranks = np.where(sharded, np.multiply(1.0, table.shard_ranks), 1.0)
    split = np.isin(table.pipeline_schedule, SPLIT_CODES) & (table.pipeline_parallel > 1)
    at_end = np.where(split & apart, reduction * (1.0 + 1.0 / ranks) + compute * mixed, 0.0)
    return Buffers(
        loss_forward=compute * gathering + left_over,
        loss_backward=gathered * (head + layer) + left_over,
        head=np.where(now, (gathered + reducing) * head + gathered * layer * (head > 0.0), 0.0),
        backward=np.maximum(flying, fresh),
        last_layer=np.maximum(np.maximum(gathered + reducing, at_end) * layer, fresh),
        embedding=reducing * params.embedding,
    )
