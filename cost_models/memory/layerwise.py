"""Points of a step of trainers other than FSDP2: a layer's backward pass is one point.

A block is a layer, the embedding, or norm and head:

    gathered   c P_block under ZeRO-3; one more copy while it is gathered
    reducing   (c + r) P_block: the gradient, and its copy in the precision of the reduction; where
               one buffer of all gradients is reduced in place, c of two matrices of a layer, of
               the embedding, or of the head, before they are added to it (NVIDIA/Megatron-LM:
               megatron/core/distributed/distributed_data_parallel.py, _make_backward_post_hook)
    left over  r P_block of the block that was reduced last, until the next reduction (torch 2.13,
               FSDPCommContext.reduce_scatter_state)

Frozen weights are gathered with the adapters of their block (``_gathered_frozen``), but under
DeepSpeed, which counts what stays gathered (``wrapper_buffers``), and FSDP1 (``fsdp.fsdp1``).

Under ZeRO 0 and 1 reduction starts with the last micro-batch, when only one is in flight.
Units: bytes; rows of the ledger, columns of a plan table.
"""

from __future__ import annotations

import numpy as np

from cost_models.activations.live import LiveActivations
from cost_models.arrays import Flag, Real, among
from cost_models.columnar.columns import by_value
from cost_models.communication.zero_plus_plus import gathering_buffer, reducing_buffer
from cost_models.memory.autocast_copies import absent_copies, gathered_bytes
from cost_models.memory.fsdp.fsdp1 import flat_buffers, flat_gradients, units
from cost_models.memory.gradients import gradients_of
from cost_models.memory.head_gradients import head_gradients
from cost_models.memory.ledger import MOMENTS, Item, Point, added, either, most, product
from cost_models.memory.saved_tensors import activation, logits, saved_rows
from cost_models.model.lora import frozen_part, has_frozen
from cost_models.partition.frozen_weights import (
    dequantisation_buffers,
    kept_unpacked_bytes,
    sharded_bytes,
    shards_frozen,
)
from cost_models.partition.rank_parameters import rank_parameters
from cost_models.partition.rank_view import RankView
from cost_models.partition.schedules import SPLIT_CODES


def layer_points(view: RankView, live: LiveActivations, update: Item) -> list[list[Point]]:
    """Return the points of each of ``MOMENTS``; ``update``: temporary tensors of the optimizer."""
    workload, software, table = view.workload, view.software, view.table
    gradients, buffers = gradients_of(view, live.in_flight + live.pending), _buffers(view, live)
    if software.sharding.flat_parameters:
        whole = units(view)
        buffers = flat_buffers(software, table, whole, buffers)
        gradients = flat_gradients(software, table, whole, gradients)
    elif has_frozen(view.model) and not software.sharding.live_elements:
        frozen = _gathered_frozen(view)
        buffers = {
            at: added(rows, frozen[at]) if at in frozen else rows for at, rows in buffers.items()
        }
    matrix, workspace = dequantisation_buffers(view)
    unpacked = Item("buffers", "dequantised matrix", matrix + workspace, formula="c · P_matrix")
    others = Item("buffers", "dequantised matrices of other layers", kept_unpacked_bytes(view))
    head = head_gradients(view, live.logits_gradient)
    saved, before_later = added(*saved_rows(live)), saved_rows(live, 1.0)[0]
    working = activation("gradients and recomputed tensors of a layer", live.working)
    last_layer = activation("the backward pass of the only layer left", live.last_layer)
    losses = [
        logits("logits and copies", live.logits_forward),
        logits("logits, their gradient and copies", live.logits_backward),
        logits("logits, their gradient and copies", live.logits_later),
    ]
    flight, layer = gradients.full_flight, (buffers["backward"], unpacked, head.layers)
    moments: list[list[tuple[Item, ...]]] = [
        [(flight, saved, losses[0], buffers["loss_forward"], others)],
        [(flight, saved, losses[1], buffers["loss_backward"], others)],
        [(flight, saved, rest, most(buffers["head"], fresh), others) for fresh, rest in head.head],
        [(flight, saved, working, *layer, others)],
        [(gradients.later, before_later, working, losses[2], *layer, others)],
        [(gradients.last_layer, last_layer, buffers["last_layer"], unpacked, head.layers)],
        [(gradients.embedding, most(buffers["embedding"], head.embedding))],
        [(gradients.reduced, update)],
    ]
    absent: list[tuple[Item, ...]] = [()] * len(MOMENTS)
    if software.precision.autocasts_weights and workload.compute_bytes != workload.master_bytes:
        each, name = ("−c", -workload.compute_bytes, "bytes"), "16-bit copies that do not exist"
        missing = absent_copies(view, view.parameters)
        absent = [(product("weights", name, each, ("P", n, "parameters")),) for n in missing]
    return [
        [Point(rows + none) for rows in points]
        for points, none in zip(moments, absent, strict=True)
    ]


def _buffers(view: RankView, live: LiveActivations) -> dict[str, Item]:
    """Return the rows of gathered weights and of gradients being reduced, by moment."""
    params, workload, table, rank = view.parameters, view.workload, view.table, view.rank
    software, compute, reduction = view.software, workload.compute_bytes, view.reduction_bytes
    if not software.gradients.in_master_precision:
        reduction = workload.gradient_bytes(in_master_precision=False)
    whole = gathered_bytes(workload, software)
    zero_3, sharded, every = table.zero_stage >= 3, table.zero_stage >= 1, table.zero_stage >= 2
    last_block = np.where(rank.first, params.embedding, params.largest_layer)
    several = by_value(table.num_microbatches > 1)
    head, mixed = params.head, compute != workload.master_bytes
    unreduced = (table.expert_shard_ranks <= 1) & (not mixed)  # experts of one rank
    layer = params.largest_layer - np.where(unreduced, params.expert_layer, 0.0)
    gathered = np.where(zero_3, whole + gathering_buffer(table), 0.0)
    own = np.where(zero_3, whole, compute)
    reducing: Real = np.where(sharded, own + reducing_buffer(reduction, table), compute * mixed)
    of_layer = reducing
    if in_place := software.gradients.whole_buffer:
        reducing, of_layer = compute * mixed, 0.0
    now = every | by_value(live.in_flight + live.pending <= 1.0)
    copied = mixed | (table.shard_ranks > 1)
    # late weight gradients are reduced while others are still pending: the copy in the precision of
    # the reduction, and its result next to the accumulated gradient
    ranks = np.where(sharded, np.multiply(1.0, table.shard_ranks), 1.0)
    split = among(table.pipeline_schedule, SPLIT_CODES) & (table.pipeline_parallel > 1)
    at_end = np.where(split & copied, reduction * (1.0 + 1.0 / ranks) + compute * mixed, 0.0)
    gathering = np.where(zero_3, 2.0, np.where(sharded & np.logical_not(several), 1.0, 0.0))
    left_over = _block("left over from a reduction", "r", reduction, every & several, last_block)
    # before accumulation: a layer's gradient in compute precision (FSDP), or those of the two
    # matrices that share an input
    fresh = either(
        copied & (not in_place),
        _block("weight gradients of a layer", "c", compute * mixed, True, layer),
        _block(
            "weight gradients of two matrices",
            "c",
            compute,
            several | in_place,
            params.largest_pair,
        ),
    )
    both = _block("layer, gathered and reduced", "c + c + r", gathered + of_layer, True, layer)
    pending = _block("late weight gradients", "c + r + r/d", at_end, True, layer)
    prefetched = _block("gathered layer", "c", gathered, head > 0.0, layer)
    reduced = _block("head, gathered and reduced", "c + c + r", gathered + reducing, True, head)
    alone = _block("gathered head", "c", own * gathering, True, head)
    ahead = _block("gathered head and layer", "c", gathered, True, head + layer)
    return {
        "loss_forward": added(alone, left_over),
        "loss_backward": added(ahead, left_over),
        "head": either(now, added(reduced, prefetched)),
        "backward": most(either(now, both), fresh),
        "last_layer": most(most(both, pending), fresh),
        "embedding": _block("reduced embedding", "c + r", reducing, True, params.embedding),
    }


def _gathered_frozen(view: RankView) -> dict[str, Item]:
    """Return the rows of frozen weights that ZeRO-3 gathers beside a block's adapters, by moment.

    loss             2 c P_head, then head and layer
    backward pass    2 (c P_layer + s N_layer)     s N: quantised matrices as they are stored
    """
    table, exists = view.table, shards_frozen(view) & (view.table.shard_ranks > 1)
    plain, packed = (
        rank_parameters(frozen_part(view.model, quantised=each), view.rank, table)
        for each in (False, True)
    )
    stored = sharded_bytes(view) * packed.largest_layer
    layer = np.where(exists, view.compute_bytes * plain.largest_layer + stored, 0.0)
    head = np.where(exists, view.compute_bytes * plain.head, 0.0)

    def rows(heads: float, layers: float) -> Item:
        size = heads * head + layers * layer
        formula = f"{heads:g} · c · P_head + {layers:g} · a layer's bytes"
        return Item("buffers", "gathered frozen weights", size, formula=formula)

    both, layers = rows(1.0, 1.0), rows(0.0, 2.0)
    return {
        "loss_forward": rows(2.0, 0.0),
        "loss_backward": both,
        "head": both,
        "backward": layers,
        "last_layer": layers,
    }


def _block(name: str, symbol: str, each: Real, exists: Flag, elements: Real) -> Item:
    """Return bytes of each element of a block, under the plans where it exists."""
    size = elements if exists is True else np.where(exists, elements, 0.0)
    return product("buffers", name, (symbol, each, "bytes"), ("P_block", size, "parameters"))
