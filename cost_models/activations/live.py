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

from cost_models.activations.checkpointed_modules import Restored, restored_modules
from cost_models.activations.document_masks import mask_bytes, masked_key_bytes
from cost_models.activations.embedding_and_head import (
    embedding_bytes_per_token,
    head_backward_bytes_per_token,
    head_bytes_per_token,
    head_gradient_bytes_per_token,
    head_norm_bytes_per_token,
    rotary_table_bytes,
    window_mask_bytes,
)
from cost_models.activations.encoder_decoder import (
    position_bias_backward_bytes_per_token,
    positions_gradient_bytes,
    shared_bytes_per_token,
)
from cost_models.activations.fp8 import element_bytes, fp8_regions
from cost_models.activations.frozen_layers import of_frozen_layer, sharded_input_bytes
from cost_models.activations.layer_backward import backward_points
from cost_models.activations.saved import (
    Regions,
    backward_working_bytes_per_token,
    due_bytes_per_token,
    feed_forward_bytes,
    layer_regions,
    norm_bytes,
    saved_bytes_per_token,
    saves_input,
    score_gradient_bytes,
)
from cost_models.activations.selective_ops import kept_results
from cost_models.activations.stage_messages import messages
from cost_models.arrays import Count, Flag, Real, holds, pick
from cost_models.communication.context_parallel import (
    context_buffer_bytes_per_token,
    is_blockwise,
    sum_bytes,
    ulysses_saved_bytes,
)
from cost_models.model.lora import trainable_part
from cost_models.model.spec import LayerKind
from cost_models.partition.in_flight import (
    in_flight_peaks,
    overlapped_exchange_stages,
    weight_gradients_pending_at_end,
)
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import GPIPE
from cost_models.plan.recompute import (
    FULL,
    NONE,
    SELECTIVE,
    by_operator,
    repeats_modules,
)
from cost_models.plan.workload import QUANTISED

TOKEN_ID_BYTES: Final = 16.0  # int64 inputs and labels


class LayerBackward(Struct, frozen=True):
    """One point of a layer's backward pass: bytes that it adds (see ``layer_backward``)."""

    added: Real  # to the saved tensors of all layers of the rank
    alone: Real  # to nothing: no other layer of the rank has saved tensors left
    positions_gradient: Real  # of both, once another layer of its stack is done
    gradients: Real  # elements of this layer's weight gradients that exist
    saved: Real  # by such a layer in its forward pass, recomputed or not
    product: Real  # of ``added``, a product with an unpacked matrix; less than 0: none is unpacked
    experts: str  # state of experts that are sharded otherwise, see ``layer_backward``
    complete: bool  # the layer is done, its gradients are being reduced
    kind: int = 0  # index into the model's kinds
    recomputed: bool = False  # of a layer that is recomputed, if the plan recomputes
    has_core: bool = False  # selective recomputation has restored the attention core
    reads: int = 0  # see ``layer_backward``
    exists: Flag = True  # the rank has such layers

    def unpacked(self, used: tuple[Real, Real] | None) -> Real:
        """Bytes of the matrix that is unpacked at this point, and of its workspace.

        ``used``: bytes of the matrix and of the workspace, or None where no matrix is packed. The
        product is allocated after the workspace is freed: the result is the larger one.
        """
        if used is None:
            return 0.0
        matrix, workspace = used
        live = matrix + np.maximum(workspace - self.product, 0.0)
        return np.where(np.less(self.product, 0.0), 0.0, live)

    def of_tokens(self, tokens: Real, shared: Real) -> LayerBackward:
        """Return bytes of a micro-batch from bytes a token; ``shared``: see ``shared_bytes``."""
        return replace(
            self,
            added=self.added * tokens,
            alone=(self.alone + shared) * tokens,
            positions_gradient=self.positions_gradient * tokens,
            saved=self.saved * tokens,
            product=self.product * tokens,
        )


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
    table, rank, tokens = view.table, view.rank, view.tokens
    layers = _layers(view)
    in_flight, pending = _at_peak(view, layers)
    head_saved, kept, forward, backward = head_bytes_per_token(view)
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
        shared_per_token=shared,
        operands_per_token=layers.operands,
        tables=_table_bytes(view, in_flight),
        # offloaded tensors are not on the device
        stage=np.where(table.offloads_activations, 0.0, layers.saved * tokens / rank.num_stages),
        working=layers.working * tokens,
        layer_backward=tuple(each.of_tokens(tokens, shared) for each in layers.backward),
        saved_by_kind=tuple((saved * tokens, left * tokens) for saved, left in layers.by_kind),
        head_backward=head_backward_bytes_per_token(view) * tokens,
        head_norm=head_norm_bytes_per_token(view) * tokens,
        head_gradient=head_gradient_bytes_per_token(view) * tokens,
        head_per_token=head_saved,
        last_layer=(np.maximum(layers.alone, at_end) + shared) * tokens,
        logits_forward=forward * tokens,
        logits_backward=backward * tokens,
        logits_gradient=kept * tokens,
        logits_later=np.where(waiting > 1.0, (backward - kept) * tokens, 0.0),
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
        one = _layer(view, kind)
        # copies that are made while later layers run backward
        copies = copies + count * sharded_input_bytes(
            model, view.workload.compute_bytes, software, table
        )
        saved = saved + recomputed * one.left + (count - recomputed) * one.saved
        if holds(np.less(recomputed, count)):
            kinds.append(SavedByLayers(count - recomputed, one.saved, False))
        if holds(recomputed):
            kinds.append(SavedByLayers(recomputed, one.left, True))
        if rank.layer_neighbours:
            by_kind[number] = _staying(view, one.saved), _staying(view, one.left)
        largest = np.maximum(largest, one.left * (recomputed > 0))
        largest = np.maximum(largest, one.saved * (recomputed < count))
        # layers behind a stage's first recomputed layer are done when that one runs backward
        done_before = done_before + after * one.saved / rank.num_stages
        operands = operands + count * one.operands
        restored = one.recomputed(table.recompute)
        with_recompute = np.maximum(with_recompute, (restored + one.working) * (recomputed > 0))
        working = np.maximum(working, one.working * (recomputed < count))
        alone = np.maximum(alone, one.at_mlp + one.working)
        if software.sharding.blockwise_backward:
            points = _backward(view, number, kind, trained, one)
            backward += _existing(points, np.less(recomputed, count))
            if holds(recomputed):
                points = _recomputed(view, kind, one, points)
                recomputed_backward += _existing(points, np.greater(recomputed, 0))
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


def _staying(view: RankView, saved: Real) -> Real:
    """Return what a layer frees in its backward pass: offloaded tensors were freed before."""
    return np.where(view.table.offloads_activations, 0.0, saved)


class _LayerBytes(Struct, frozen=True):
    """Bytes a token of one layer."""

    saved: Real  # where nothing is recomputed
    left: Real  # under the plan's recompute setting
    selective: Real  # under selective recomputation
    input: Real  # under full recomputation
    at_mlp: Real  # of ``saved``, alive during the MLP's backward pass
    operands: Real  # of pending weight gradients
    working: Real  # gradients of activations that are alive at once
    modules: Restored | None  # of modules that are computed again one by one
    unread: Real  # of ``left``, results that stay until the layer is done

    def beyond_results(self, restored: Real) -> Real:
        """Bytes recomputed operator by operator; each kept result is freed as it is read.

        ``restored``: saved tensors that exist again.
        """
        return np.maximum(0.0, restored - (self.left - self.input - self.unread))

    def recomputed(self, recompute: Count) -> Real:
        """Bytes that the layer's backward pass restores."""
        core = np.where(recompute == SELECTIVE, self.at_mlp - self.selective, 0.0)
        restored = np.where(recompute == FULL, self.at_mlp, core)
        if self.modules is not None:
            restored = np.where(repeats_modules(recompute), self.modules.at_once, restored)
        return np.where(by_operator(recompute), self.beyond_results(self.at_mlp), restored)


def _layer(view: RankView, kind: LayerKind) -> _LayerBytes:
    """Return the bytes of one layer of a kind.

    A recomputed layer whose keys and values the model's cache keeps leaves those, too (without
    recomputation autograd saves them); that they stay until the loop drops the model's output is
    left out.
    """
    model, workload, software, table = view.model, view.workload, view.software, view.table
    compute, regions = workload.compute_bytes, _regions(view, kind)
    saved = _saved(view, regions, NONE)
    left = _saved(view, regions, table.recompute)
    full = table.recompute == FULL
    left = left + software.activations.layer_input_extra_bytes * model.hidden_size * full
    if software.activations.keeps_cache and kind.attention.delta_rule is None:
        attention = kind.attention
        width = attention.num_kv_heads * (attention.head_dim + attention.value_head_dim)
        left = left + compute * width / table.tensor_parallel * full
    kept, modules = _saved(view, regions, FULL), None
    if holds(repeats_modules(table.recompute)):
        modules = restored_modules(view, kind, regions)
        fewer = np.maximum(kept, saved - modules.dropped)
        left = np.where(repeats_modules(table.recompute), fewer, left)
    at_mlp = saved
    if kind.norms_after:  # the norm's backward pass comes before the MLP's
        norm = norm_bytes(kind, model.hidden_size, compute, software)
        at_mlp = at_mlp - norm / view.sequence_shards
    return _LayerBytes(
        saved=saved,
        left=left,
        selective=_saved(view, regions, SELECTIVE),
        input=kept,
        at_mlp=at_mlp,
        operands=due_bytes_per_token(
            kind,
            regions,
            model.hidden_size,
            element_bytes(workload, software) if workload.precision in QUANTISED else compute,
            table.tensor_parallel,
            table.sequence_parallel,
        ),
        working=_working(view, kind),
        modules=modules,
        unread=regions.results_unread / view.sequence_shards,
    )


def _working(view: RankView, kind: LayerKind) -> Real:
    """Gradients of activations in a layer's backward pass: the larger of MLP and attention.

    Attention adds the buffers of context parallelism, or the gradients of eager scores, when the
    MLP's saved tensors are freed.
    """
    model, workload, software, table = view.model, view.workload, view.software, view.table
    compute = workload.compute_bytes
    mlp = backward_working_bytes_per_token(
        kind, model.hidden_size, compute, table.tensor_parallel, software
    )
    freed = feed_forward_bytes(kind.feed_forward, compute, software)
    summed = sum_bytes(compute, software)
    exchange = context_buffer_bytes_per_token(kind.attention, compute, summed, table)[1]
    core = np.maximum(exchange, _score_gradients(view, kind)) - freed / table.tensor_parallel
    working: Real = np.maximum(mlp, core + compute * 3.0 * model.hidden_size)
    return position_bias_backward_bytes_per_token(
        kind, model.hidden_size, workload, table, working, freed
    )


def _score_gradients(view: RankView, kind: LayerKind) -> Real:
    """Gradients of whole rows of scores, of eager attention."""
    workload, table, attention = view.workload, view.table, kind.attention
    if workload.attention_kernel != "eager" or attention.delta_rule is not None:
        return np.zeros(len(table))
    dropout, compute = view.model.attention_dropout > 0, workload.compute_bytes
    scores = score_gradient_bytes(attention, workload.seq_len, dropout, view.software, compute)
    return np.where(is_blockwise(table), 0.0, scores / table.tensor_parallel)


def _backward(
    view: RankView, number: int, kind: LayerKind, trained: LayerKind, one: _LayerBytes
) -> list[LayerBackward]:
    """Return the points of the backward pass of a layer that is not recomputed."""
    workload, software, table = view.workload, view.software, view.table
    positions = positions_gradient_bytes(kind, workload, table)
    points = []
    for point in backward_points(view.model, kind, trained, one.saved, workload, software, table):
        added = point.working - point.freed
        points.append(
            LayerBackward(
                added=added,
                alone=one.saved + added,
                positions_gradient=positions,
                gradients=point.gradients,
                saved=_staying(view, one.saved),
                product=point.product,
                experts=point.experts,
                complete=point.done,
                kind=number,
                has_core=point.has_core,
                reads=point.reads,
            )
        )
    return points


def _existing(points: list[LayerBackward], exists: Flag) -> list[LayerBackward]:
    """Return the points of the ranks that have such layers."""
    if np.all(exists):
        return points
    return [replace(point, exists=exists) for point in points] if holds(exists) else []


def _recomputed(
    view: RankView, kind: LayerKind, one: _LayerBytes, points: list[LayerBackward]
) -> list[LayerBackward]:
    """Return the same points of a recomputed layer: tensors that it restores are added."""
    table = view.table
    core = np.where(table.recompute == SELECTIVE, one.saved - one.selective, 0.0)
    core = core / (1.0 if kind.cross_attention is None else 2.0)
    # the input that was kept is one of the layer's saved tensors
    rest = one.saved - saves_input(kind, view.workload.compute_bytes, view.software) * one.input
    found = []
    for point in points:
        restored = np.where(table.recompute == FULL, rest, core * point.has_core)
        restored = np.where(by_operator(table.recompute), one.beyond_results(one.saved), restored)
        if one.modules is not None:
            again = one.modules.by(point.reads)
            restored = np.where(repeats_modules(table.recompute), again, restored)
        left = _staying(view, one.left)
        found.append(replace(point, added=restored + point.added, saved=left, recomputed=True))
    return found


def layer_bytes(view: RankView) -> Real:
    """Bytes that all layers of a rank save for the backward pass of one micro-batch."""
    return _layers(view).saved * view.tokens


def _regions(view: RankView, kind: LayerKind) -> Regions:
    """Return saved bytes of a layer by region, under every option of a view that changes them."""
    model, workload, software, table = view.model, view.workload, view.software, view.table
    blockwise = is_blockwise(table)
    regions = layer_regions(model, workload, software, kind, blockwise)
    if workload.precision in QUANTISED:
        element = element_bytes(workload, software)
        regions = fp8_regions(regions, kind, model.hidden_size, workload.compute_bytes, element)
    more = _attention_copies(view, kind, blockwise)
    regions = replace(regions, split=regions.split + more, core=regions.core + more)
    regions = of_frozen_layer(regions, kind, model.hidden_size, workload.compute_bytes, software)
    if not holds(by_operator(table.recompute)):
        return regions
    found = kept_results(model, workload, table, kind)
    return replace(
        regions,
        results_split=found.split,
        results_along=found.along,
        results_whole=found.whole,
        results_unread=found.unread,
    )


def _attention_copies(view: RankView, kind: LayerKind, blockwise: Flag) -> Real:
    """Saved copies around attention, of all tensor-parallel ranks together.

    Tensors of Ulysses' exchange; keys and values repeated for a mask, or for eager attention:
    c (a - k) (d + e).
    """
    workload, software, table = view.workload, view.software, view.table
    more = ulysses_saved_bytes(kind.attention, workload.compute_bytes, table)
    masked = masked_key_bytes(kind.attention, workload, software)
    more = more * table.tensor_parallel + np.where(blockwise, 0.0, masked)
    if workload.attention_kernel == "eager":
        each = kind.attention.head_dim + kind.attention.value_head_dim
        groups = max(0, kind.attention.num_heads - kind.attention.num_kv_heads)
        groups *= kind.attention.delta_rule is None
        repeated = workload.compute_bytes * groups * each * (not software.activations.repeats_keys)
        more = more + np.where(blockwise, 0.0, repeated)
    return more


def _saved(view: RankView, regions: Regions, recompute: Count) -> Real:
    table = view.table
    return saved_bytes_per_token(
        regions,
        view.model.hidden_size,
        compute_bytes=view.workload.compute_bytes,
        tensor_parallel=table.tensor_parallel,
        sequence_parallel=table.sequence_parallel,
        recompute=recompute,
        keeps_gathered_inputs=view.software.activations.keeps_gathered_inputs,
        expert_tensor=table.expert_tensor,
    )
