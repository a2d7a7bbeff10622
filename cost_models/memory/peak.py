"""Peak memory of one accelerator: its parts at the moment of a step when their sum is largest.

A training step has eight moments that can be the peak (``ledger.MOMENTS``); all are priced, and the
peak is the largest.

Units: bytes. Every argument may be a column of a plan table whose rows share the stages
and the recomputed layers (the contents of a rank are found once for them, see ``stages``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from cost_models.activations.live import LiveActivations, live_activations
from cost_models.arrays import Real, pick
from cost_models.columnar.columns import by_value
from cost_models.communication.host_link import without_offload
from cost_models.communication.zero_plus_plus import gathering_buffer, reducing_buffer
from cost_models.memory.autocast_copies import absent_copies, autocast_rows, gathered_bytes
from cost_models.memory.fsdp1 import flat_buffers, flat_gradients, units
from cost_models.memory.fsdp2 import Blocks
from cost_models.memory.gradients import Gradients, gradients_of
from cost_models.memory.head_gradients import HeadGradients, head_gradients
from cost_models.memory.host import HostBytes, offloaded_bytes
from cost_models.memory.ledger import MOMENTS, Row
from cost_models.memory.ledger import total as total_of
from cost_models.memory.model_states import rank_weights
from cost_models.memory.optimizer_states import (
    OPTIMIZER_TRAITS,
    StateBytes,
    optimizer_rows,
    rank_states,
    update_bytes,
    updated_elements,
)
from cost_models.memory.parts import MemoryParts
from cost_models.memory.step_points import StepPoint, TransientParts, largest_point, total
from cost_models.memory.wrapper_buffers import update_with_copies, wrapper_rows
from cost_models.partition.frozen_weights import dequantisation_buffers
from cost_models.partition.rank_view import RankView
from cost_models.partition.schedules import SPLIT_CODES
from hardware_profiles.software.trainer import SoftwareProfile


def rank_memory(view: RankView) -> tuple[MemoryParts, Real]:
    """Return the parts at the peak of one pipeline rank, and the index of the peak's moment.

    Shapes: columns of the table's length. Source: the formulas named in ``model_states`` and
    ``activations``. ``buffers`` includes the memory of torch's FSDP while it gathers and reduces
    (compute-precision weights and gradient, fp32 reduction buffer).
    """
    software, on_gpu = view.software, view.on_gpu
    states, constant, points = rank_step_points(view)
    moments = _at_moments(points, constant)
    moment = np.argmax(np.stack([total(parts) for parts in moments]), axis=0)
    at_peak = [pick([parts[part] for parts in moments], moment) for part in range(5)]
    return _with_runtime(states, at_peak, software, on_gpu=on_gpu), moment


def rank_timeline(view: RankView) -> tuple[MemoryParts, ...]:
    """Return the parts of one pipeline rank at each of ``MOMENTS``; columns, as above.

    ``rank_memory`` returns the largest of them. ``runtime`` is given for each moment: the device's
    own share, and the allocator's slack on the memory allocated at that moment.
    """
    software, on_gpu = view.software, view.on_gpu
    states, constant, points = rank_step_points(view)
    moments = _at_moments(points, constant)
    return tuple(_with_runtime(states, parts, software, on_gpu=on_gpu) for parts in moments)


States = tuple[Real, Real]  # weights and optimizer


def _with_runtime(
    states: States, at: Sequence[Real], software: SoftwareProfile, *, on_gpu: bool
) -> MemoryParts:
    """Return all parts at a moment, with memory outside tensors (context, allocator slack)."""
    weights, optimizer = states
    zeros = np.zeros_like(weights)
    parts = MemoryParts(weights - at[4], at[0], optimizer, at[1], at[2], at[3], zeros)
    if not on_gpu:
        return parts
    runtime = software.memory.context_bytes + software.memory.allocator_slack * parts.allocated
    return replace(parts, runtime=runtime)


def _at_moments(points: Sequence[Sequence[StepPoint]], constant: Real) -> list[TransientParts]:
    """Return each moment's largest point, with the constant buffers added."""
    zeros = np.zeros_like(constant)
    buffers: TransientParts = (zeros, zeros, zeros, constant, zeros)
    return [_sum(largest_point(moment), buffers) for moment in points]


def rank_step_points(view: RankView) -> tuple[States, Real, list[list[StepPoint]]]:
    """Return weights and optimizer, constant buffers, and the points of each of ``MOMENTS``.

    Constant buffers: messages between stages and the trainer's own. The points are those at which
    a moment may have its maximum.
    """
    if not view.on_gpu:
        view = view.with_table(without_offload(view.table))
    software, table = view.software, view.table
    live = live_activations(view)
    single = np.where(
        table.pipeline_parallel > 1, 0.0, software.memory.buffer_bytes_without_pipeline
    )
    constant = live.messages + (software.memory.buffer_bytes + single) * view.on_gpu
    update = update_with_copies(view, update_bytes(view))
    update = np.where(table.offloads_optimizer, 0.0, update)
    if software.sharding.blockwise_backward:
        points = _block_points(view, live, update)
    else:
        points = _layer_points(view, live, update)
    points = _with_rows(points, [*wrapper_rows(view), *autocast_rows(view)])
    zeros = np.zeros(len(table))
    return (
        (zeros + total_of(rank_weights(view)), zeros + total_of(optimizer_rows(view))),
        constant,
        points,
    )


def _with_rows(points: list[list[StepPoint]], rows: list[Row]) -> list[list[StepPoint]]:
    """Return the points with the rows that live at each of them, as buffers."""
    if not rows:
        return points
    found = []
    for moment, at in enumerate(points):
        size = sum((row.size for row in rows if row.born <= moment <= row.dies), start=np.zeros(1))
        found.append([replace(p, parts=(*p.parts[:3], p.parts[3] + size, p.parts[4])) for p in at])
    return found


def _gradients(view: RankView, live: LiveActivations) -> Gradients:
    """Return accumulated gradients; with offloaded weights they go straight to the host."""
    gradients = gradients_of(view, live.in_flight + live.pending)
    layer = view.workload.reduction_bytes * view.parameters.largest_layer
    return gradients.where_offloaded(view.table, layer)


def _block_points(view: RankView, live: LiveActivations, update: Real) -> list[list[StepPoint]]:
    """Return the points of a step where blocks are gathered and reduced one by one (FSDP2)."""
    blocks = Blocks.of(view, live.in_flight + live.pending)
    unpacked = None
    if any(w.quantised for kind in view.model.kinds for w in kind.weights):
        unpacked = dequantisation_buffers(view)
    return _by_blocks(blocks, _gradients(view, live), live, unpacked, update)


def _layer_points(view: RankView, live: LiveActivations, update: Real) -> list[list[StepPoint]]:
    """Return the points of other trainers' steps; a layer's backward pass is one point."""
    model, workload, software = view.model, view.workload, view.software
    table, rank, params = view.table, view.rank, view.parameters
    compute = workload.compute_bytes
    matrix, workspace = dequantisation_buffers(view)
    gradients = _gradients(view, live)
    buffers = _buffers(view, live.in_flight + live.pending)
    if software.sharding.flat_parameters:
        whole = units(view)
        buffers = replace(buffers, **flat_buffers(software, table, whole, buffers))
        gradients = replace(gradients, **flat_gradients(software, table, whole, gradients))
    head = head_gradients(view, live.logits_gradient)
    absent: Sequence[Real] = [np.zeros(len(table))] * len(MOMENTS)
    if software.precision.autocasts_weights and compute != workload.master_bytes:
        absent = absent_copies(params, rank, table, compute, tied=model.tie_embeddings)
    return _by_layers(buffers, gradients, live, matrix + workspace, update, head, absent)


def _by_layers(
    buffers: Buffers,
    gradients: Gradients,
    live: LiveActivations,
    unpacked: Real,
    update: Real,
    head_gradient: HeadGradients,
    absent: Sequence[Real],
) -> list[list[StepPoint]]:
    """Return each of ``MOMENTS`` as one sum: a layer's backward pass is one point.

    ``absent``: bytes of weights that do not exist, at each of them.
    """
    zeros = np.zeros_like(live.saved)
    flight, backward = gradients.full_flight, buffers.backward + unpacked + head_gradient.layers
    last = buffers.last_layer + unpacked
    head: list[TransientParts] = [
        (flight, live.saved, logits, np.maximum(buffers.head, fresh), absent[2])
        for fresh, logits in head_gradient.head
    ]
    embedding = np.maximum(buffers.embedding, head_gradient.embedding)
    later = live.saved_later + live.working
    moments: list[list[TransientParts]] = [
        [(flight, live.saved, live.logits_forward, buffers.loss_forward, absent[0])],
        [(flight, live.saved, live.logits_backward, buffers.loss_backward, absent[1])],
        head,
        [(flight, live.saved + live.working, zeros, backward, absent[3])],
        [(gradients.later, later, live.logits_later, backward, absent[4])],
        [(gradients.last_layer, live.last_layer, zeros, last + head_gradient.layers, absent[5])],
        [(gradients.embedding, zeros, zeros, embedding, absent[6])],
        [(gradients.reduced, zeros, zeros, zeros + update, absent[7])],
    ]
    return [[StepPoint(parts) for parts in points] for points in moments]


def _by_blocks(
    blocks: Blocks,
    gradients: Gradients,
    live: LiveActivations,
    unpacked: tuple[Real, Real] | None,
    update: Real,
) -> list[list[StepPoint]]:
    """Return the points of each of ``MOMENTS``."""
    zeros = np.zeros_like(live.saved)
    flight, later = gradients.full_flight, replace(live, saved=live.saved_later)
    backward = blocks.backward(live, unpacked)
    losses = (
        (live.logits_forward, blocks.at_loss_forward()),
        (live.logits_backward, blocks.at_loss_backward()),
    )
    return [
        *(
            [
                StepPoint((now, saved, logits, buffers, zeros))
                for now, saved in blocks.at_loss(flight, live)
            ]
            for logits, buffers in losses
        ),
        blocks.at_head(flight, live),
        blocks.at_layer(flight, live, zeros, backward),
        [
            *blocks.at_layer(gradients.later, later, live.logits_later, backward),
            blocks.at_embedding_of_others(gradients.later, later),
        ],
        blocks.at_last_layer(gradients.last_layer, live, unpacked),
        blocks.at_embedding(gradients.embedding),
        [StepPoint((gradients.reduced, zeros, zeros, zeros + update, blocks.all_freed()))],
    ]


def _sum(one: TransientParts, other: TransientParts) -> TransientParts:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def rank_host_bytes(view: RankView) -> HostBytes:
    """Bytes of one rank in host memory and on drives; 0 where the accelerator is the host."""
    workload, table = view.workload, view.table
    zeros = np.zeros(len(table))
    paged = OPTIMIZER_TRAITS[workload.optimizer].paged
    if not view.on_gpu or not (paged or np.any(table.offload > 0)):
        return HostBytes(zeros, zeros)
    states = _states(view)
    live = live_activations(view)
    return offloaded_bytes(
        workload,
        table,
        updated_elements(view),
        states.resident + states.paged,
        states.paged,
        live.offloaded,
    )


def _states(view: RankView) -> StateBytes:
    """Bytes of optimizer states: k s a parameter, or tensor by tensor where these differ."""
    workload = view.workload
    rule = OPTIMIZER_TRAITS[workload.optimizer]
    if rule.is_uniform and not rule.paged:
        each = workload.state_bytes * rule.states
        return StateBytes(each * updated_elements(view), np.zeros(len(view.table)))
    return rank_states(view)


class Buffers(Struct, frozen=True):
    """Bytes of gathered weights and of gradients being reduced, at the moments of ``MOMENTS``."""

    loss_forward: Real
    loss_backward: Real
    head: Real
    backward: Real
    last_layer: Real
    embedding: Real


def _buffers(view: RankView, in_flight: Real) -> Buffers:
    """Bytes of FSDP2's buffers; a block is a layer, the embedding, or norm and head.

        gathered   c P_block under ZeRO-3; one more copy while it is gathered
        reducing   (c + g) P_block: the gradient, and its copy in the precision of the reduction
        left over  g P_block of the block that was reduced last, until the next reduction (torch
                   2.13, FSDPCommContext.reduce_scatter_state)

    Under ZeRO 0 and 1 reduction starts with the last micro-batch, when only one is in flight.
    """
    params = view.parameters
    workload, table, rank = view.workload, view.table, view.rank
    compute, reduction = workload.compute_bytes, workload.reduction_bytes
    if not view.software.gradients.in_master_precision:
        reduction = workload.gradient_bytes(in_master_precision=False)
    whole = gathered_bytes(workload, view.software)
    zero, sharded = table.zero_stage, table.zero_stage >= 1
    every = zero >= 2
    last_block = params.embedding if rank.first else params.largest_layer
    several = by_value(table.num_microbatches > 1)
    left_over = np.where(every & several, reduction * last_block, 0.0)
    head, mixed = params.head, compute != workload.master_bytes
    unreduced = (table.expert_shard_ranks <= 1) & (not mixed)  # experts of one rank
    layer = params.largest_layer - np.where(unreduced, params.expert_layer, 0.0)
    gathering = np.where(
        zero >= 3,
        2.0 * head,
        np.where(sharded & np.logical_not(several), head, 0.0),
    )
    gathered = np.where(zero >= 3, whole + gathering_buffer(table), 0.0)
    reduced = reducing_buffer(reduction, table)
    own = np.where(zero >= 3, whole, compute)
    reducing = np.where(sharded, own + reduced, compute if mixed else 0.0)
    now = every | by_value(in_flight <= 1.0)
    # before accumulation: a layer's gradient in compute precision (FSDP), or those of the two
    # matrices that share an input
    copied = mixed | (table.shard_ranks > 1)
    added = np.where(several, compute * params.largest_pair, 0.0)
    fresh = np.where(copied, compute * layer if mixed else 0.0, added)
    reducing_layer = np.where(now, (gathered + reducing) * layer, 0.0)
    # late weight gradients are reduced while others are still pending: the copy in the precision of
    # the reduction, and its result next to the accumulated gradient
    ranks = np.where(sharded, np.multiply(1.0, table.shard_ranks), 1.0)
    split = np.isin(table.pipeline_schedule, SPLIT_CODES) & (table.pipeline_parallel > 1)
    at_end = np.where(split & copied, reduction * (1.0 + 1.0 / ranks) + compute * mixed, 0.0)
    return Buffers(
        loss_forward=own * gathering + left_over,
        loss_backward=gathered * (head + layer) + left_over,
        head=np.where(now, (gathered + reducing) * head + gathered * layer * (head > 0.0), 0.0),
        backward=np.maximum(reducing_layer, fresh),
        last_layer=np.maximum(np.maximum(gathered + reducing, at_end) * layer, fresh),
        embedding=reducing * params.embedding,
    )
