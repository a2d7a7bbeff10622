"""Floating-point operations of a model, by matrix.

Symbols   s seq_len   a num_heads   d head_dim   e value_head_dim   h hidden_size   N parameters
          D tokens
Units     FLOP (a multiply and an add are two); every function broadcasts.

Conventions. *Model FLOP* counts attention scores in full (every query against every key), as
Megatron and torch's counters do. *Hardware FLOP* (``hardware_flops``) adds recomputation.

Leaves out: norms, activations, softmax and rotary embeddings, whose time follows from their bytes
(``layer.elementwise_seconds``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from cost_models.arrays import Count, Real, padding
from cost_models.model.adapter_methods import is_composed
from cost_models.model.lora import embedding_is_frozen
from cost_models.model.parameters import active_parameters
from cost_models.model.spec import Attention, DeltaRule, LayerKind, ModelSpec, Weight

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
    return matmul_flops_per_token(kind, kind.weights)


def matmul_flops_per_token(kind: LayerKind | None, weights: Iterable[Weight]) -> float:
    """Forward FLOP of some matrices of a layer (None: of no layer) for one token."""
    share = 0.0
    if kind is not None:
        share = kind.feed_forward.experts_per_token / max(1, kind.feed_forward.num_experts)
    dense = sum(
        2.0 * w.numel * (1 + is_composed(w)) * (1.0 if kind is None else kind.rows_of(w, 1.0))
        for w in weights
        if w.role == "linear"
    )
    return dense + share * sum(2.0 * w.numel for w in weights if w.role == "expert")


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
    """Forward FLOP of all attention cores of a layer for one token of its own sequences.

    ``seq_len``: of these (``LayerKind.own_seq_len``). Scores in full, or (``masked``) only those
    that causal masks and windows keep; linear attention has none.
    """
    if kind.attention.delta_rule is not None:
        return delta_rule_flops_per_token(kind.attention, seq_len)
    keys = keys_per_token(kind.attention, seq_len, masked=masked)
    total = attention_flops_per_token(kind.attention, keys)
    if kind.cross_attention is not None:
        source = kind.cross_attention.keys_of(seq_len)
        keys = keys_per_token(kind.cross_attention, source, masked=masked)
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
    """Forward FLOP of one layer for one token of its own sequences of ``seq_len``."""
    return linear_flops_per_token(kind) + core_flops_per_token(kind, seq_len, masked=masked)


def head_flops_per_token(model: ModelSpec) -> float:
    """Forward FLOP of the output projection (and a masked-LM head's matrices) for one token."""
    dense = sum(2.0 * w.numel for w in model.head if w.role == "linear")
    return model.target_share * (dense + _tied_projection_flops(model))


def _tied_projection_flops(model: ModelSpec) -> float:
    """Forward FLOP of an output projection that is the embedding's matrix, for one token."""
    own = any(w.role == "linear" and w.sharding == "vocab" for w in model.head)
    return 0.0 if own else 2.0 * model.head_multiply


def embedding_flops_per_token(model: ModelSpec) -> float:
    """Forward FLOP of the embedding block for one token: a look-up is none, a projection is."""
    return sum(2.0 * w.numel for w in model.embedding if w.role == "linear")


def forward_flops_per_token(model: ModelSpec, seq_len: Count, *, masked: bool = False) -> Real:
    """Forward FLOP of the whole model for one token (of an encoder-decoder, of its inputs).

    ``model``: ``with_target_length``, where targets have another length.
    """
    of_kind = {
        number: kind.token_share
        * layer_flops_per_token(kind, kind.own_seq_len(seq_len), masked=masked)
        for number in dict.fromkeys(model.pattern)
        for kind in (model.kinds[number],)
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
    idle = forward_only_flops_per_token(model, seq_len, masked=masked)
    return (3.0 * forward - frozen_flops_per_token(model) - idle) * tokens


def frozen_flops_per_token(model: ModelSpec) -> float:
    """Backward FLOP for one token that frozen matrices avoid: they have no weight gradient."""
    outer = head_flops_per_token(model) + embedding_flops_per_token(model)
    saved = outer - trained_outer_flops_per_token(model)
    for kind in (model.kinds[index] for index in model.pattern):
        experts, own = kind.feed_forward, kind.token_share
        share = experts.experts_per_token / max(1, experts.num_experts)
        frozen = (w for w in kind.weights if w.role == "linear" and w.frozen)
        saved += sum(2.0 * w.numel * kind.rows_of(w, own) for w in frozen)
        saved += share * sum(2.0 * w.numel for w in kind.weights if w.role == "expert" and w.frozen)
    return saved


def forward_only_flops_per_token(model: ModelSpec, seq_len: Count, *, masked: bool = False) -> Real:
    """Backward FLOP for one token avoided by layers without a backward pass: inputs and cores.

    The backward pass of a core takes twice its forward FLOP. Weight gradients of frozen matrices
    are counted in ``frozen_flops_per_token``.
    """
    idle = [kind for kind in (model.kinds[i] for i in model.pattern) if kind.forward_only]
    total: Real = np.zeros_like(np.multiply(1.0, seq_len))
    for kind in idle:
        core = 2.0 * core_flops_per_token(kind, kind.own_seq_len(seq_len), masked=masked)
        total = total + kind.token_share * (linear_flops_per_token(kind) + core)
    return total


def trained_outer_flops_per_token(model: ModelSpec) -> float:
    """Backward FLOP for one token of weight gradients of the embedding block and the head."""
    first, last = (
        sum(2.0 * w.numel for w in weights if w.role == "linear" and not w.frozen)
        for weights in (model.embedding, model.head)
    )
    tied = 0.0 if embedding_is_frozen(model) else _tied_projection_flops(model)
    return model.target_share * (tied + last) + first


def rule_of_thumb_ratio(model: ModelSpec, seq_len: Count) -> Real:
    """Exact model FLOP over 6 N D, N the active parameters."""
    exact = 3.0 * forward_flops_per_token(model, seq_len)
    return exact / six_n_d(float(active_parameters(model)), 1.0)
