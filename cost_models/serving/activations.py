"""Bytes of live activations in one forward pass of a serving engine, which saves none.

Symbols   h hidden_size   F ffn_hidden_size   a num_heads   d head_dim   e value_head_dim
          k num_kv_heads   E, n experts, and experts of a token   V vocab_size
          t tensor_parallel   ep expert_parallel   dp data_parallel   c compute_bytes
          T tokens of a step   N sequences   s context_len
Units     bytes; every argument is a number or a column of a table.

Source: tensors of vLLM's kernels (vllm/model_executor and vllm/v1/attention), added up. Leaves out:
CUDA graphs and the context (``memory``).
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.model.spec import Attention, FeedForward, LayerKind
from cost_models.serving.kv_cache import kv_heads_on_rank
from hardware_profiles.software.serving_engine import ServingEngine

FP32 = 4.0


def attention_token_bytes(
    attention: Attention, hidden_size: int, tensor_parallel: Count, compute_bytes: float
) -> Real:
    """Bytes a token inside attention: queries, keys, values and output, without its input.

    c (a d + a e) / t + c ceil(k / t) (d + e)       ordinary attention; c a e / t more if gated
        c (2 (2 k d + a e) + 2 a e + 2 a) / t           linear: queries, keys and values before and
                                                        behind the convolution, gates, output
        c (q_lora + r + q + a (3 d + 2 e - q) / t)      latent: latents; queries; keys without
                                                        positions and values, unpacked; keys put
                                                        together; output
    """
    ranks = np.multiply(1.0, tensor_parallel)
    width = attention.head_dim + attention.value_head_dim
    if attention.delta_rule is not None:
        gates = attention.num_heads * (2.0 * attention.value_head_dim + 2.0)
        return compute_bytes * (2.0 * attention.conv_channels + gates) / ranks
    queries = attention.num_heads * width / ranks
    if attention.gated:
        queries = queries + attention.num_heads * attention.value_head_dim / ranks
    if attention.kv_lora_rank:
        latents = attention.q_lora_rank + attention.kv_lora_rank + attention.rope_head_dim
        unpacked = attention.num_heads * _unpacked(attention) / ranks
        return compute_bytes * (latents + queries + unpacked)
    keys = kv_heads_on_rank(attention.num_kv_heads, tensor_parallel)
    return compute_bytes * (queries + keys * width)


def _unpacked(attention: Attention) -> int:
    """Elements of a head computed from latents: d - q + e, and d of concatenated keys."""
    without_positions = attention.head_dim - attention.rope_head_dim
    return without_positions + attention.value_head_dim + attention.head_dim


def score_bytes(
    kind: LayerKind,
    kernel: str,
    step_tokens: Real,
    context_len: Count,
    tensor_parallel: Count,
    compute_bytes: float,
) -> Real:
    """Bytes of attention scores if a kernel stores them, and of T5's position biases.

    (4 + c) a T s / t       eager: fp32 softmax and its copy
    c a s s / t             T5: a bias for every pair of positions, of one sequence
    """
    pairs = np.multiply(1.0, step_tokens) * context_len
    if kind.attention.delta_rule is not None:
        return 0.0 * pairs * np.multiply(1.0, tensor_parallel)
    heads = kind.attention.num_heads / np.multiply(1.0, tensor_parallel)
    scores = (FP32 + compute_bytes) * heads * pairs if kernel == "eager" else 0.0 * heads * pairs
    if any("relative_attention_bias" in weight.name for weight in kind.weights):
        scores = scores + compute_bytes * heads * np.multiply(1.0, context_len) * context_len
    return scores


def latent_workspace_bytes(
    attention: Attention,
    engine: ServingEngine,
    cached: Real,
    tensor_parallel: Count,
    compute_bytes: float,
) -> Real:
    """Bytes of keys and values of every head, computed from the latents of earlier chunks.

        c min(cached tokens, 65 536) (r + q + a (2 d - q + e) / t)

    Source: vllm/v1/attention/backends/mla/common.py (chunked prefill): at most 64 x 1024 tokens.
    """
    if not attention.kv_lora_rank:
        return np.zeros_like(np.multiply(1.0, cached) * tensor_parallel)
    tokens = np.minimum(cached, engine.memory.latent_workspace_tokens)
    unpacked = attention.num_heads * _unpacked(attention) / np.multiply(1.0, tensor_parallel)
    width = attention.kv_lora_rank + attention.rope_head_dim + unpacked
    return compute_bytes * tokens * width


def feed_forward_token_bytes(
    feed_forward: FeedForward,
    hidden_size: int,
    tensor_parallel: Count,
    expert_parallel: Count,
    data_parallel: Count,
    compute_bytes: float,
) -> Real:
    """Bytes a token between the matrices of the MLP: inputs and outputs of the activation.

        c 3 F / t   gated        c 2 F / t   plain
        experts     n rows a token (n dp / ep if whole experts are distributed), each with
                    c (max(2 F, h) + F): the first and the last product use the same memory;
                    and 4 E + 12 n for the router's scores and choices, and the shared expert's

    Source: vLLM, SiluAndMul reads both projections and writes one; fused_experts
    (intermediate_cache1 and 3 are one buffer). 3 F matches a published log, see ``hidden_copies``
    of the serving profile. Balanced routing.
    """
    ranks = np.multiply(1.0, tensor_parallel)
    wide = 2.0 if feed_forward.gated else 1.0
    whole = feed_forward.ffn_hidden_size
    if not feed_forward.num_experts:
        return compute_bytes * (wide + 1.0) * whole / ranks
    apart = np.greater(expert_parallel, 1)
    rows = feed_forward.experts_per_token * np.where(
        apart, np.multiply(1.0, data_parallel) / expert_parallel, 1.0
    )
    inner = whole / np.where(apart, 1.0, ranks)
    routed = rows * (np.maximum(wide * inner, hidden_size) + inner)
    shared = (wide + 1.0) * feed_forward.shared_ffn_hidden_size / ranks
    router = FP32 * feed_forward.num_experts + 12.0 * feed_forward.experts_per_token
    return compute_bytes * (routed + shared) + router


def hidden_bytes(hidden_size: int, engine: ServingEngine, compute_bytes: float) -> float:
    """Bytes a token of the residual stream and a block's input and output: c 3 h."""
    return compute_bytes * engine.memory.hidden_copies * hidden_size


def sampled_logits_bytes(vocab_size: int, sequences: Count, engine: ServingEngine) -> Real:
    """Bytes while the next token of every sequence is sampled: 38 N V, replicated on every rank.

    See ``sampler_bytes_per_logit`` of the serving profile; only the last token of a sequence has
    logits.
    """
    return engine.memory.sampler_bytes_per_logit * vocab_size * np.multiply(1.0, sequences)


def masked_logits_bytes(
    vocab_size: int, step_tokens: Real, tensor_parallel: Count, compute_bytes: float
) -> Real:
    """Bytes of an encoder's logits of every token: c T V / t."""
    return compute_bytes * vocab_size * np.multiply(1.0, step_tokens) / tensor_parallel
