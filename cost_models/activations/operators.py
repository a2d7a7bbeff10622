"""Bytes that each operator of a layer saves for the backward pass: norms, attention, MLP, router.

Symbols   h hidden_size   F ffn_hidden_size   a, k query and key/value heads   d head_dim
          e value_head_dim   s seq_len   c compute_bytes
Units     bytes a token of all tensor-parallel ranks together, unless a name says otherwise; every
          function broadcasts over plan columns.

Source: Korthikanti et al. (arXiv:2205.05198), eq. 1, generalised; tensors that autograd saves of
the real modules of every family (``python -m benchmarks.memory_truth``). Leaves out: what the
allocator reserves in addition to tensors (``memory.allocator``).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cost_models.activations.delta_rule import around_rule_bytes, rule_bytes
from cost_models.arrays import FP8, FP32, Count, Real
from cost_models.model.spec import Attention, FeedForward, LayerKind
from hardware_profiles.software.trainer import SoftwareProfile

SINK_FEATURES = 8  # that queries and keys get for their product with a sink, in our executor
# queries whose capped scores are alive at once: executor.ops.soft_cap.QUERY_BLOCK
CAPPED_BLOCK = 128.0


def norm_bytes(
    kind: LayerKind, width: float, compute_bytes: float, software: SoftwareProfile
) -> float:
    """Bytes that one norm over ``width`` features saves: input, normalised copy, statistics."""
    own, statistics = software.activations, software.activations.layer_norm_statistics_bytes
    if kind.norm in ("rms", "rms_mixed"):
        saved = own.rms_norm_saved * compute_bytes + own.rms_norm_saved_fp32_bytes
        if kind.norm == "rms_mixed" and own.rms_norm_saved_fp32_bytes and compute_bytes < FP32:
            saved += compute_bytes
    elif kind.norm == "rms_in_fp32":
        saved = own.rms_norm_in_fp32_saved * compute_bytes + own.rms_norm_in_fp32_saved_fp32_bytes
    elif kind.norm == "layer_in_fp32":
        saved = own.layer_norm_in_fp32_saved * compute_bytes
        saved += own.layer_norm_in_fp32_saved_fp32_bytes
    else:
        saved = own.layer_norm_saved * compute_bytes
    if kind.norm.startswith("rms"):
        statistics = own.rms_norm_statistics_bytes
    return saved * width + statistics


def saves_input(kind: LayerKind, compute_bytes: float, software: SoftwareProfile) -> bool:
    """Whether a layer saves its input itself, not a copy in fp32.

    A fused RMS norm does, which saves no more than its input.
    """
    if kind.norms_after and kind.num_norms == 2:  # no norm before: the matrices save it
        return True
    if kind.norm in ("layer", "rms_mixed"):
        return True
    statistics = software.activations.rms_norm_statistics_bytes
    if "rms" in kind.norm and norm_bytes(kind, 1, compute_bytes, software) - statistics <= (
        compute_bytes
    ):
        return True
    return compute_bytes >= FP32 and kind.norm != "layer_in_fp32"


def attention_bytes(attention: Attention, compute_bytes: float) -> float:
    """Queries, keys, values and the output, saved by the attention core and the output matrix.

    c (a d + k d + k e + a e), of cross-attention s / s' times k d + k e for s' queries that read s
    keys; c 2 a e more of a gated output; linear attention:
    ``delta_rule.around_rule_bytes``
    """
    if attention.delta_rule is not None:
        return around_rule_bytes(attention, compute_bytes)
    query = attention.num_heads * attention.head_dim
    key = attention.num_kv_heads * attention.head_dim
    value = attention.num_kv_heads * attention.value_head_dim
    keys = float(attention.keys_of(1.0)) * (key + value)
    output = attention.num_heads * attention.value_head_dim
    gate = 2 * output if attention.gated else 0  # its sigmoid, and the gated output
    return compute_bytes * (query + keys + output + gate)


def score_bytes(
    attention: Attention,
    seq_len: Count,
    kernel: str,
    dropout: bool,
    software: SoftwareProfile,
    compute_bytes: float = 2.0,
) -> Real:
    """Bytes that the attention core saves: softmax and dropout (eager), or the log-sum-exp (flash).

    ``seq_len``: tokens of a sequence of queries.

    eager  5 a s  a token with dropout in 16 bits (Korthikanti eq. 1: 5 a s^2 b)
           c a s, with dropout (2 c + 1) a s, where softmax is in compute precision (T5)
           (4 + c) a s, with dropout one more, of these under torch.autocast, whose softmax is in
           fp32 (aten/src/ATen/autocast_mode.h) and whose matmul casts what it gets
    flash  4 a    a token (Dao, arXiv:2307.08691, sec. 3.1: one fp32 number a row and head);
           c (a - k) (d + e) where a window needs a mask, which a kernel with grouped queries
           does not take: keys and values of every query head
           2 c a (d - e) + c a e where values are narrower than keys (MLA): padded values and
           outputs, and the output as the next matrix reads it
           sinks: keys and values of every query head, 4 times 8 features more, and that output
    linear attention: ``delta_rule.rule_bytes``
    """
    if attention.delta_rule is not None:
        return rule_bytes(attention, attention.delta_rule, seq_len, kernel, compute_bytes)
    if kernel == "flash":
        repeated = attention.num_heads - attention.num_kv_heads
        width = attention.head_dim + attention.value_head_dim
        masked = needs_window_mask(attention, seq_len, software)
        padded = attention.head_dim - attention.value_head_dim
        more = 0.0
        if software.activations.window_needs_mask and (padded or attention.sinks):
            sinks = SINK_FEATURES * attention.sinks
            more = attention.num_heads * (2.0 * padded + 4.0 * sinks + attention.value_head_dim)
        every = compute_bytes * repeated * width
        kept = FP32 * attention.num_heads + compute_bytes * more
        return kept + np.where(masked, every, 0.0)
    # in fp32 the softmax needs no second copy
    copies = software.activations.eager_scores_bytes if compute_bytes < FP32 else compute_bytes
    copies += compute_bytes if attention.capped else 0.0  # tanh keeps what it gives
    dropped = software.activations.attention_dropout_bytes + max(0.0, compute_bytes - 2.0)
    per_pair = copies + (dropped if dropout else 0.0)
    if not attention.softmax_in_fp32:  # weights; a mask and what is left of them
        mask = software.activations.dropout_mask_bytes
        dropped = mask + compute_bytes
        per_pair = compute_bytes + (dropped if dropout else 0.0)
        if software.precision.autocasts_weights and compute_bytes < FP32:  # casts both ways
            per_pair = FP32 + compute_bytes + (mask if dropout else 0.0)
    keys: Real = np.multiply(1.0, attention.keys_of(seq_len))
    return per_pair * attention.num_heads * keys


def score_gradient_bytes(
    attention: Attention,
    seq_len: Count,
    dropout: bool,
    software: SoftwareProfile,
    compute_bytes: float,
) -> Real:
    """Bytes a token, besides saved tensors, while the softmax of eager attention runs backward.

    n tensors of the scores, a s of each token (the gradient, what the kernel makes inside, the
    result), in w bytes:

        n w - c - mask        softmax in w = 4 bytes: the saved 16-bit weights and the mask of their
                              dropout are freed
        n c, (n - 1) c        in compute precision; with dropout the dropped weights are freed

    Source: torch 2.13, aten/src/ATen/native/cuda/SoftMax.cu (n = 3); Megatron-LM, fused_kernels
    (n = 1). Leaves out: the gradients of queries, keys and values.

    Llama 3 8B, a sequence of 4096 tokens in bf16: 3 x 4 - 2 bytes of 32 x 4096 scores a token.

    >>> from cost_models.model.families import model_spec
    >>> from cost_models.model.presets import load_preset
    >>> from hardware_profiles.software.trainer import software_profile
    >>> model = model_spec(load_preset("llama-3-8b").config, name="llama-3-8b")
    >>> attention = model.kinds[0].attention
    >>> software = software_profile("hf-trainer")
    >>> float(score_gradient_bytes(attention, 4096, False, software, 2.0))
    1310720.0
    """
    tensors, drops = software.activations.score_gradients, float(dropout)
    wide = attention.softmax_in_fp32 and software.activations.eager_scores_bytes >= FP32
    if compute_bytes < FP32 and (wide or software.precision.autocasts_weights):
        mask = software.activations.dropout_mask_bytes * drops
        each = tensors * FP32 - compute_bytes - mask
    else:
        each = max(1.0, tensors - drops) * compute_bytes
    return each * attention.num_heads * np.multiply(1.0, seq_len)


def needs_window_mask(
    attention: Attention, seq_len: Count, software: SoftwareProfile
) -> np.ndarray:
    """Whether a flash kernel needs a mask for the window."""
    window = attention.window
    needed = window is not None and software.activations.window_needs_mask and not attention.capped
    sinks = attention.sinks and software.activations.window_needs_mask
    return (needed & np.greater(seq_len, window or 0)) | sinks


def activation_copies(feed_forward: FeedForward, software: SoftwareProfile) -> float:
    """Return how many tensors of its own width an activation saves."""
    saved, autocast = software.activations.activation_saved, software.precision.autocasts_weights
    return by_activation(saved, feed_forward, saved["default"], autocast=autocast)


def by_activation(
    figures: Mapping[str, float], feed_forward: FeedForward, default: float, *, autocast: bool
) -> float:
    """Return the figure of an activation; its own under autocast, where it has one."""
    name = feed_forward.activation
    alone = figures.get(name, default)
    return figures.get(f"{name}-autocast", alone) if autocast else alone


def feed_forward_bytes(
    feed_forward: FeedForward, compute_bytes: float, software: SoftwareProfile
) -> float:
    """Between the matrices of the MLP, of all experts that a token visits.

    plain   c (saved by the activation + 1) F     its output feeds the second matrix
    gated   c (saved by the activation + 3) F     activation, up projection, product
    fp8     a byte instead of c of what the activation saves; its output feeds the second matrix
    experts k times that, and the shared expert's
    k-bit   4 bytes but for the second matrix's input, which adapters read in c: bitsandbytes'
            Linear4bit gives what it gets, and peft's preparation makes that fp32
    """
    between = activation_copies(feed_forward, software) + (2.0 if feed_forward.gated else 0.0)
    given = FP32 if software.frozen.unquantised_in_fp32 else compute_bytes
    saved = FP8 if software.activations.activation_inputs_in_fp8 else max(given, compute_bytes)
    each = between * saved + compute_bytes
    one = each * feed_forward.ffn_hidden_size
    if not feed_forward.num_experts:
        return one
    shared = each * feed_forward.shared_ffn_hidden_size
    return feed_forward.experts_per_token * one + shared


def of_routed(feed_forward: FeedForward, between: Real) -> Real:
    """Part of the bytes between a mixture's matrices that its routed experts save, k F of k F + S.

    S: the width of the shared experts.
    """
    width = feed_forward.experts_per_token * feed_forward.ffn_hidden_size
    return between * width / (width + feed_forward.shared_ffn_hidden_size)


def routed_bytes(
    feed_forward: FeedForward, hidden_size: int, compute_bytes: float, software: SoftwareProfile
) -> float:
    """Around the experts: the router's input, the k copies of the token and its k outputs.

        c h (k + o k + 1) + the router's tensors for each of E experts

    o: 1 where the outputs are saved for their product with the routing weights, 0 where these
    multiply inside the experts' activation.

    A router in fp32 (DeepSeek) saves 4 h instead of c h, 0 if everything is in fp32. On average
    over ranks, also where experts lie on other ranks (uneven routing: ``activations.layer``).
    """
    if not feed_forward.num_experts:
        return 0.0
    saved = 1.0 + software.activations.expert_outputs_saved
    rows = saved * feed_forward.experts_per_token * compute_bytes
    return rows * hidden_size + router_bytes(feed_forward, hidden_size, compute_bytes, software)


def router_bytes(
    feed_forward: FeedForward, hidden_size: int, compute_bytes: float, software: SoftwareProfile
) -> float:
    """Saved bytes of the router of a mixture: its input, and its tensors for each expert."""
    read = compute_bytes
    if feed_forward.router_in_fp32 and software.activations.router_copies_input:
        read = FP32 if compute_bytes < FP32 else 0.0
    return read * hidden_size + software.activations.router_saved_bytes * feed_forward.num_experts


def head_norms_bytes(kind: LayerKind, compute_bytes: float, software: SoftwareProfile) -> float:
    """Bytes of the norms of queries and keys."""
    attention = kind.attention
    if not attention.qk_norm:
        return 0.0
    heads = attention.num_heads + attention.num_kv_heads
    norms = heads if attention.qk_norm == "head" else 2.0
    width = attention.head_dim * heads / norms
    return norms * norm_bytes(kind, width, compute_bytes, software)
