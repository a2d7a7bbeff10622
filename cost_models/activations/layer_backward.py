"""Points of one layer's backward pass at which the memory of a rank may be at its peak.

Symbols   h hidden_size   F ffn_hidden_size   a, k query and key/value heads   d, e sizes of a head
          s seq_len   t tensor_parallel   c compute_bytes
Units     bytes a token, elements of gradients; columns of a plan table.

    closing    the norm of the MLP's output (OLMo 2), whose backward pass is wide
    last       the MLP's last matrix: its gradient, the gradients of its input (and of an adapter's
               input) and of dropout's output
    mlp        gradients inside the MLP: c (3 F / t) gated, c (2 F / t) plain
    routed     the experts' outputs, whose gradients are weighted in fp32
    experts    the experts are done; where they are sharded over other ranks than the layer, their
               gradients are being reduced
    columns    the MLP's first matrices: their input and its gradient are whole (gathered)
    norm       the norm before the MLP, whose own backward pass is wide where h is
    attention  gradients inside the core: of queries, keys and values, or of scores (eager), or the
               buffers of context parallelism
    queries    the attention's first matrices
    end        the first norm: of the layer only the gradients of all its weights are left
    done       the gradient of the layer's input, and its weight gradients while they are reduced

The gradient of the hidden state exists at every point. A norm in fp32 that is written out (Llama)
has five fp32 tensors while the square of its input is differentiated; its saved 16-bit tensor is
freed, and the gradient of the residual connection exists instead. A layer norm is one kernel; one
that is written out (Cohere) has three tensors: its output's gradient, that times the weight, and
that times the normalised input.

Source: live tensors of traced backward passes (``python -m benchmarks.memory_truth``). Leaves out:
blocks that the allocator has not reused yet (``memory.allocator``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec import Struct

from cost_models.activations.delta_rule import gated_output_bytes, rule_backward_bytes
from cost_models.activations.frozen_layers import normalised_bytes
from cost_models.activations.operators import (
    CAPPED_BLOCK,
    activation_copies,
    attention_bytes,
    feed_forward_bytes,
    needs_window_mask,
    norm_bytes,
    score_bytes,
    score_gradient_bytes,
)
from cost_models.arrays import FP32, Real
from cost_models.communication.context_parallel import (
    context_buffer_bytes_per_token,
    is_blockwise,
    sum_bytes,
)
from cost_models.model.parameters import block_numel, routed_numel
from cost_models.model.spec import LayerKind, Weight
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import PlanTable
from cost_models.plan.recompute import FULL
from hardware_profiles.software.trainer import SoftwareProfile

# what a layer's backward pass reads, in order: a module that is computed again is restored there
CLOSING, ROUTED, INNER, COLUMNS, AT_CORE, QUERIES = range(6)
MLP_PARTS = ("mlp", "experts", "shared_experts", "router")


class BackwardPoint(NamedTuple):
    """One point of a layer's backward pass."""

    freed: Real  # of the layer's saved tensors
    working: Real  # gradients of activations, and copies
    gradients: Real  # elements of weight gradients that exist
    # of a product with a matrix that has just been unpacked from few bits; -1: none
    product: Real = -1.0
    has_core: bool = False  # selective recomputation has restored the attention core
    done: bool = False
    # of experts that are sharded otherwise than the layer: "gathered", "gathering", "fresh",
    # "reducing"
    experts: str = "reduced"
    reads: int = INNER


def norm_working_bytes(
    kind: LayerKind, width: float, compute: float, software: SoftwareProfile
) -> float:
    """Bytes a token of a norm's backward pass, saved tensors not counted.

    3 c h  one kernel, or a layer norm; 5 w h  RMS written out; (3 w + c) h  layer norm in fp32

    w = max(4, c).
    """
    if kind.norm == "layer" or software.activations.rms_norm_saved_fp32_bytes == 0.0:
        return 3.0 * compute * width
    if kind.norm == "layer_in_fp32":
        return (3.0 * max(FP32, compute) + compute) * width
    return 5.0 * max(FP32, compute) * width


class _BackwardTerms(Struct, frozen=True):
    """Terms of the points of one layer's backward pass, under every plan of a table."""

    view: RankView
    kind: LayerKind
    trained: LayerKind  # its own weights, without frozen ones

    @property
    def table(self) -> PlanTable:
        """The plans."""
        return self.view.table

    @property
    def software(self) -> SoftwareProfile:
        """The trainer."""
        return self.view.software

    @property
    def compute(self) -> float:
        """Bytes of the compute precision."""
        return self.view.compute_bytes

    @property
    def tensor(self) -> Real:
        """Tensor-parallel ranks."""
        return 1.0 * self.table.tensor_parallel

    @property
    def width(self) -> int:
        """Elements of a hidden state."""
        return self.view.model.hidden_size

    @property
    def along(self) -> Real:
        """Ranks that split norms and dropouts along the sequence."""
        return self.view.sequence_shards

    @property
    def hidden(self) -> Real:
        """Bytes of a hidden state."""
        return self.compute * self.width / self.along

    @property
    def norm(self) -> Real:
        """Bytes that a norm saves; a frozen one does not save its normalised input."""
        saved = norm_bytes(self.kind, self.width, self.compute, self.software)
        return saved / self.along - (0.0 if self.trains_norms else self.normalised)

    @property
    def normalised(self) -> Real:
        """Bytes of the normalised input of a norm, which only its weight's gradient needs."""
        return normalised_bytes(self.kind, self.width, self.compute, self.software) / self.along

    @property
    def trains_norms(self) -> bool:
        """Whether norms of the hidden state are trained."""
        return any(w.part == "norm" and w.shape == (self.width,) for w in self.trained.weights)

    @property
    def turned(self) -> Real:
        """Bytes of a norm's backward pass."""
        return norm_working_bytes(self.kind, self.width, self.compute, self.software) / self.along

    @property
    def mask(self) -> Real:
        """Bytes of a dropout mask of the hidden state."""
        drops = float(self.view.model.hidden_dropout > 0)
        return drops * self.software.activations.dropout_mask_bytes * self.width / self.along

    @property
    def inside(self) -> Real:
        """Bytes saved between the matrices of the MLP."""
        return feed_forward_bytes(self.kind.feed_forward, self.compute, self.software) / self.tensor

    @property
    def routed(self) -> Real:
        """Elements of routed experts."""
        table = self.table
        return routed_numel(self.trained, table.expert_tensor, table.expert_parallel)


def backward_points(
    view: RankView, kind: LayerKind, trained: LayerKind, everything: Real
) -> list[BackwardPoint]:
    """Return the points of one layer's backward pass, in order.

    ``everything``: bytes a token that the layer saved; ``trained``: without frozen weights.
    """
    layer = _BackwardTerms(view, kind, trained)
    hidden, norm, turned, by_mlp = layer.hidden, layer.norm, layer.turned, _by_mlp(layer)
    by_core, whole = _by_core(layer, by_mlp)
    behind = (norm if kind.norms_after else 0.0 * norm) + layer.mask
    opens = not (kind.norms_after and kind.num_norms == 2)  # with a norm: not BERT, OLMo 2
    first = norm if opens else 0.0 * norm
    product = layer.compute * layer.width
    shares_norm = kind.parallel_residual and kind.num_norms == 1
    closes = kind.norms_after and kind.norm != "layer"  # a norm of the MLP's output
    closed = layer.normalised if layer.trains_norms else 0.0 * norm  # freed before it
    found = [
        *([BackwardPoint(closed, hidden + turned, 0.0 * by_mlp, reads=CLOSING)] if closes else []),
        *_mixture(layer, by_mlp, behind),
        *_mlp(layer, by_mlp, behind),
        # a norm shared by MLP and attention comes last
        *(
            []
            if shares_norm
            else [BackwardPoint(behind + layer.inside + hidden, turned, by_mlp, reads=COLUMNS)]
        ),
        BackwardPoint(_before_core(layer), _core(layer), by_core, has_core=True, reads=AT_CORE),
        BackwardPoint(
            everything - first - hidden, hidden + _queries(layer), whole, product, reads=QUERIES
        ),
        BackwardPoint(everything - first, turned * float(opens), whole, reads=QUERIES),
        BackwardPoint(everything, hidden, whole, done=True, reads=QUERIES),
    ]
    return [point._replace(freed=np.clip(point.freed, 0.0, everything)) for point in found]


def _mlp(layer: _BackwardTerms, by_mlp: Real, behind: Real) -> list[BackwardPoint]:
    """Return the points inside the MLP; ``behind``: freed bytes that were saved behind it."""
    feed_forward, compute, tensor = layer.kind.feed_forward, layer.compute, layer.tensor
    width = feed_forward.ffn_hidden_size * max(1, feed_forward.experts_per_token)
    one = compute * (width + feed_forward.shared_ffn_hidden_size) / tensor
    last = tuple(w for w in _matrices(layer.trained) if w.sharding == "row")
    share = 1.0 / (3.0 if feed_forward.gated else 2.0)  # of an expert, its last matrix
    by_last = block_numel(last, layer.table.tensor_parallel) + share * layer.routed
    drops = layer.view.model.hidden_dropout > 0
    # the last matrix has freed its input, unless the activation saves it too
    saves = activation_copies(feed_forward, layer.software) > 0.0
    closed = one * float(saves or feed_forward.gated)
    if feed_forward.inner_dropout and drops:
        closed = (compute + layer.software.activations.dropout_mask_bytes) / compute * one
    # the gradient of its output: from dropout, and gathered from all ranks
    copies = np.where(np.greater(layer.table.micro_batch_size, 1), 2.0, 1.0)
    gathered = np.where(layer.table.sequence_parallel, copies * compute, 0.0)
    output: Real = gathered * layer.width + layer.hidden * float(drops)
    matrices = 2.0 if feed_forward.gated else 1.0
    columns = _columns(layer, matrices * one, one, alone=matrices == 1.0)
    hidden, whole = layer.hidden, compute * layer.width
    if feed_forward.num_experts:  # of every copy of a token that is sent to an expert
        copied = feed_forward.experts_per_token * compute * layer.width
        rows = copied * layer.table.expert_tensor / tensor
        behind, output = behind + rows, rows + hidden
    # the input gradient of a packed matrix reads no saved tensor: it only triggers recomputation of
    # the layer up to the activation, with another unpacked matrix and the layer's hidden state live
    packed = any(w.quantised and w.sharding == "row" for w in layer.kind.weights)
    later = np.where(np.equal(layer.table.recompute, FULL) & packed, matrices * one, 0.0)
    state = np.where(later > 0.0, hidden, 0.0)
    # the adapter of the last matrix adds a summand to the gradient of their common input, when the
    # gradient of their output is freed; of a packed matrix the unpacked copy is freed too
    adapted = any(w.is_adapter and w.sharding == "row" for w in _matrices(layer.kind))
    summand = one * float(adapted and not packed)
    # the summand is a view of a matmul's result, so that the sum is a third tensor
    widest = np.maximum(matrices + 1.0, 3.0 * float(adapted))
    found = [
        BackwardPoint(
            behind + later, hidden + state + one + np.maximum(output, summand), by_last, one
        ),
        BackwardPoint(behind + closed, hidden + widest * one, by_last),
        BackwardPoint(behind + layer.inside, hidden + columns, by_mlp, whole, reads=COLUMNS),
    ]
    if feed_forward.num_experts:  # their first matrices: in ``_mixture``
        found = [point._replace(experts="fresh") for point in found[:2]]
    if packed and adapted:  # recomputed: outputs of first matrices and adapters, and their sums
        sums = state + np.where(later > 0.0, (2.0 * matrices + 1.0) * one, 0.0)
        found.append(BackwardPoint(behind + layer.inside, hidden + one + sums, 0.0 * by_last))
    return found


def _columns(layer: _BackwardTerms, outputs: Real, largest: Real, *, alone: bool) -> Real:
    """Bytes a token of the backward pass of matrices that share an input.

    outputs + 2 c h + c h / t   with sp: the gathered input, its gradient, this rank's part of that
    outputs + c h               tensor parallel without sp: the sum is taken in place
    largest output + 2 c h      one rank: matrix by matrix, each adds a summand
    """
    whole = layer.compute * layer.width
    gathered = np.where(layer.table.sequence_parallel, whole + layer.hidden, 0.0)
    one_rank = largest + whole * (1.0 if alone else 2.0)
    return np.where(layer.tensor > 1.0, outputs + whole + gathered, one_rank)


def _queries(layer: _BackwardTerms) -> Real:
    """Bytes a token of the backward pass of the attention's first matrices (``_columns``)."""
    attention, each = layer.kind.attention, layer.compute / layer.tensor
    queries = each * attention.num_heads * attention.head_dim * (2.0 if attention.gated else 1.0)
    if attention.delta_rule is not None:  # queries, keys, values and gates in one
        gates = attention.num_heads * (attention.value_head_dim + 2.0)
        both = each * (attention.conv_channels + gates)
        return _columns(layer, both, both, alone=False)
    keys = each * attention.num_kv_heads * (attention.head_dim + attention.value_head_dim)
    return _columns(layer, queries + keys, queries, alone=False)


def _mixture(layer: _BackwardTerms, by_mlp: Real, behind: Real) -> list[BackwardPoint]:
    """Return the points around routed experts; none in a dense layer."""
    feed_forward, compute, table = layer.kind.feed_forward, layer.compute, layer.table
    if not feed_forward.num_experts:
        return []
    # rows that each rank routes: all tokens, or its share where its experts are whole
    rows = feed_forward.experts_per_token * layer.width * table.expert_tensor
    rows = rows / layer.tensor
    wide = max(FP32, compute) if feed_forward.weighted_in_fp32 else compute
    cast = compute if compute < wide else 0.0
    # gradients of the experts' sum (whole), and of the residual stream
    whole = compute * layer.width
    arrived = np.where(table.sequence_parallel, whole, layer.hidden) + layer.hidden
    gradients = layer.software.activations.weighting_gradient_bytes or wide + cast
    weighted = gradients * rows + arrived
    # recomputed up to the last saved tensor: meanwhile the returned rows, their sum, the residual
    # stream and, cut along the sequence, the mixture's input are live
    full = np.equal(table.recompute, FULL)
    back = np.where(table.expert_parallel > 1, compute, 0.0)
    sums = (wide + cast) * layer.width
    given = layer.hidden * np.where(table.sequence_parallel, 2.0, 1.0)
    again = (wide + back) * rows + sums + given + arrived
    weighted = np.where(full, np.maximum(weighted, again), weighted)
    rows = compute * rows
    one = rows + 2.0 * layer.hidden
    none, inside = 0.0 * by_mlp, behind + layer.inside + rows
    width = feed_forward.ffn_hidden_size * feed_forward.experts_per_token
    opened = compute * width * (2.0 if feed_forward.gated else 1.0) / layer.tensor
    return [
        BackwardPoint(behind, weighted, none, experts="gathered", reads=ROUTED),
        # (recomputed experts are gathered before any other tensor of the MLP exists)
        BackwardPoint(
            behind + rows + np.where(full, layer.inside + rows, 0.0),
            one,
            none,
            experts="gathering",
            reads=ROUTED,
        ),
        BackwardPoint(inside, one + opened, by_mlp, experts="fresh"),
        BackwardPoint(inside + rows, one, by_mlp, experts="reducing", reads=COLUMNS),
    ]


def _matrices(trained: LayerKind) -> tuple[Weight, ...]:
    return tuple(w for w in trained.weights if w.part in MLP_PARTS and not w.is_routed_expert)


def _by_mlp(layer: _BackwardTerms) -> Real:
    """Elements of weight gradients after the MLP's backward pass."""
    return block_numel(_matrices(layer.trained), layer.table.tensor_parallel) + layer.routed


def _by_core(layer: _BackwardTerms, by_mlp: Real) -> tuple[Real, Real]:
    """Elements of weight gradients at the (first) attention core, and of the whole layer."""
    weights, tensor = layer.trained.weights, layer.table.tensor_parallel
    attention = tuple(w for w in weights if w.part == "attention" and w.role == "linear")
    outputs = block_numel(tuple(w for w in attention if w.sharding == "row"), tensor)
    if layer.kind.cross_attention is not None:  # it is done, and of the same size
        outputs = 0.5 * (outputs + block_numel(attention, tensor))
    rest = tuple(w for w in weights if not w.is_routed_expert)
    return by_mlp + outputs, block_numel(rest, tensor) + layer.routed


def _before_core(layer: _BackwardTerms) -> Real:
    """Bytes saved behind the core of self-attention, freed before its backward pass."""
    kind, compute = layer.kind, layer.compute
    opens = not (kind.norms_after and kind.num_norms == 2)
    norms = kind.num_norms - float(opens)
    saved = norms * layer.norm + layer.inside + layer.hidden + 2.0 * layer.mask
    if kind.attention.delta_rule is not None:
        saved = saved + gated_output_bytes(kind.attention, compute) / layer.tensor
    if kind.cross_attention is None:
        return saved
    across = score_bytes(
        kind.cross_attention,
        layer.view.workload.seq_len,
        layer.view.workload.attention_kernel,
        layer.view.model.attention_dropout > 0,
        layer.software,
        compute,
    )
    across = across + attention_bytes(kind.cross_attention, compute)
    return saved + across / layer.tensor + layer.hidden + layer.mask


def _core(layer: _BackwardTerms) -> Real:
    """Bytes a token of gradients inside the attention core, and of two hidden states.

    flash     2 c (a + k) d / t    of its output, queries, keys and values
    eager     whole rows of scores (``saved.score_gradient_bytes``)
    capped    blocks of Q queries: three fp32 tensors of a Q s / t, and products
    trained   c a s / t            of the positions that are added to the scores (T5)
    linear    ``delta_rule.rule_backward_bytes``
    exchange  buffers of context parallelism
    """
    attention, compute, workload = layer.kind.attention, layer.compute, layer.view.workload
    rule, kernel = attention.delta_rule, workload.attention_kernel
    if rule is not None:
        inside = rule_backward_bytes(attention, rule, workload.seq_len, kernel, compute)
        return inside / layer.tensor + 2.0 * layer.hidden
    exact = max(FP32, compute)
    if workload.attention_kernel == "eager":
        drops = layer.view.model.attention_dropout > 0
        working = score_gradient_bytes(attention, workload.seq_len, drops, layer.software, compute)
    else:
        masked = needs_window_mask(attention, workload.seq_len, layer.software)
        heads = np.where(masked | workload.document_mask, attention.num_heads, 0)
        heads = attention.num_heads + np.maximum(heads, attention.num_kv_heads)
        working = 2.0 * compute * heads * max(attention.head_dim, attention.value_head_dim)
        if attention.capped:
            products = compute if compute < exact else 0.0
            working = working + (3.0 * exact + products) * attention.num_heads * CAPPED_BLOCK
        if layer.kind.trains_position_bias:
            scores = compute * attention.num_heads * np.multiply(1.0, workload.seq_len)
            working = working + scores
    working = np.where(is_blockwise(layer.table), 0.0, working / layer.tensor)
    exchange = context_buffer_bytes_per_token(
        attention, compute, sum_bytes(compute, layer.software), layer.table
    )[1]
    return np.maximum(working, exchange) + 2.0 * layer.hidden
