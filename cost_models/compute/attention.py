"""Device seconds of the attention core: scores, softmax and values, or linear attention.

Symbols   a num_heads   d head_dim   e value_head_dim   c compute_bytes   C tokens of a chunk
          Q channels of the convolution   R FLOP/s of the best large matmul
          beta memory bandwidth [bytes/s]
Units     seconds; every function broadcasts over plan columns.

Source: rates and efficiencies with their own sources in ``hardware_profiles``. Leaves out: the
caches of cards with HBM, and of older ones, which may hold small tensors between two kernels.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
from msgspec import Struct

from cost_models.activations.delta_rule import rule_bytes
from cost_models.arrays import Count, Real
from cost_models.compute.cached import FOUND_FORWARD, traffic_share
from cost_models.compute.flops import (
    CORE_BACKWARD,
    attention_flops_per_token,
    delta_rule_flops_per_token,
    keys_per_token,
)
from cost_models.compute.matmul import in_arrays, matmul_seconds
from cost_models.compute.rates import Rates
from cost_models.model.spec import Attention
from hardware_profiles.software.kernels import ForwardSoftware

CPU_FLASH_KEYS = 512.0  # of a block of torch's kernel
# Accesses of 16 bits that autocast adds to eager scores: two casts (3 each), a softmax in fp32 (4)
# in place of the module's own cast (6 with the softmax). Dropout in fp32: one more read and write.
# Source: counted from the lists of operators in torch, aten/src/ATen/autocast_mode.cpp
AUTOCAST_SCORES, AUTOCAST_DROPOUT = 4.0, 2.0
FLASH_PIECE, FLASH_HEAD = 32.0, 128.0  # elements of a head: padded to pieces; of the efficiency
# a flash kernel's efficiency is that of 8192 tokens under a mask, which see half of them
FLASH_KEYS = 4096.0
# FLOP/s of a GPU's flash kernel backward over forward: of 4096 tokens and heads of 128 on an H100
# 310 of 368 TFLOP/s (FlashAttention-2), 499 of 609 (cuDNN), 542 of 638 (FlashAttention-3; Shah et
# al., arXiv:2407.08608, fig. 5 and 6), at most 63 of 73 % of an A100's peak (arXiv:2307.08691)
FLASH_BACKWARD_RATE = 0.85
# That falls with the square root of larger heads, whose sums of gradients leave room for smaller
# tiles: 0.57 and 0.62 for heads of 256 on an H200 (cuDNN: hardware_profiles/cluster/measured).
# Leaves out: queries of 192 with values of 128, 0.65 and 0.69 in FlashAttention-4's first version
# for a B200 (Dao-AILab/flash-attention, pull request 2270); runs of DeepSeek-V3 do not show it.


def core_ratio(kernel: str, rate: Rates, head: float = FLASH_HEAD) -> float:
    """Seconds of the attention core's backward pass over those of its forward pass.

    ``head``: elements of a head of values.

    >>> gpu = Rates(1e12, 1e12, 0.0, False)
    >>> core_ratio("eager", gpu), [round(core_ratio("flash", gpu, d), 2) for d in (64, 128, 256)]
    (2.0, [2.94, 2.94, 4.16])
    """
    if kernel != "flash" or rate.host_is_device:
        return CORE_BACKWARD[kernel]
    return CORE_BACKWARD[kernel] * sqrt(max(head, FLASH_HEAD) / FLASH_HEAD) / FLASH_BACKWARD_RATE


class CoreWork(Struct, frozen=True):
    """An attention core, the tokens of a rank that pass it, and what computes them."""

    attention: Attention
    tokens: Real  # queries on all tensor-parallel ranks
    seq_len: Count | Real  # keys of each query
    tensor_parallel: Count
    kernel: str
    compute_bytes: float
    rate: Rates
    software: ForwardSoftware
    dropout: bool = False
    autocast: bool = False


def attention_core_seconds(work: CoreWork) -> Real:
    """Seconds of scores, softmax and values, forward.

    flash  FLOP / (efficiency R)   of the keys that a token attends to, and of hidden keys in
           the blocks of a causal mask, which are computed too; small heads: ``_flash_waits``
           on a CPU  FLOP / R and a time per score; a causal mask skips whole blocks of
           CPU_FLASH_KEYS keys, a window none (torch: FlashAttentionKernel.cpp, kvSplitSize)
    eager  two batched matmuls of all keys, and the score matrix moved through memory; autocast
           computes softmax and dropout in fp32, with a cast before and after
    linear attention: ``delta_rule_seconds``
    """
    if work.attention.delta_rule is not None:
        return delta_rule_seconds(work)
    if work.kernel != "flash":
        return _eager_seconds(work)
    return _cpu_flash_seconds(work) if work.rate.host_is_device else _flash_seconds(work)


def _flash_seconds(work: CoreWork) -> Real:
    attention, rate = work.attention, work.rate.of_core
    keys = keys_per_token(attention, work.seq_len, masked=True)
    if attention.causal:
        visited = np.minimum(keys + rate.masked_keys, np.multiply(1.0, work.seq_len))
        keys = visited / (1.0 + rate.masked_keys / FLASH_KEYS)
    flops = attention_flops_per_token(attention, keys) * work.tokens / work.tensor_parallel
    efficiency = work.software.kernels.flash_efficiency * rate.flash * rate.attention
    return flops * _flash_waits(attention, rate) / (efficiency * rate.matmul)


def _cpu_flash_seconds(work: CoreWork) -> Real:
    attention, rate = work.attention, work.rate.of_core
    visited = np.multiply(1.0, work.seq_len)
    if attention.causal:
        visited = 0.5 * (visited + np.minimum(visited, CPU_FLASH_KEYS))
    flops = attention_flops_per_token(attention, visited) * work.tokens / work.tensor_parallel
    scores = attention.num_heads * visited * work.tokens / work.tensor_parallel
    return flops / rate.matmul + scores * rate.score


def _eager_seconds(work: CoreWork) -> Real:
    attention, rate, kernels = work.attention, work.rate.of_core, work.software.kernels
    whole = np.multiply(1.0, work.seq_len)
    queries = np.multiply(1.0, attention.num_queries or work.seq_len)
    heads = attention.num_heads * work.tokens / queries / work.tensor_parallel
    products: Real = 0.0
    for size, summed, columns in (
        (attention.head_dim, attention.head_dim, whole),
        (attention.value_head_dim, whole, attention.value_head_dim),
    ):
        shape = queries, summed, columns, work.compute_bytes, rate
        products = products + matmul_seconds(
            *shape, batch=heads, in_memory=(whole, size), batched=True
        )
    pairs = attention.num_heads * whole * work.tokens / work.tensor_parallel
    accesses = kernels.eager_scores_accesses + work.dropout * kernels.dropout_accesses
    if work.autocast and not attention.softmax_in_fp32:
        accesses += AUTOCAST_SCORES + AUTOCAST_DROPOUT * work.dropout
    moved = accesses * work.compute_bytes * pairs
    moved = moved * traffic_share(rate.cache, work.compute_bytes * pairs, FOUND_FORWARD)
    return products + moved / rate.memory


def _flash_waits(attention: Attention, rate: Rates) -> float:
    """Seconds of a flash kernel's FLOP, over those of the same FLOP with heads of 128 elements.

        ((4 d' + x) / d) / ((4 128 + x) / 128)    d' = d in full pieces; x FLOP in an exponential
        1                                         larger heads
        ([d] + [e]) / (d + e)                     [d]: d in whole systolic arrays

    A score takes 4 d FLOP and one exponential, whatever d is. Queries, keys and values lie in a
    systolic array with their d or e elements (``in_arrays``). Source: Shah et al.,
    arXiv:2407.08608, sec. 1. Leaves out: that larger heads wait less, and need more registers.

    >>> from cost_models.compute.rates import Rates
    >>> hopper = Rates(1e12, 1e12, 0.0, False, exponential=256.0)
    >>> [round(_flash_waits(Attention(8, 8, d, d), hopper), 2) for d in (64, 80, 128, 256)]
    [1.33, 1.33, 1.0, 1.0]
    >>> tpu = Rates(1e12, 1e12, 0.0, False, array=256.0)
    >>> [_flash_waits(Attention(8, 8, d, d), tpu) for d in (64, 128, 256)]
    [4.0, 2.0, 1.0]
    """
    if rate.array:
        sizes = attention.head_dim, attention.value_head_dim
        return float(sum(in_arrays(size, rate.array) for size in sizes) / sum(sizes))
    size = 0.5 * (attention.head_dim + attention.value_head_dim)
    if not rate.exponential or size >= FLASH_HEAD:
        return 1.0
    whole = FLASH_PIECE * np.ceil(size / FLASH_PIECE)
    per_element = (4.0 * whole + rate.exponential) / size
    return float(per_element / ((4.0 * FLASH_HEAD + rate.exponential) / FLASH_HEAD))


def delta_rule_seconds(work: CoreWork) -> Real:
    """Seconds of convolution and gated delta rule, forward: max(FLOP / R, bytes / beta).

        flash  FLOP at a flash kernel's efficiency, for lack of a measured one; bytes moved:
               c (2 Q + 4 Q + 3 a e + 2 a d + 3 C a + 2 a d e / C)   convolution; queries, keys and
               values, read twice; both results of the triangular systems, new values, output;
               tables of C x C; states
        eager  FLOP in fp32; every tensor that the rule saves is written once and read twice

    Leaves out: host seconds of the loop over chunks (eager).
    """
    attention, rate, rule = work.attention, work.rate, work.attention.delta_rule
    assert rule is not None
    share = work.tokens / np.multiply(1.0, work.tensor_parallel)
    flops = delta_rule_flops_per_token(attention, work.seq_len) * share
    if work.kernel == "flash" and not rate.host_is_device:
        key = attention.num_heads * attention.head_dim
        value = attention.num_heads * attention.value_head_dim
        tables = 3.0 * rule.chunk * attention.num_heads
        states = 2.0 * key * attention.value_head_dim / rule.chunk
        moved = 6.0 * attention.conv_channels + 3.0 * value + 2.0 * key + tables + states
        core = rate.of_core
        products = flops / (work.software.kernels.flash_efficiency * core.flash * core.matmul)
        return np.maximum(products, work.compute_bytes * moved * share / rate.memory)
    saved = rule_bytes(attention, rule, work.seq_len, "eager", work.compute_bytes)
    return np.maximum(flops / rate.of_single.matmul, 3.0 * saved * share / rate.memory)
