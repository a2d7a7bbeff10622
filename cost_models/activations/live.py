"""Live activations of a pipeline rank: layers of micro-batches in flight, the head, messages.

Symbols   c compute_bytes   h hidden_size   a, k query and key/value heads   d, e sizes of a head
Units     bytes; names that end in ``per_token`` and private functions: bytes a token of one
          micro-batch. Columns of a plan table whose rows share the stages (``estimate``).

Leaves out: blocks that the allocator rounds up or has not reused (``memory.allocator``).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from cost_models.activations.document_masks import mask_bytes
from cost_models.activations.embedding_and_head import (
    embedding_bytes_per_token,
    head_backward_bytes_per_token,
    head_bytes_per_token,
    head_gradient_bytes_per_token,
    head_norm_bytes_per_token,
    rotary_table_bytes,
    window_mask_bytes,
)
from cost_models.activations.encoder_decoder import shared_bytes_per_token
from cost_models.activations.frozen_layers import kept_input_bytes
from cost_models.activations.layer import (
    LayerBackward,
    freed_with_layer,
    layer_activations,
    plain_backward,
    where_exists,
    with_recomputation,
)
from cost_models.activations.operators import saves_input
from cost_models.arrays import Real, among, holds, pick
from cost_models.communication.context_parallel import is_blockwise
from cost_models.model.lora import trainable_part
from cost_models.partition.in_flight import (
    in_flight_peaks,
    overlapped_exchange_stages,
    weight_gradients_pending_at_end,
)
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import GPIPE, ONE_F_ONE_B
from cost_models.plan.recompute import FULL, by_operator

TOKEN_ID_BYTES: Final = 8.0  # int64 inputs, and labels


class SavedByLayers(Struct, frozen=True):
    """Layers of a kind whose tensors are saved alike."""

    count: Real
    per_token: Real  # bytes that one of them saves
    recomputed: bool  # if the plan recomputes


class LiveActivations(Struct, frozen=True):
    """Bytes of activations of one pipeline rank when most micro-batches are in flight.

    ``memory.saved_tensors`` lists those that layers and head have saved.
    """

    tokens: Real  # of a micro-batch
    in_flight: Real  # micro-batches, counted by the rank's layers
    at_head: Real  # micro-batches whose head has run
    pending: Real  # micro-batches whose weight gradients are pending
    layers: tuple[SavedByLayers, ...]
    on_device: Real | None  # offloaded: layers that a backward pass finds (``_layers_on_device``)
    in_transfer: Real  # offloaded: the layer that runs forward, and the previous one
    shared_per_token: Real  # kept for all layers, of each micro-batch in flight
    operands_per_token: Real  # of pending weight gradients, of each micro-batch
    tables: Real  # rotary tables and masks of all micro-batches in flight
    stage: Real  # saved by all layers of one of the rank's stages for one micro-batch
    working: Real  # of one layer's backward pass: gradients, and recomputed tensors
    last_layer: Real  # ``working`` and saved tensors of the layer whose backward pass is the last
    layer_backward: tuple[LayerBackward, ...]  # points of it, where blocks are sharded one by one
    # bytes freed with a layer of each kind, and with a recomputed one; where layers differ in size
    saved_by_kind: tuple[tuple[Real, Real], ...]
    head_backward: Real  # of the output projection's backward pass
    head_norm: Real  # of the last norm's backward pass
    head_gradient: Real  # gradient of the head's input, which the layers receive
    head_per_token: Real  # saved by the head, until the layers' backward pass
    ids_per_token: Real  # of tokens and labels
    logits_forward: Real  # of the micro-batch at the loss
    logits_backward: Real
    logits_gradient: Real  # of the same, after its backward pass
    logits_later: Real  # at the loss of the next one, when the first one's layers are freed
    messages: Real  # between stages
    offloaded: Real  # of layers, in host memory


def live_activations(view: RankView) -> LiveActivations:
    """Return the activations of a pipeline rank at its peak, in bytes.

    Sources: the modules of ``activations``, term by term.
    """
    table, rank, tokens, head = view.table, view.rank, view.tokens, view.at_head
    layers = _layers(view)
    in_flight, pending = _at_peak(view, layers)
    head_saved, kept, forward, backward = head_bytes_per_token(head)
    # GPipe's last stage runs all forward passes before the first loss is differentiated
    waiting = np.where(
        (table.pipeline_schedule == GPIPE) & (table.pipeline_parallel > 1), in_flight, 1.0
    )
    offloaded, on_device, in_transfer = np.zeros(len(table)), None, np.zeros(len(table))
    if holds(moved := table.offloads_activations):
        in_transfer = np.where(moved, _in_transfer(view, layers) * tokens, 0.0)
        on_device = np.where(moved, _layers_on_device(view) * layers.largest * tokens, np.inf)
        offloaded = np.where(moved, layers.saved * in_flight * tokens, 0.0)
    shared = shared_bytes_per_token(view) + embedding_bytes_per_token(view)
    at_end = layers.operands * weight_gradients_pending_at_end(table, rank)
    return LiveActivations(
        tokens=tokens,
        in_flight=in_flight,
        at_head=waiting,
        pending=pending,
        layers=tuple(layers.kinds),
        on_device=on_device,
        in_transfer=in_transfer,
        # what a frozen embedding spares the first layer; offloaded, that layer has left the device
        shared_per_token=np.where(table.offloads_activations, np.maximum(shared, 0.0), shared),
        operands_per_token=layers.operands,
        tables=_table_bytes(view, in_flight),
        # offloaded tensors are not on the device
        stage=np.where(table.offloads_activations, 0.0, layers.saved * tokens / rank.num_stages),
        working=layers.working * tokens,
        layer_backward=tuple(each.of_tokens(tokens, shared) for each in layers.backward),
        saved_by_kind=tuple((saved * tokens, left * tokens) for saved, left in layers.by_kind),
        head_backward=head_backward_bytes_per_token(head) * head.tokens,
        head_norm=head_norm_bytes_per_token(head) * head.tokens,
        head_gradient=head_gradient_bytes_per_token(head) * head.tokens,
        head_per_token=view.model.target_share * head_saved,
        ids_per_token=TOKEN_ID_BYTES * (1.0 + view.model.target_share),
        last_layer=(np.maximum(layers.alone, at_end) + shared) * tokens,
        logits_forward=forward * head.tokens,
        logits_backward=backward * head.tokens,
        logits_gradient=kept * head.tokens,
        logits_later=np.where(waiting > 1.0, (backward - kept) * head.tokens, 0.0),
        messages=messages(view, in_flight) * tokens,
        offloaded=offloaded,
    )


def _layers_on_device(view: RankView) -> float:
    """Return the layers whose offloaded tensors are on the device during a backward pass.

    The running one, whose copies are waited for, or the next one, too. Of trainers whose steps were
    not traced: two. Source: executor/ops/offload_activations.py.
    """
    software = view.software
    alone = software.sharding.blockwise_backward and not software.overlap.activation_prefetch
    return 1.0 if alone else 2.0


def _in_transfer(view: RankView, layers: _RankBytes) -> Real:
    """Bytes a token at the end of a layer's forward pass while the previous layer is copied.

    What both saved, and of the running one its input, the sum with attention's result, the MLP's
    result and their sum: 4 c h. Of k routed experts: also their weighted results, k w h, and the
    sum of these, w h, in fp32 or in compute precision.
    """
    compute, mlps = view.workload.compute_bytes, (kind.feed_forward for kind in view.model.kinds)
    passing = max(
        3.0 * compute + (4.0 if mlp.weighted_in_fp32 else compute) * (mlp.experts_per_token + 1.0)
        if mlp.num_experts
        else 4.0 * compute
        for mlp in mlps
    )
    both = np.minimum(2.0 * layers.largest, layers.saved)
    return both + passing * view.model.hidden_size / view.sequence_shards


def _at_peak(view: RankView, layers: _RankBytes) -> tuple[Real, Real]:
    """Micro-batches in flight, and with pending weight gradients, when their bytes are largest."""
    rank = view.rank
    # the last layer in its backward pass still keeps all of its own tensors
    last = rank.num_stages / np.maximum(rank.num_stages, sum(rank.kind_counts))
    peaks = []
    extra = overlapped_exchange_stages(view.table, view.software)
    for number, (in_flight, pending) in enumerate(in_flight_peaks(view.table, rank, extra)):
        shift = np.where(pending > 0, last * (number > 0), 0.0)
        peaks.append(((in_flight + shift) / rank.num_stages, (pending - shift) / rank.num_stages))
    largest = np.argmax(
        np.stack([layers.saved * f + layers.operands * d for f, d in peaks]), axis=0
    )
    return pick([f for f, _ in peaks], largest), pick([d for _, d in peaks], largest)


def _table_bytes(view: RankView, in_flight: Real) -> Real:
    """Bytes of rotary tables and attention masks of the micro-batches in flight.

    A trainer that caches its tables has one for each stage. Context parallelism over blocks of keys
    makes its masks block by block: none is saved.
    """
    model, workload, table = view.model, view.workload, view.table
    blockwise, cached = is_blockwise(table), view.software.activations.caches_rotary_tables
    rows = np.where(workload.document_mask & (not cached), table.micro_batch_size, 1.0)
    rotary = rotary_table_bytes(model, workload) * rows / table.context_parallel
    masks = np.where(blockwise, 0.0, mask_bytes(view))
    tables = (masks if cached else rotary + masks) * in_flight * table.virtual_stages
    tables = tables + rotary * table.virtual_stages * cached
    return tables + np.where(blockwise, 0.0, window_mask_bytes(model, workload, view.software))


class _RankBytes(Struct, frozen=True):
    """Bytes a token of a rank's layers for one micro-batch."""

    saved: Real  # for the backward pass, by all layers
    kinds: list[SavedByLayers]
    operands: Real  # of weight gradients, between input gradients and weight gradients
    working: Real  # added by the backward pass of one layer
    alone: Real  # the same and that layer's saved tensors
    largest: Real  # saved by the largest layer
    backward: list[LayerBackward]  # points of a layer's backward pass
    by_kind: list[tuple[Real, Real]]  # freed with a layer of each kind, and with a recomputed one


def _layers(view: RankView) -> _RankBytes:
    """Return sums and maxima over the kinds of layers of a rank."""
    model, software, table, rank = view.model, view.software, view.table, view.rank
    zeros: Real = np.zeros(len(table))
    saved = operands = working = alone = largest = copies = zeros
    with_recompute: Real = zeros  # ``working`` of recomputed layers
    done_before: Real = zeros
    kinds: list[SavedByLayers] = []
    backward: list[LayerBackward] = []
    recomputed_backward: list[LayerBackward] = []
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
    for number, count, recomputed, after, kind, trained in counts:
        if kind.forward_only or not holds(count):
            continue
        own, share = view.own(kind), kind.token_share
        of_own_token = layer_activations(own, kind)
        one = of_own_token.times(share)
        # made while later layers run backward
        kept = share * kept_input_bytes(model, view.workload.compute_bytes, software, table)
        copies = copies + recomputed * kept
        saved = saved + recomputed * one.left + (count - recomputed) * one.saved
        if holds(np.less(recomputed, count)):
            kinds.append(SavedByLayers(count - recomputed, one.saved, False))
        if holds(recomputed):
            kinds.append(SavedByLayers(recomputed, one.left, True))
        if rank.layer_neighbours:
            by_kind[number] = freed_with_layer(view, one.saved), freed_with_layer(view, one.left)
        largest = np.maximum(largest, one.left * (recomputed > 0))
        largest = np.maximum(largest, one.saved * (recomputed < count))
        # layers behind a stage's first recomputed layer are done when that one runs backward
        done_before = done_before + after * one.saved / rank.num_stages
        operands = operands + count * one.operands
        restored = one.restored(table.recompute)
        with_recompute = np.maximum(with_recompute, (restored + one.working) * (recomputed > 0))
        working = np.maximum(working, one.working * (recomputed < count))
        alone = np.maximum(alone, one.at_mlp + one.working)
        if software.sharding.blockwise_backward:
            points = plain_backward(own, number, kind, trained, of_own_token)
            backward += _of_inputs(where_exists(points, np.less(recomputed, count)), share)
            if holds(recomputed):
                points = with_recomputation(own, kind, of_own_token, points)
                points = where_exists(points, np.greater(recomputed, 0))
                recomputed_backward += _of_inputs(points, share)
    # offloaded, the layers behind it have left the device already
    done_before = np.where(table.offloads_activations, 0.0, done_before)
    working = np.maximum(working, with_recompute - done_before) + copies
    if not rank.layer_neighbours:  # else ``fsdp2`` subtracts layers that are done, by position
        recomputed_backward = [
            replace(each, added=each.added - done_before) for each in recomputed_backward
        ]
    backward += recomputed_backward
    if not backward:  # no layer has a backward pass
        backward = [LayerBackward(zeros, zeros, zeros, zeros, zeros, zeros - 1.0, "reduced", False)]
    return _RankBytes(saved, kinds, operands, working, alone + copies, largest, backward, by_kind)


def _of_inputs(points: list[LayerBackward], share: float) -> list[LayerBackward]:
    """Return bytes for each token of the inputs from bytes for each token of a layer's own."""
    return points if share == 1.0 else [point.of_tokens(share, 0.0) for point in points]


def layer_bytes(view: RankView) -> Real:
    """Bytes that all layers of a rank save for the backward pass of one micro-batch."""
    return _layers(view).saved * view.tokens


def messages(view: RankView, in_flight: Real) -> Real:
    """Bytes a token of messages between stages: c h (/ t with sequence parallelism) each.

    A received input lives until its backward pass; where the first layer saves its input itself
    (layer norm, fp32, full recomputation) that is the same tensor. An encoder's output lives with
    the message that contains it. In addition, the last sent message lives until the next one is
    sent, and the next pass's message is received: an input, or on the first stage a gradient, if
    another backward pass follows at the peak. The gradient that a stage received is kept
    until its backward pass is over: a tensor of its own where the last layer ends with a norm.

    A decoder's states have its targets' tokens. Leaves out: that its received inputs do, too, where
    offload leaves them on the device.
    """
    model, workload, table = view.model, view.workload, view.table
    rank = view.rank
    compute = workload.compute_bytes
    largest = rank.max_message_states
    largest = np.minimum(largest, 1.0) + model.target_share * np.maximum(largest - 1.0, 0.0)
    one = compute * model.hidden_size / view.sequence_shards
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
        follows = among(table.pipeline_schedule, (GPIPE, ONE_F_ONE_B)) & (in_flight > 1.0)
        receives = np.logical_not(rank.first) | np.greater(rank.num_stages, 1)
        under_way = np.where(follows | receives, 2.0, 1.0)
    last_kind = model.kinds[model.pattern[-1]]
    if last_kind.norms_after and last_kind.norm == "layer":
        under_way = under_way + (1.0 - rank.last)
    found = (received + under_way * largest) * one
    return np.where(table.pipeline_parallel > 1, found, 0.0)
