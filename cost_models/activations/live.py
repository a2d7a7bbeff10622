"""Activations that a pipeline rank holds: its layers in flight, the head, the messages.

Units: bytes. Columns of a plan table whose rows share the stages (``estimate``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from cost_models.activations.document_masks import mask_bytes, masked_key_bytes
from cost_models.activations.embedding_and_head import (
    embedding_bytes_per_token,
    head_bytes_per_token,
    head_gradient_bytes_per_token,
    head_norm_bytes_per_token,
    head_walk_bytes_per_token,
    rotary_table_bytes,
    window_mask_bytes,
)
from cost_models.activations.encoder_decoder import (
    positions_gradient_bytes,
    shared_bytes_per_token,
    walk_bytes_per_token,
)
from cost_models.activations.fp8 import fp8_regions
from cost_models.activations.frozen_layers import of_frozen_layer, sharded_input_bytes
from cost_models.activations.layer_backward import places
from cost_models.activations.saved import (
    Regions,
    backward_working_bytes_per_token,
    due_bytes_per_token,
    feed_forward_bytes,
    layer_regions,
    norm_bytes,
    saved_bytes_per_token,
    saves_input,
)
from cost_models.activations.selective_ops import kept_results
from cost_models.activations.stage_messages import messages
from cost_models.arrays import Count, Real, pick
from cost_models.communication.context_parallel import (
    context_buffer_bytes_per_token,
    is_blockwise,
    ulysses_saved_bytes,
)
from cost_models.model.lora import trainable_part
from cost_models.model.spec import LayerKind, ModelSpec
from cost_models.partition.in_flight import in_flight_peaks, weight_gradients_pending_at_end
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import FULL, GPIPE, NONE, SELECTIVE, SELECTIVE_OPS, PlanTable
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import SoftwareProfile

TOKEN_ID_BYTES: Final = 8.0  # int64 inputs and labels


@dataclass(frozen=True, slots=True)
class Walk:
    """Bytes added at one point of a layer's backward pass (see ``layer_backward``)."""

    beside: Real  # to what all layers save
    alone: Real  # to what all ranks' other layers have left: nothing
    shared: Real  # of these, once a layer of its stack is done: the gradient of its positions
    gradients: Real  # elements of weight gradients of this layer that are there
    kept: Real  # that such a layer had saved, recomputed or not
    product: Real  # of these beside, where a matrix was unpacked for it; less than 0: none was
    experts: str  # state of those that others share than the rest, see ``layer_backward``
    complete: bool  # the layer is done, and its gradients are reduced now
    kind: int = 0  # of the model's kinds
    again: bool = False  # of a layer that is recomputed, if the plan recomputes

    def unpacked(self, used: tuple[Real, Real] | None) -> Real:
        """Bytes of a matrix that is unpacked here; its product comes when what helped has gone."""
        if used is None:
            return 0.0
        matrix, helping = used
        there = matrix + np.maximum(helping - self.product, 0.0)
        return np.where(np.less(self.product, 0.0), 0.0, there)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of activations of one pipeline rank."""

    in_flight: Real  # micro-batches, counted by the rank's layers
    due: Real  # micro-batches whose weight gradients are still to come
    due_bytes: Real  # of ``saved``, the operands of these
    saved: Real  # by layers and head of all micro-batches in flight, logits of finished heads too
    saved_later: Real  # one micro-batch less
    stage: Real  # of ``saved``, by all layers of one of the rank's stages for one micro-batch
    working: Real  # one layer on its way backward: gradients, and what is recomputed
    last_layer: Real  # the same, and what that layer saved: all that is left at the end
    walks: tuple[Walk, ...]  # our executor's: place by place
    # that go with a layer of each kind, and with a recomputed one; where layers differ in size
    kept: tuple[tuple[Real, Real], ...]
    head_walk: Real  # the projection on its way backward
    head_norm: Real  # the last norm on its way backward
    head_gradient: Real  # what both give to the layers: the gradient of their input
    tail: Real  # of ``saved``, by the head: gone before the layers
    logits_forward: Real  # of the micro-batch that is at the loss
    logits_backward: Real
    logits_gradient: Real  # of the same, once its own backward pass is over
    logits_later: Real  # at the loss of the next one, where the first's layers are already gone
    messages: Real  # between stages
    offloaded: Real  # of layers, in host memory


def held_activations(view: RankView) -> Held:
    """Return what a pipeline rank holds while it is fullest; sources: ``activations``."""
    model, workload, software = view.model, view.workload, view.software
    table, rank = view.table, view.rank
    tokens = view.tokens
    layers, due, working, last_layer, largest, walks, by_kind = _layers(view)
    # the last layer on its way backward still keeps all of its own
    behind = rank.num_stages / np.maximum(rank.num_stages, sum(rank.kind_counts))
    moments = []
    for number, (flying, owed) in enumerate(in_flight_peaks(table, rank)):
        shift = np.where(owed > 0, behind * (number > 0), 0.0)
        moments.append(((flying + shift) / rank.num_stages, (owed - shift) / rank.num_stages))
    fullest = np.argmax(np.stack([layers * f + due * d for f, d in moments]), axis=0)
    in_flight = pick([f for f, _ in moments], fullest)
    late = pick([d for _, d in moments], fullest)
    ids = 2.0 * TOKEN_ID_BYTES
    tail, kept, forward, backward = head_bytes_per_token(view)
    # at the head of a pipeline that runs all forward passes first, every micro-batch waits
    waiting = np.where(
        (table.pipeline_schedule == GPIPE) & (table.pipeline_parallel > 1), in_flight, 1.0
    )
    rows = np.where(workload.document_mask, table.micro_batch_size, 1.0)
    tables = rotary_table_bytes(model, workload) * rows / table.context_parallel
    masks = mask_bytes(view)
    tables = (tables + np.where(is_blockwise(table), 0.0, masks)) * in_flight * table.virtual_stages
    masks = window_mask_bytes(model, workload, software)
    tables = tables + np.where(is_blockwise(table), 0.0, masks)  # blocks make their own, one by one
    one_less = np.maximum(in_flight - 1.0, 0.0)
    flying, flying_later = layers * in_flight, layers * one_less
    # offloaded: the layer that runs, and the one before on its way to the host
    here = np.where(table.offloads_activations, 2.0 * largest, np.inf)
    away = flying - np.minimum(flying, here)
    flying, flying_later = np.minimum(flying, here), np.minimum(flying_later, here)
    shared = shared_bytes_per_token(view)
    shared = shared + embedding_bytes_per_token(view)
    flying, flying_later = flying + shared * in_flight, flying_later + shared * one_less
    saved = flying + due * late + (tail + ids) * waiting + kept * (waiting - 1.0)
    saved_later = flying_later + due * late + (tail + ids + kept) * np.maximum(waiting - 1.0, 0.0)
    arrived = messages(view, in_flight)
    return Held(
        in_flight=in_flight,
        due=late,
        due_bytes=due * late * tokens,
        saved=saved * tokens + tables,
        saved_later=saved_later * tokens + tables,
        # offloaded they are not here
        stage=np.where(table.offloads_activations, 0.0, layers * tokens / rank.num_stages),
        working=working * tokens,
        walks=tuple(
            replace(
                walk,
                beside=walk.beside * tokens,
                alone=(walk.alone + shared) * tokens,
                shared=walk.shared * tokens,
                kept=walk.kept * tokens,
                product=walk.product * tokens,
            )
            for walk in walks
        ),
        kept=tuple((every * tokens, left * tokens) for every, left in by_kind),
        head_walk=head_walk_bytes_per_token(view) * tokens,
        head_norm=head_norm_bytes_per_token(view) * tokens,
        head_gradient=head_gradient_bytes_per_token(view) * tokens,
        tail=tail * tokens,
        last_layer=(
            np.maximum(last_layer, due * weight_gradients_pending_at_end(table, rank)) + shared
        )
        * tokens,
        logits_forward=forward * tokens,
        logits_backward=backward * tokens,
        logits_gradient=kept * tokens,
        logits_later=np.where(waiting > 1.0, (backward - kept) * tokens, 0.0),
        messages=arrived * tokens,
        offloaded=away * tokens,
    )


def _layers(
    view: RankView,
) -> tuple[Real, Real, Real, Real, Real, list[Walk], list[tuple[Real, Real]]]:
    """Return bytes a token of a rank's layers.

    Saved for the backward pass; kept for their weight gradients; added by one on its way backward;
    by that one alone; saved by the largest; our executor's way back, place by place; what goes with
    a layer of each kind that is done, and with one that is recomputed.
    """
    model, workload, software = view.model, view.workload, view.software
    table, rank = view.table, view.rank
    compute = workload.compute_bytes
    saved: Real = np.zeros(len(table))
    due: Real = np.zeros(len(table))
    working: Real = np.zeros(len(table))
    alone: Real = np.zeros(len(table))
    repeated: Real = np.zeros(len(table))  # as ``working``, of layers that are recomputed
    done_before: Real = np.zeros(len(table))
    largest: Real = np.zeros(len(table))
    copies: Real = np.zeros(len(table))
    walks: list[Walk] = []
    again_walks: list[Walk] = []  # of layers that are recomputed
    by_kind: list[tuple[Real, Real]] = [(0.0, 0.0)] * len(model.kinds)
    counts = zip(
        range(len(model.kinds)),
        rank.kind_counts,
        rank.recomputed,
        rank.after_recomputed,
        model.kinds,
        trainable_part(model).kinds,
        strict=True,
    )
    for number, count, recomputed, behind, kind, trained in counts:
        if not count or kind.forward_only:
            continue
        regions = _regions(model, workload, software, table, kind)
        everything = _saved(model, compute, software, table, regions, NONE)
        left = _saved(model, compute, software, table, regions, table.recompute)
        full = table.recompute == FULL
        left = left + software.activations.layer_input_extra_bytes * model.hidden_size * full
        # copies that come while later layers are walked backward
        copies = copies + count * sharded_input_bytes(model, compute, software, table)
        saved = saved + recomputed * left + (count - recomputed) * everything
        if rank.layer_neighbours:  # offloaded it had left already
            away = table.offloads_activations
            by_kind[number] = np.where(away, 0.0, everything), np.where(away, 0.0, left)
        largest = np.maximum(largest, left * (recomputed > 0))
        largest = np.maximum(largest, everything * (recomputed < count))
        # by the time a stage's first recomputed layer is reached those behind it are done
        done_before = done_before + behind * everything / rank.num_stages
        due = due + count * due_bytes_per_token(
            kind,
            regions,
            model.hidden_size,
            compute,
            table.tensor_parallel,
            table.sequence_parallel,
        )
        whole = everything
        if kind.norms_after:  # walked before the MLP is
            along = view.sequence_shards
            whole = whole - norm_bytes(kind, model.hidden_size, compute, software) / along
        wide = backward_working_bytes_per_token(
            kind, model.hidden_size, compute, table.tensor_parallel, software
        )
        # the walk through the attention holds what travels between the ranks; the MLP is done then
        done = feed_forward_bytes(kind.feed_forward, compute, software)
        exchange = context_buffer_bytes_per_token(kind.attention, compute, table)[1]
        exchange = exchange - done / table.tensor_parallel
        walk: Real = np.maximum(wide, exchange + compute * 3.0 * model.hidden_size)
        walk = walk_bytes_per_token(kind, model.hidden_size, workload, table, walk, done)
        # what was dropped is there again while its layer is walked backward
        kept = _saved(model, compute, software, table, regions, SELECTIVE)
        dropped = np.where(table.recompute == SELECTIVE, whole - kept, 0.0)
        again = np.where(table.recompute == FULL, whole, dropped)
        # what was kept beside the input is given out once, and freed where nothing saves it
        inputs = _saved(model, compute, software, table, regions, FULL)
        rest = np.maximum(0.0, whole - (left - inputs))
        again = np.where(table.recompute == SELECTIVE_OPS, rest, again)
        repeated = np.maximum(repeated, (again + walk) * (recomputed > 0))
        working = np.maximum(working, walk * (recomputed < count))
        alone = np.maximum(alone, whole + walk)
        if not software.sharding.blockwise_backward:
            continue
        core = np.where(table.recompute == SELECTIVE, everything - kept, 0.0)
        core = core / (1.0 if kind.cross_attention is None else 2.0)
        # the input that stayed is the one that the layer saves
        anew = everything - saves_input(kind, compute) * inputs
        shared = positions_gradient_bytes(kind, workload, table)
        for place in places(model, kind, trained, everything, workload, software, table):
            there = place.working - place.freed
            ends = (place.product, place.experts, place.done)
            way = Walk(
                there, everything + there, shared, place.gradients, everything, *ends, number, False
            )
            walks += [way] if recomputed < count else []
            again = np.where(table.recompute == FULL, anew, core * place.has_core)
            again = np.where(table.recompute == SELECTIVE_OPS, rest, again)
            if recomputed:
                again_walks += [replace(way, beside=again + there, kept=left, again=True)]
    # offloaded, the layers behind it had left already
    done_before = np.where(table.offloads_activations, 0.0, done_before)
    working = np.maximum(working, repeated - done_before) + copies
    if rank.layer_neighbours:  # what is done before a layer is told from its place
        walks += again_walks
    else:
        walks += [replace(walk, beside=walk.beside - done_before) for walk in again_walks]
    if not walks:  # no layer is walked back
        none = np.zeros(len(table))
        walks = [Walk(none, none, none, none, none, none - 1.0, "reduced", False)]
    return saved, due, working, alone + copies, largest, walks, by_kind


def layer_bytes(view: RankView) -> Real:
    """Bytes that all layers of a rank save for the backward pass of one micro-batch."""
    return _layers(view)[0] * view.tokens


def _regions(
    model: ModelSpec,
    workload: Workload,
    software: SoftwareProfile,
    table: PlanTable,
    kind: LayerKind,
) -> Regions:
    regions = layer_regions(
        kind,
        model.hidden_size,
        workload.seq_len,
        compute_bytes=workload.compute_bytes,
        kernel=workload.attention_kernel,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        software=software,
        blockwise=is_blockwise(table),
    )
    if workload.precision == "fp8":
        regions = fp8_regions(regions, kind, model.hidden_size, workload.compute_bytes)
    more = ulysses_saved_bytes(kind.attention, workload.compute_bytes, table)
    masked = masked_key_bytes(kind.attention, workload, software)
    # of all tensor-parallel ranks, as the others
    more = more * table.tensor_parallel + np.where(is_blockwise(table), 0.0, masked)
    if workload.attention_kernel == "eager":  # keys and values of every query head
        each = kind.attention.head_dim + kind.attention.value_head_dim
        groups = max(0, kind.attention.num_heads - kind.attention.num_kv_heads)
        repeated = workload.compute_bytes * groups * each * (not software.activations.repeats_keys)
        more = more + np.where(is_blockwise(table), 0.0, repeated)
    regions = replace(regions, split=regions.split + more, core=regions.core + more)
    regions = of_frozen_layer(regions, kind, model.hidden_size, workload.compute_bytes, software)
    if not np.any(table.recompute == SELECTIVE_OPS):
        return regions
    split, along, whole = kept_results(model, workload, table, kind)
    return replace(regions, results_split=split, results_along=along, results_whole=whole)


def _saved(
    model: ModelSpec,
    compute_bytes: float,
    software: SoftwareProfile,
    table: PlanTable,
    regions: Regions,
    recompute: Count,
) -> Real:
    return saved_bytes_per_token(
        regions,
        model.hidden_size,
        compute_bytes=compute_bytes,
        tensor_parallel=table.tensor_parallel,
        sequence_parallel=table.sequence_parallel,
        recompute=recompute,
        keeps_gathered_inputs=software.activations.keeps_gathered_inputs,
        expert_tensor=table.expert_tensor,
    )
