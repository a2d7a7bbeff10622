"""Bytes that linear attention by the gated delta rule saves for one token.

Symbols   a value heads   k query and key heads   d key_head_dim   e value_head_dim
          Q = 2 k d + a e, channels of the convolution   C tokens of a chunk   s seq_len
          p = ceil(s / C) C / s, tokens of whole chunks over tokens
          c compute_bytes   w = max(4, c)
Units     bytes a token; functions broadcast over plan columns.

The convolution and the rule count as the layer's attention core: selective recomputation drops what
they save, and keeps their inputs. They run as fused kernels (attention_kernel flash) or written out
(eager), as transformers does without the packages flash-linear-attention and causal-conv1d.

Source: tensors that autograd saves of transformers' Qwen3-Next, counted in the tests (eager);
fla/ops/gated_delta_rule/chunk.py (flash). Leaves out: rounding of tensors to the allocator's
blocks.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import FP32, Count, Real, padding
from cost_models.model.spec import Attention, DeltaRule


def around_rule_bytes(attention: Attention, compute_bytes: float) -> float:
    """Bytes saved around convolution and rule.

    c Q                          the convolution's input
    c a + 2 w a                  sigmoid of learning rates; softplus of decays, input and output
    3 w a e + w a + 3 c a e      norm and gate of the output; the output matrix's input
    """
    rates = (compute_bytes + 2.0 * max(FP32, compute_bytes)) * attention.num_heads
    output = gated_output_bytes(attention, compute_bytes)
    return compute_bytes * attention.conv_channels + rates + output


def gated_output_bytes(attention: Attention, compute_bytes: float) -> float:
    """Bytes saved behind the rule, by norm, gate and output matrix: 3 w a e + w a + 3 c a e."""
    wide, heads = max(FP32, compute_bytes), attention.num_heads
    value = heads * attention.value_head_dim
    return (3.0 * wide + 3.0 * compute_bytes) * value + wide * heads


def rule_bytes(
    attention: Attention, rule: DeltaRule, seq_len: Count | Real, kernel: str, compute_bytes: float
) -> Real:
    """Bytes that convolution and rule save besides their inputs.

        flash  c Q + w a + 8 k + c C a     normalised queries and keys, values, decays, norms, and
                                           the inverse of each chunk's triangular system
        eager  c Q                         the convolution's output
               + w (2 a d + 2 a)           queries and keys before they are normalised; their norms
               + w p (6 a d + 3 a e + 5 C a + 4 a + a d e / C)
                                           of each chunk: queries, keys and values, as they are and
                                           multiplied by learning rates and decays; new values; five
                                           tables of C x C; the state
               + 4 w p a d                 copies of transposed tensors, with c >= 4 and p = 1

    Source: fla/ops/gated_delta_rule/chunk.py, ChunkGatedDeltaRuleFunction (save_for_backward);
    tensors that autograd saves in transformers' torch_chunk_gated_delta_rule.
    """
    wide, heads = max(FP32, compute_bytes), attention.num_heads
    convolved = compute_bytes * attention.conv_channels
    if kernel == "flash":
        statistics = wide * heads + 2.0 * FP32 * attention.num_kv_heads
        inverse = compute_bytes * rule.chunk * heads
        return convolved + statistics + inverse + np.zeros_like(np.multiply(1.0, seq_len))
    key, value = heads * attention.head_dim, heads * attention.value_head_dim
    state = key * attention.value_head_dim / rule.chunk
    padded = padding(seq_len, rule.chunk)
    copies = 4.0 * key * (np.equal(padded, 1.0) & (compute_bytes >= FP32))
    chunks = 6.0 * key + copies + 3.0 * value + 5.0 * rule.chunk * heads + 4.0 * heads + state
    # v, of the new values less what the state predicts, is one of the three
    normalised = wide * (2.0 * key + 2.0 * heads)
    return convolved + normalised + wide * chunks * padded


def rule_backward_bytes(
    attention: Attention, rule: DeltaRule, seq_len: Count | Real, kernel: str, compute_bytes: float
) -> Real:
    """Bytes of gradients inside convolution and rule at their fullest, besides saved tensors.

        flash  c (3 a d + 4 a e + Q + a d e / C)   gradients of output, gate, queries, keys and
                                           values; results of the triangular systems, new values
                                           and states, computed again
        eager  w p (3 a d + a e + C a + 2 max(a d, a e, C a)) + (w + c) a e
                                           gradients over all chunks while the chunks run backward,
                                           a summand and a sum of the largest; of output and gate

    The bytes of ``gated_output_bytes`` are freed by then.

    >>> one = Attention(32, 16, 128, 128, delta_rule=DeltaRule(conv_kernel=4))
    >>> float(rule_backward_bytes(one, DeltaRule(4), 4096, "flash", 2.0))
    90112.0
    """
    wide, heads = max(FP32, compute_bytes), attention.num_heads
    key, value = heads * attention.head_dim, heads * attention.value_head_dim
    if kernel == "flash":
        state = key * attention.value_head_dim / rule.chunk
        gradients = 3.0 * key + 4.0 * value + attention.conv_channels + state
        return compute_bytes * gradients + np.zeros_like(np.multiply(1.0, seq_len))
    table = rule.chunk * heads
    chunks = 3.0 * key + value + table + 2.0 * max(key, value, table)
    outputs = (wide + compute_bytes) * value
    return wide * chunks * padding(seq_len, rule.chunk) + outputs
