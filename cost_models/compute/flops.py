"""Floating-point operations, by matrix.

Symbols   s seq_len   a num_heads   d head_dim   e value_head_dim   h hidden_size   N parameters
          D tokens
Units     FLOP (a multiply and an add are two); every function broadcasts.

Conventions. *Model FLOP* counts attention scores in full (every query against every key), as
Megatron and torch's counters do. *Hardware FLOP* adds recomputation.

Leaves out: norms, activations, softmax and rotary embeddings, whose time follows from their bytes
(``layer.elementwise_seconds``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from cost_models.arrays import Count, Real, padding
from cost_models.communication.context_parallel import computed_score_share, is_blockwise
from cost_models.model.adapter_methods import SECOND, is_composed
from cost_models.model.lora import adapter_names, embedding_is_frozen
from cost_models.model.parameters import active_parameters
from cost_models.model.spec import Attention, DeltaRule, LayerKind, ModelSpec, Weight
from cost_models.partition.recomputed_layers import RecomputedLayers, repeated_by_setting
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.plan.plan import PlanTable, split_layers
from cost_models.plan.recompute import (
    CORE,
    EVERY_SECOND_MM,
    FULL,
    by_operator,
    repeats_module,
    repeats_modules,
)
from cost_models.plan.workload import Workload

# FLOP of an attention core's backward pass over its forward's, by kernel
# Source: Dao, FlashAttention-2 (arXiv:2307.08691), sec. 3.1.2: five matmuls for two
CORE_BACKWARD: Final = {"eager": 2.0, "flash": 2.5}
CONVOLUTION: Final = "conv1d.weight"  # of linear attention


def six_n_d(num_parameters: Real, tokens: Real) -> Real:
    """Training FLOP by the rule of thumb 6 N D: 2 forward, 4 backward for each parameter and token.

    Source: Kaplan et al., Scaling Laws (arXiv:2001.08361), sec. 2.1. Leaves out: attention scores;
    embeddings count as if they were multiplied.

    >>> six_n_d(175e9, 300e9)
    3.15e+23
    """
    return 6.0 * num_parameters * tokens


def linear_flops_per_token(kind: LayerKind) -> float:
    """Forward FLOP of a layer's matrices for one token: 2 (in) out each.

    An expert's matrices meet experts_per_token of num_experts of the tokens; an adapter's composed
    matrix is as large as the frozen one. Leaves out: making it, once a pass.
    """
    return _matmul_flops(kind, kind.weights)


def _matmul_flops(kind: LayerKind | None, weights: Iterable[Weight]) -> float:
    """Forward FLOP of some matrices of a layer (None: of no layer) for one token."""
    share = 0.0
    if kind is not None:
        share = kind.feed_forward.experts_per_token / max(1, kind.feed_forward.num_experts)
    dense = sum(2.0 * w.numel * (1 + is_composed(w)) for w in weights if w.role == "linear")
    return dense + share * sum(2.0 * w.numel for w in weights if w.role == "expert")


def _matmul_flops_of_ranks(
    weights: Iterable[Weight], table: PlanTable, kind: LayerKind | None = None
) -> Real:
    """Forward FLOP of some matrices for one token, of all tensor-parallel ranks together.

    A matrix that is whole on each rank meets the rank's tokens: all of them, unless the ranks share
    the sequence. Routers meet all tokens where the experts are cut, adapters of cut matrices
    always.
    """
    ranks = 1.0 * table.tensor_parallel
    shared = np.where(table.sequence_parallel, 1.0, ranks)
    routers = np.where(table.expert_tensor_parallel, ranks, 1.0)
    cut = _adapters_of_cut_matrices(kind)
    total: Real = np.zeros(len(table))
    for weight in weights:
        copies: Real = 1.0
        if weight.sharding == "replicate":
            copies = routers if weight.part == "router" else shared
            copies = ranks if weight.name in cut else copies
        total = total + copies * _matmul_flops(kind, (weight,))
    return total


def _adapters_of_cut_matrices(kind: LayerKind | None) -> set[str]:
    weights = () if kind is None else kind.weights
    cut = [weight.name for weight in weights if weight.sharding != "replicate"]
    return {adapter for name in cut for adapter in adapter_names(name)}


def attention_flops_per_token(attention: Attention, num_keys: Real) -> Real:
    """Forward FLOP of the attention core for one query token.

        2 a (d) k   scores  +  2 a (k) e   values        k keys

    Source: Narayanan et al. (arXiv:2104.04473), appendix: 4 B s^2 h a layer. Leaves out: softmax,
    mask and dropout, which are no matmuls.
    """
    return (
        2.0
        * attention.num_heads
        * (attention.head_dim + attention.value_head_dim)
        * np.asarray(num_keys, dtype=float)
    )


def delta_rule_flops_per_token(attention: Attention, seq_len: Count | Real) -> Real:
    """Forward FLOP of linear attention by the gated delta rule for one token.

        a (4 C d + 2 C e + 6 d e) ceil(s / C) C / s     a value heads, in chunks of C tokens
        2 K (2 k d + a e) (s + K - 1) / s               the convolution over K tokens

    In a chunk, products of keys with keys and with queries (C d each) and of scores with values
    (C e); between chunks, two reads of a head's state and one update (d e each). Leaves out: the
    triangular systems of C equations, which torch's counters leave out too.

    Source: Yang et al., Gated Delta Networks (arXiv:2412.06464), sec. 3.3; transformers
    (modeling_qwen3_next.py, torch_chunk_gated_delta_rule).
    """
    rule = attention.delta_rule
    if rule is None:
        return np.zeros_like(np.multiply(1.0, seq_len))
    key, value = attention.head_dim, attention.value_head_dim
    each = rule.chunk * (4.0 * key + 2.0 * value) + 6.0 * key * value
    products = attention.num_heads * each * padding(seq_len, rule.chunk)
    return products + _convolution_flops_per_token(attention, rule, seq_len)


def _convolution_flops_per_token(
    attention: Attention, rule: DeltaRule, seq_len: Count | Real
) -> Real:
    """Forward FLOP of the convolution, padded in front of the sequence, for one token."""
    tokens, kernel = np.maximum(1.0, np.multiply(1.0, seq_len)), float(rule.conv_kernel)
    return 2.0 * kernel * attention.conv_channels * (tokens + kernel - 1.0) / tokens


def delta_rule_backward_flops_per_token(attention: Attention, seq_len: Count | Real) -> Real:
    """Backward FLOP of linear attention for one token: each product twice, and the systems'.

        2 F + a (2 C (d + e) ceil(s / C) C - 8 C d e) / s

    The triangular systems' gradients are products (C d and C e). The first chunk needs no gradient
    of its initial state, and no later chunk reads the last one's state.

    Source: products of the backward pass of transformers' torch_chunk_gated_delta_rule, counted by
    torch's FlopCounterMode.

    >>> one = Attention(32, 16, 128, 128, delta_rule=DeltaRule(conv_kernel=4))
    >>> float(delta_rule_backward_flops_per_token(one, 4096)) / 1e6
    10.551392
    """
    rule = attention.delta_rule
    if rule is None:
        return np.zeros_like(np.multiply(1.0, seq_len))
    tokens = np.maximum(1.0, np.multiply(1.0, seq_len))
    key, value = attention.head_dim, attention.value_head_dim
    systems = 2.0 * rule.chunk * (key + value) * padding(tokens, rule.chunk)
    unneeded = 8.0 * rule.chunk * key * value / tokens
    twice = 2.0 * delta_rule_flops_per_token(attention, seq_len)
    return twice + attention.num_heads * (systems - unneeded)


def mean_keys(first: Real, last: Real, window: int | None, *, chunked: bool = False) -> Real:
    """Mean number of keys of a token while a sequence grows from ``first`` to ``last`` tokens.

    Sliding window: mean of min(s, w):

        (a + b) / 2          b <= w
        w                    w <= a
        in between           the mean of the growing part and of w, weighted by their lengths

    Chunks of w tokens: mean of s mod w, that is (F(b) - F(a)) / (b - a) with
    F(s) = floor(s / w) w^2 / 2 + (s mod w)^2 / 2.

    Source: derived; the tests compare it with the mean over all tokens.

    >>> float(mean_keys(0.0, 100.0, None)), float(mean_keys(0.0, 100.0, 50))
    (50.0, 37.5)
    >>> float(mean_keys(0.0, 100.0, 50, chunked=True))
    25.0
    """
    a, b = np.multiply(1.0, first), np.maximum(np.multiply(1.0, last), first)
    if window is None:
        return 0.5 * (a + b)
    length = np.where(b > a, b - a, 1.0)
    if chunked:
        whole = _keys_in_chunks(b, window) - _keys_in_chunks(a, window)
        return np.where(b > a, whole / length, a - window * np.floor(a / window))
    low, high = np.minimum(a, window), np.minimum(b, window)
    grows = 0.5 * (low + high) * (high - low)
    flat = window * ((b - a) - (high - low))
    return np.where(b > a, (grows + flat) / length, low)


def _keys_in_chunks(tokens: Real, chunk: int) -> Real:
    """Sum of the keys of so many tokens, each of which sees its own chunk up to itself."""
    full = np.floor(tokens / chunk)
    return 0.5 * (full * float(chunk) ** 2 + (tokens - full * chunk) ** 2)


def keys_per_token(attention: Attention, seq_len: Count | Real, *, masked: bool = False) -> Real:
    """Mean number of keys of a token: all of a sequence, or those that its mask keeps."""
    whole = np.multiply(1.0, seq_len)
    if not masked:
        return whole
    if attention.causal:
        return mean_keys(0.0, whole, attention.window, chunked=attention.chunked)
    return np.minimum(whole, np.inf if attention.window is None else attention.window)


def core_flops_per_token(kind: LayerKind, seq_len: Count, *, masked: bool = False) -> Real:
    """Forward FLOP of all attention cores of a layer for one token.

    Scores in full, or (``masked``) only those that causal masks and windows keep; linear attention
    has none.
    """
    if kind.attention.delta_rule is not None:
        return delta_rule_flops_per_token(kind.attention, seq_len)
    keys = keys_per_token(kind.attention, seq_len, masked=masked)
    total = attention_flops_per_token(kind.attention, keys)
    if kind.cross_attention is not None:
        keys = keys_per_token(kind.cross_attention, seq_len, masked=masked)
        total = total + attention_flops_per_token(kind.cross_attention, keys)
    return total


def core_backward_flops_per_token(kind: LayerKind, seq_len: Count, kernel: str) -> Real:
    """Backward FLOP that a dispatcher counts of all attention cores of a layer for one token.

    Two products for each one (eager), or five for two (flash); a frozen convolution has no gradient
    of its weights.
    """
    rule = kind.attention.delta_rule
    if rule is not None and kernel == "eager":
        found = delta_rule_backward_flops_per_token(kind.attention, seq_len)
        if any(w.frozen and w.name.endswith(CONVOLUTION) for w in kind.weights):
            found = found - _convolution_flops_per_token(kind.attention, rule, seq_len)
        return found
    return CORE_BACKWARD[kernel] * core_flops_per_token(kind, seq_len)


def layer_flops_per_token(kind: LayerKind, seq_len: Count, *, masked: bool = False) -> Real:
    """Forward FLOP of one layer for one token."""
    return linear_flops_per_token(kind) + core_flops_per_token(kind, seq_len, masked=masked)


def head_flops_per_token(model: ModelSpec) -> float:
    """Forward FLOP of the output projection (and a masked-LM head's matrices) for one token."""
    dense = sum(2.0 * w.numel for w in model.head if w.role == "linear")
    listed = any(w.role == "linear" and w.sharding == "vocab" for w in model.head)
    return dense if listed else dense + 2.0 * model.head_multiply


def embedding_flops_per_token(model: ModelSpec) -> float:
    """Forward FLOP of the embedding block for one token: a look-up is none, a projection is."""
    return sum(2.0 * w.numel for w in model.embedding if w.role == "linear")


def forward_flops_per_token(model: ModelSpec, seq_len: Count, *, masked: bool = False) -> Real:
    """Forward FLOP of the whole model for one token."""
    of_kind = {
        kind: layer_flops_per_token(model.kinds[kind], seq_len, masked=masked)
        for kind in dict.fromkeys(model.pattern)
    }
    layers = sum(of_kind[kind] for kind in model.pattern)
    return layers + head_flops_per_token(model) + embedding_flops_per_token(model)


def model_flops_per_step(
    model: ModelSpec, seq_len: Count, global_batch_size: Count, *, masked: bool = False
) -> Real:
    """Model FLOP of one training step: forward once, backward two matmuls for each one.

    The backward pass of a frozen matrix is one matmul. Scores in full, or (``masked``) only those
    that causal masks and windows keep.
    """
    tokens = np.multiply(1.0, seq_len) * global_batch_size
    forward = forward_flops_per_token(model, seq_len, masked=masked)
    idle = forward_only_flops_per_token(model, seq_len, 2.0, masked=masked)
    return (3.0 * forward - frozen_flops_per_token(model) - idle) * tokens


def frozen_flops_per_token(model: ModelSpec) -> float:
    """Backward FLOP for one token that frozen matrices avoid: they have no weight gradient."""
    outer = head_flops_per_token(model) + embedding_flops_per_token(model)
    saved = outer - trained_outer_flops_per_token(model)
    for kind in (model.kinds[index] for index in model.pattern):
        experts = kind.feed_forward
        share = experts.experts_per_token / max(1, experts.num_experts)
        saved += sum(2.0 * w.numel for w in kind.weights if w.role == "linear" and w.frozen)
        saved += share * sum(2.0 * w.numel for w in kind.weights if w.role == "expert" and w.frozen)
    return saved


def forward_only_flops_per_token(
    model: ModelSpec, seq_len: Count, core_backward: Real, *, masked: bool = False
) -> Real:
    """Backward FLOP for one token avoided by layers without a backward pass: inputs and cores.

    ``core_backward``: of a core, over its forward FLOP. Weight gradients of frozen matrices are
    counted in ``frozen_flops_per_token``.
    """
    idle = [kind for kind in (model.kinds[i] for i in model.pattern) if kind.forward_only]
    total: Real = np.zeros_like(np.multiply(1.0, seq_len))
    for kind in idle:
        core = core_backward * core_flops_per_token(kind, seq_len, masked=masked)
        total = total + linear_flops_per_token(kind) + core
    return total


def hardware_flops_per_step(
    model: ModelSpec,
    workload: Workload,
    table: PlanTable,
    layer_ranges: Sequence[tuple[int, int]] | None = None,
    stage_recompute_layers: tuple[int, ...] | None = None,
) -> Real:
    """FLOP of matmuls and attention of all ranks in one step, as a dispatcher counts them.

    Forward once; backward two matmuls for each one, and five for the two of a flash kernel, which
    computes the scores again. Full recomputation repeats a layer up to the last tensor that is
    needed (its last matrix only where a norm or a dropout follows), selective the attention core,
    selective_ops only an eager core, ops:every-2nd-mm that and ``repeated_matrices``, a set of
    modules their matrices and cores. ``layer_ranges``: the stages of a single plan, else even ones;
    they matter if only some layers of a stage recompute. ``stage_recompute_layers``: of each stage,
    of a single plan. Ring and all-gather attention skip blocks that a causal mask hides. Leaves
    out: rows by which experts' batches are padded, blocks that a sliding window hides.

    Source: Dao et al. (arXiv:2205.14135), sec. 3.1; Korthikanti et al. (arXiv:2205.05198), sec. 5.
    """
    tokens = 1.0 * workload.seq_len * workload.global_batch_size
    share = computed_score_share("eager", table.context_parallel, is_blockwise(table))
    core_backward = CORE_BACKWARD[workload.attention_kernel] * share
    layers = [model.kinds[kind] for kind in model.pattern]
    core: Real = float(sum(core_flops_per_token(kind, workload.seq_len) for kind in layers))
    core += float(
        sum(
            core_backward_flops_per_token(kind, workload.seq_len, workload.attention_kernel)
            for kind in layers
        )
    )
    core = core * share
    idle = [kind for kind in layers if kind.forward_only]
    core -= sum(core_backward * core_flops_per_token(kind, workload.seq_len) for kind in idle)
    linear: Real = np.zeros(len(table))
    for kind in layers:
        trained = [weight for weight in kind.weights if not weight.frozen]
        trained += [replace(weight, adapter="") for weight in kind.weights if is_composed(weight)]
        for weights in (kind.weights, trained, () if kind.forward_only else kind.weights):
            linear = linear + _matmul_flops_of_ranks(weights, table, kind)
    once = linear + _outer_flops(model, table) + core
    # tensor-parallel ranks compute the gradient of the projection's input nevertheless
    unneeded = np.where(table.tensor_parallel > 1, 0.0, _unneeded_head_gradient(model))
    full = np.where(table.recompute == FULL, 1.0, 0.0)
    selective = np.where(repeats_module(table.recompute, CORE), 1.0, 0.0)
    ops = np.where(by_operator(table.recompute), 1.0, 0.0)
    repeats = _recomputed_layers(model, table, layer_ranges, stage_recompute_layers)
    avoided = _avoided_flops(model, table, [n * full for n in repeats])
    # an eager core ends with its second matmul, whose result the backward pass does not need
    eager = 1.0 if workload.attention_kernel == "eager" else 0.0
    again: Real = np.zeros(len(table))
    for number, kind in zip(repeats, model.kinds, strict=True):
        if kind.forward_only:
            continue
        scores = share * core_flops_per_token(kind, workload.seq_len)
        whole = _matmul_flops_of_ranks(kind.weights, table, kind) + scores
        whole = whole - _last_matrix(model, kind)
        of_core = scores - share * eager * value_flops_per_token(kind, workload.seq_len)
        again = again + number * (full * whole + selective * of_core)
        again = again + number * ops * eager * scores
        experts = [weight for weight in kind.weights if weight.role == "expert"]
        every_second = np.equal(table.recompute, EVERY_SECOND_MM)
        again = again + np.where(every_second, number * _matmul_flops(kind, experts), 0.0)
        for repeats_it, matrices in repeated_by_setting(kind, table):
            matmuls = _repeated_flops(model, kind, matrices, table)
            again = again + np.where(repeats_it, number * matmuls, 0.0)
    return tokens * (once - unneeded + again - avoided)


def _outer_flops(model: ModelSpec, table: PlanTable) -> Real:
    """FLOP of the embedding block and the head for one token: forward and backward."""
    once = [*model.embedding, *model.head]
    often = [w for w in once if w.sharding == "replicate"]
    passes = 1.0 if embedding_is_frozen(model) else 2.0
    found: Real = 2.0 * head_flops_per_token(model) + trained_outer_flops_per_token(model)
    found = found + passes * embedding_flops_per_token(model)
    for weights in (often, often, [w for w in often if not w.frozen]):
        found = found + _matmul_flops_of_ranks(weights, table) - _matmul_flops(None, weights)
    return found


def _recomputed_layers(
    model: ModelSpec,
    table: PlanTable,
    layer_ranges: Sequence[tuple[int, int]] | None,
    by_stage: tuple[int, ...] | None,
) -> list[Real]:
    """Return how many layers of each kind are recomputed, if the plan recomputes; columns."""
    found: list[Real] = [np.zeros(len(table)) for _ in model.kinds]
    num_stages = table.num_stages
    keys = np.stack([num_stages, table.recompute_layers, table.recompute_every])
    for key in np.unique(keys, axis=1).T.tolist():
        recomputed = RecomputedLayers(key[1], key[2], by_stage)
        ranges = layer_ranges or split_layers(model.num_layers, key[0])
        layers = [i for stage, r in enumerate(ranges) for i in recomputed.of_stage(stage, r)]
        kinds = [model.pattern[i] for i in layers]
        rows = np.all(np.equal(keys.T, key), axis=1)
        for number, column in enumerate(found):
            column[rows] = kinds.count(number)  # type: ignore[index]
    return found


def _avoided_flops(model: ModelSpec, table: PlanTable, repeats: Sequence[Real]) -> Real:
    """FLOP for one token of adapters' gradients and matmuls that the backward pass does not need.

    Matrices that read the frozen embedding need no gradient of their input; the executor's
    functions of tensor parallelism and of split backward passes compute it nevertheless.
    """
    kinds = [model.kinds[kind] for kind in model.pattern]
    avoided: Real = np.zeros(len(table))
    for number, kind in enumerate(model.kinds):
        avoided = avoided + repeats[number] * _last_adapter(model, kind)
    avoided = table.tensor_parallel * avoided
    first = next((kind for kind in kinds if not kind.forward_only), None)
    if first is None or not _input_needs_none(model, first):
        return avoided
    parts = ["attention"]
    if first.parallel_residual:
        mlp = [w for w in first.weights if w.role == "linear" and w.part == "mlp"]
        if all(w.frozen for w in mlp):  # and nothing below it is trained
            avoided = avoided + _matmul_flops(first, mlp)
        else:
            parts.append("mlp")
    reads = [w for w in first.weights if w.role == "linear" and w.part in parts]
    reads = [w for w in reads if w.sharding != "row" and not w.name.endswith(SECOND)]
    latent = {rank for rank in (first.attention.q_lora_rank, first.attention.kv_lora_rank) if rank}
    reads = [w for w in reads if w.shape[0 if w.transposed else 1] not in latent]
    cut = _adapters_of_cut_matrices(first)
    whole = [w for w in reads if w.sharding == "replicate" and w.name not in cut]
    idle = sum(2.0 * w.numel for w in reads if w not in whole)
    idle *= 1.0 + bool(model.bridge)  # a decoder's first matrices are of the encoder's sizes
    plain = (table.tensor_parallel == 1) & ~np.isin(table.pipeline_schedule, SPLIT_CODES)
    avoided = avoided + _matmul_flops_of_ranks(whole, table, first)
    return avoided + np.where(plain, idle, 0.0)


def value_flops_per_token(kind: LayerKind, seq_len: Count) -> float:
    """Forward FLOP of the last matmul of a layer's attention cores for one token.

    Scores with values: 2 a e s. Linear attention: the update of the last chunk's state, 2 a C d e
    for a sequence.
    """
    own, rule = kind.attention, kind.attention.delta_rule
    if rule is not None:
        update = 2.0 * rule.chunk * own.num_heads * own.head_dim * own.value_head_dim
        return float(update / np.multiply(1.0, seq_len))
    cores = [kind.attention] + ([kind.cross_attention] if kind.cross_attention else [])
    return float(
        sum(2.0 * a.num_heads * a.value_head_dim * np.multiply(1.0, seq_len) for a in cores)
    )


def trained_flops_per_token(weights: Iterable[Weight]) -> float:
    """Backward FLOP for one token of weight gradients; frozen weights have none."""
    return sum(2.0 * w.numel for w in weights if w.role == "linear" and not w.frozen)


def trained_outer_flops_per_token(model: ModelSpec) -> float:
    """Backward FLOP for one token of weight gradients of the embedding block and the head."""
    listed = any(w.role == "linear" and w.sharding == "vocab" for w in model.head)
    tied = 0.0 if listed or embedding_is_frozen(model) else 2.0 * model.head_multiply
    return tied + trained_flops_per_token((*model.embedding, *model.head))


def _unneeded_head_gradient(model: ModelSpec) -> float:
    """Backward FLOP for one token of a gradient of the head's input that no weight needs."""
    idle = all(model.kinds[kind].forward_only for kind in model.pattern)
    needed = not idle or any(w.part == "norm" and not w.frozen for w in model.head)
    return 0.0 if needed else head_flops_per_token(model)


def _input_needs_none(model: ModelSpec, kind: LayerKind) -> bool:
    """Whether the lowest matrices with a backward pass need no gradient of their input.

    No weight below them is trained, nor a norm before them.
    """
    norms = [w for w in kind.weights if w.part == "norm" and w.shape == (model.hidden_size,)]
    behind = kind.norms_after or all(w.frozen for w in norms)
    return embedding_is_frozen(model) and behind


def _last_matrix(model: ModelSpec, kind: LayerKind) -> float:
    """Forward FLOP of the last matrix of a layer, where recomputation stops before it."""
    if kind.norms_after or model.hidden_dropout > 0:
        return 0.0
    rows = _rows(kind)
    return 2.0 * rows[-1].numel if rows else 0.0


def _repeated_flops(
    model: ModelSpec, kind: LayerKind, matrices: Sequence[Weight], table: PlanTable
) -> Real:
    """Forward FLOP of matrices that are computed again, for one token.

    Recomputation stops before its last matrix, of a module always, of a layer see ``_last_matrix``;
    every tensor-parallel rank multiplies with a whole small matrix of an adapter.
    """
    if all(w.part == "shared_experts" for w in matrices):  # without their gate
        shared = [w for w in matrices if w.sharding != "replicate"]
        return _matmul_flops(kind, shared[:-1])
    total = _matmul_flops_of_ranks(matrices, table, kind)
    rows = _rows(kind)[-1:]
    stops = repeats_modules(table.recompute) | bool(_last_matrix(model, kind))
    if not rows or rows[0] not in matrices:
        return total
    second = adapter_names(rows[0].name)[1] if rows[0].quantised else ""
    again = sum(2.0 * w.numel for w in matrices if w.name == second)
    skipped = 2.0 * rows[0].numel + table.tensor_parallel * again
    return total - np.where(stops, skipped, 0.0)


def _last_adapter(model: ModelSpec, kind: LayerKind) -> float:
    """Forward FLOP of its adapter B, if a 4-bit base runs last and saves no tensor."""
    rows = _rows(kind)
    if not _last_matrix(model, kind) or not rows[-1].quantised:
        return 0.0
    (second,) = (w for w in kind.weights if w.name == adapter_names(rows[-1].name)[1])
    return 2.0 * second.numel


def _rows(kind: LayerKind) -> list[Weight]:
    """Return the row-cut matrices of a dense feed-forward."""
    return [
        w
        for w in kind.weights
        if w.role == "linear" and w.sharding == "row" and w.part == "mlp" and not w.is_adapter
    ]


def rule_of_thumb_ratio(model: ModelSpec, seq_len: Count) -> Real:
    """Exact model FLOP over 6 N D, N the active parameters."""
    exact = 3.0 * forward_flops_per_token(model, seq_len)
    return exact / six_n_d(float(active_parameters(model)), 1.0)
