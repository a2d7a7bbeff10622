"""Activations of one layer under a plan: saved, restored, and alive in its backward pass.

Symbols   c compute_bytes   h hidden_size   F ffn_hidden_size   a, k query and key/value heads
          d, e sizes of a head   s seq_len   t tensor_parallel
Units     bytes a token of one micro-batch. Columns of a plan table whose rows share the stages
          (``estimate``).

Source: live tensors of traced backward passes, and tensors that autograd saves of the real modules
of every family (``python -m benchmarks.memory_truth``). Leaves out: what the allocator reserves in
addition to tensors (``memory.allocator``).
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from cost_models.activations.checkpointed_modules import Restored, restored_modules
from cost_models.activations.document_masks import masked_key_bytes
from cost_models.activations.encoder_decoder import (
    position_bias_backward_bytes_per_token,
    positions_gradient_bytes,
)
from cost_models.activations.fp8 import element_bytes, fp8_regions, matmul_inputs
from cost_models.activations.frozen_layers import of_frozen_layer
from cost_models.activations.layer_backward import backward_points
from cost_models.activations.operators import (
    CAPPED_BLOCK,
    feed_forward_bytes,
    norm_bytes,
    of_routed,
    router_bytes,
    saves_input,
    score_gradient_bytes,
)
from cost_models.activations.saved import (
    Regions,
    due_bytes_per_token,
    layer_regions,
    saved_bytes_per_token,
)
from cost_models.activations.selective_ops import kept_results
from cost_models.arrays import FP32, Count, Flag, Real, holds
from cost_models.communication.context_parallel import (
    context_buffer_bytes_per_token,
    is_blockwise,
    sum_bytes,
    ulysses_saved_bytes,
)
from cost_models.communication.expert_parallel import most_loaded
from cost_models.model.spec import LayerKind
from cost_models.partition.rank_view import RankView
from cost_models.plan.recompute import FULL, NONE, SELECTIVE, by_operator, repeats_modules
from cost_models.plan.workload import QUANTISED
from hardware_profiles.software.trainer import SoftwareProfile


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


def freed_with_layer(view: RankView, saved: Real) -> Real:
    """Bytes that a layer's backward pass frees: offloaded tensors were freed before."""
    return np.where(view.table.offloads_activations, 0.0, saved)


class LayerActivations(Struct, frozen=True):
    """Bytes a token of one layer under the plans of a view."""

    saved: Real  # where nothing is recomputed
    left: Real  # saved under the plan's recompute setting
    selective: Real  # saved under selective recomputation
    input: Real  # saved under full recomputation
    at_mlp: Real  # of ``saved``, alive during the MLP's backward pass
    operands: Real  # of pending weight gradients
    working: Real  # gradients of activations that are alive at once
    modules: Restored | None  # of modules that are computed again one by one
    unread: Real  # of ``left``, results that stay until the layer is done

    def beyond_results(self, restored: Real) -> Real:
        """Bytes of recomputed tensors beyond the kept results, each of which is freed when read.

        Under recomputation operator by operator. ``restored``: saved tensors that exist again.
        """
        return np.maximum(0.0, restored - (self.left - self.input - self.unread))

    def times(self, share: float) -> LayerActivations:
        """Return so many times the bytes."""
        if share == 1.0:
            return self
        modules = None if self.modules is None else self.modules.times(share)
        names = (name for name in self.__struct_fields__ if name != "modules")
        return replace(
            self, modules=modules, **{name: share * getattr(self, name) for name in names}
        )

    def restored(self, recompute: Count) -> Real:
        """Bytes that the layer's backward pass computes again."""
        core = np.where(recompute == SELECTIVE, self.at_mlp - self.selective, 0.0)
        restored = np.where(recompute == FULL, self.at_mlp, core)
        if self.modules is not None:
            restored = np.where(repeats_modules(recompute), self.modules.at_once, restored)
        return np.where(by_operator(recompute), self.beyond_results(self.at_mlp), restored)


def layer_activations(view: RankView, kind: LayerKind) -> LayerActivations:
    """Return the bytes of one layer of a kind.

    Where the model's cache of keys and values is on, a recomputed layer keeps those, too (without
    recomputation autograd saves them). Leaves out: that they stay until the loop drops the model's
    output.
    """
    model, workload, software, table = view.model, view.workload, view.software, view.table
    compute, regions = workload.compute_bytes, _regions(view, kind)
    saved = _saved(view, regions, NONE)
    left = _saved(view, regions, table.recompute)
    full = table.recompute == FULL
    left = left + software.activations.layer_input_extra_bytes * model.hidden_size * full
    if not software.kernels.recomputes_attention:  # output and log-sum-exp of each head
        each = compute * kind.attention.value_head_dim + FP32
        left = left + each * kind.attention.num_heads / table.tensor_parallel * full
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
    return LayerActivations(
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


def plain_backward(
    view: RankView, number: int, kind: LayerKind, trained: LayerKind, one: LayerActivations
) -> list[LayerBackward]:
    """Return the points of the backward pass of a layer that is not recomputed."""
    positions = positions_gradient_bytes(kind, view.workload, view.table)
    points = []
    for point in backward_points(view, kind, trained, one.saved):
        added = point.working - point.freed
        points.append(
            LayerBackward(
                added=added,
                alone=one.saved + added,
                positions_gradient=positions,
                gradients=point.gradients,
                saved=freed_with_layer(view, one.saved),
                product=point.product,
                experts=point.experts,
                complete=point.done,
                kind=number,
                has_core=point.has_core,
                reads=point.reads,
            )
        )
    return points


def where_exists(points: list[LayerBackward], exists: Flag) -> list[LayerBackward]:
    """Return the points of the ranks that have such layers."""
    if np.all(exists):
        return points
    return [replace(point, exists=exists) for point in points] if holds(exists) else []


def with_recomputation(
    view: RankView, kind: LayerKind, one: LayerActivations, points: list[LayerBackward]
) -> list[LayerBackward]:
    """Return the points of a layer that is recomputed: restored tensors are added."""
    table = view.table
    core = np.where(table.recompute == SELECTIVE, one.saved - one.selective, 0.0)
    across = kind.cross_attention  # whose scores were restored, read and freed before
    core = core / (1.0 if across is None else 1.0 + across.keys_of(1.0))
    # the input that was kept is one of the layer's saved tensors
    rest = one.saved - saves_input(kind, view.workload.compute_bytes, view.software) * one.input
    found = []
    for point in points:
        restored = np.where(table.recompute == FULL, rest, core * point.has_core)
        restored = np.where(by_operator(table.recompute), one.beyond_results(one.saved), restored)
        if one.modules is not None:
            again = one.modules.by(point.reads)
            restored = np.where(repeats_modules(table.recompute), again, restored)
        left = freed_with_layer(view, one.left)
        found.append(replace(point, added=restored + point.added, saved=left, recomputed=True))
    return found


def _regions(view: RankView, kind: LayerKind) -> Regions:
    """Return saved bytes of a layer by region, under every option of a view that changes them."""
    model, workload, software, table = view.model, view.workload, view.software, view.table
    blockwise = is_blockwise(table)
    regions = layer_regions(model, workload, software, kind, blockwise)
    if workload.precision in QUANTISED:
        element = element_bytes(workload, software)
        regions = fp8_regions(regions, kind, model.hidden_size, workload.compute_bytes, element)
    regions = _of_most_loaded(regions, view, kind)
    more = _attention_copies(view, kind, blockwise)
    rounded = software.rounding.input_saved_bytes * matmul_inputs(kind, 1)
    regions = replace(regions, split=regions.split + more + rounded, core=regions.core + more)
    regions = of_frozen_layer(regions, kind, model.hidden_size, workload.compute_bytes, software)
    if not holds(by_operator(table.recompute)):
        return regions
    found = kept_results(model, workload, software, table, kind)
    return replace(
        regions,
        results_split=found.split,
        results_along=found.along,
        results_whole=found.whole,
        results_unread=found.unread,
    )


def _of_most_loaded(regions: Regions, view: RankView, kind: LayerKind) -> Regions:
    """Return the regions of the rank whose experts get most rows (``most_loaded``).

    Leaves out: that the loads of a stage's layers are not the same ranks'; working tensors.
    """
    mlp, compute, software = kind.feed_forward, view.workload.compute_bytes, view.software
    more = most_loaded(mlp, view.table.expert_parallel, software) - 1.0
    if not (mlp.num_experts and holds(np.greater(more, 0.0))):
        return regions
    rows = regions.routed - router_bytes(mlp, view.model.hidden_size, compute, software)
    inside = of_routed(mlp, feed_forward_bytes(mlp, compute, software))
    return replace(
        regions, routed=regions.routed + more * rows, split=regions.split + more * inside
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
    """Bytes that a layer saves under a recompute setting."""
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


def backward_working_bytes_per_token(
    kind: LayerKind,
    hidden_size: int,
    compute_bytes: float,
    tensor_parallel: Count,
    software: SoftwareProfile,
) -> Real:
    """Largest simultaneous gradients of activations in the backward pass of one layer.

        c (3 F / t + 3 h)   gated: gradients of the product, of the activation, of the up projection
        c (2 F / t + 3 h)   plain: gradients of the activation's output and input

    The MLP is the widest point; the gradients of the layer's output, of the residual stream and of
    the block's input are also alive. Capped scores (executor/ops/soft_cap.py) are computed in
    blocks of Q = 128 queries: three fp32 tensors of a Q s / t, and a product in compute precision.
    A loop over experts processes one of them at a time.
    """
    feed_forward = kind.feed_forward
    width = float(feed_forward.ffn_hidden_size * max(1, feed_forward.experts_per_token))
    if software.activations.experts_one_by_one:
        width /= max(1, feed_forward.num_experts)
    width += feed_forward.shared_ffn_hidden_size
    tensors = 3.0 if feed_forward.gated else 2.0
    between = compute_bytes * tensors * width / np.multiply(1.0, tensor_parallel)
    if kind.attention.capped:
        exact = max(FP32, compute_bytes)
        block = kind.attention.num_heads * CAPPED_BLOCK / np.multiply(1.0, tensor_parallel)
        products = compute_bytes if compute_bytes < exact else 0.0
        between = np.maximum(between, (3.0 * exact + products) * block)
    return between + 3.0 * compute_bytes * hidden_size
