"""Device seconds of one layer: matrices (``matmul``), all other operators by bytes moved.

Symbols   R FLOP/s of the best large matmul   beta memory bandwidth [bytes/s]   c compute_bytes
          t tensor_parallel   s seq_len
Units     seconds; every function broadcasts over plan columns.

Source: Williams, Waterman, Patterson, Roofline (CACM 52, 2009), operator by operator; rates and
shares with their own sources in ``hardware_profiles``; a large cache: ``cached``. Leaves out: the
caches of cards with HBM, and of older ones, which may hold small tensors between two kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as without
from math import sqrt
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from cost_models.activations.delta_rule import rule_bytes
from cost_models.activations.fp8 import cast_elements, gathered_cast_share, matmul_inputs
from cost_models.activations.saved import by_activation
from cost_models.arrays import Count, Flag, Real
from cost_models.communication.expert_parallel import slots_per_token
from cost_models.compute.adapters import adapter_bytes_per_token
from cost_models.compute.cached import FOUND_BACKWARD, FOUND_FORWARD, traffic_share
from cost_models.compute.casts import (
    FP32_BYTES,
    autocast_bytes_per_element,
    autocast_bytes_per_token,
    cast_bytes_per_token,
)
from cost_models.compute.expert_loops import loop_bytes
from cost_models.compute.flops import (
    CORE_BACKWARD,
    attention_flops_per_token,
    delta_rule_flops_per_token,
    keys_per_token,
)
from cost_models.compute.matmul import matmul_seconds
from cost_models.compute.one_hot_dispatch import one_hot_seconds
from cost_models.compute.rates import Rates
from cost_models.model.adapter_methods import is_composed
from cost_models.model.spec import Attention, LayerKind, Weight
from cost_models.partition.recomputed_layers import skipped_last_matrix
from cost_models.partition.tensor_sharding import shard_dim
from hardware_profiles.software.kernels import ForwardSoftware
from hardware_profiles.software.trainer import SoftwareProfile

CPU_FLASH_KEYS = 512.0
GATE_ACCESSES = 3.0  # of a gated output: two reads, one write
# Accesses of 16 bits that autocast adds to eager scores: two casts (3 each), a softmax in fp32 (4)
# in place of the module's own cast (6 with the softmax). Dropout in fp32: one more read and write.
# Source: counted from the lists of operators in torch, aten/src/ATen/autocast_mode.cpp
AUTOCAST_SCORES = 4.0
AUTOCAST_DROPOUT = 2.0
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


class Matmuls(Struct, frozen=True):
    """Seconds of matrices: forward, gradients of inputs, gradients of weights."""

    forward: Real
    inputs: Real
    weights: Real

    def __add__(self, other: Matmuls) -> Matmuls:
        return Matmuls(
            self.forward + other.forward, self.inputs + other.inputs, self.weights + other.weights
        )


def linear_seconds(
    tokens: Real,
    inputs: Real,
    outputs: Real,
    compute_bytes: float,
    rate: Rates,
    *,
    batch: Real = 1.0,
) -> Matmuls:
    """Seconds of one matrix: y = x W, dx = dy W', dW = x' dy; each sums over another dimension.

    ``batch``: equal matrices in one kernel (experts). Rows in memory are inputs or outputs of a
    token, of a weight too.
    """

    def one(rows: Real, summed: Real, columns: Real) -> Real:
        sizes = rows, summed, columns, compute_bytes, rate
        return matmul_seconds(*sizes, batch=batch, in_memory=(inputs, outputs))

    return Matmuls(
        one(tokens, inputs, outputs), one(tokens, outputs, inputs), one(inputs, tokens, outputs)
    )


def _weight_seconds(
    weight: Weight,
    tokens: Real,
    tensor_parallel: Count,
    compute_bytes: float,
    rate: Rates,
    *,
    batch: Real = 1.0,
) -> Matmuls:
    first, second = (np.multiply(1.0, length) for length in weight.shape[-2:])
    cut = shard_dim(weight)
    if cut == len(weight.shape) - 2:
        first = first / tensor_parallel
    elif cut == len(weight.shape) - 1:
        second = second / tensor_parallel
    inputs, outputs = (first, second) if weight.transposed else (second, first)
    seconds = linear_seconds(tokens, inputs, outputs, compute_bytes, rate, batch=batch)
    return replace(seconds, weights=0.0 * seconds.weights) if weight.frozen else seconds


def matrices_seconds(
    weights: tuple[Weight, ...],
    tokens: Real,
    tensor_parallel: Count,
    compute_bytes: float,
    rate: Rates,
    *,
    experts_per_token: float = 0.0,
    expert_tensor: Count | None = None,
    expert_parallel: Count = 1,
    fp32_adapters: bool = False,
) -> Matmuls:
    """Seconds of all matrices of a block; an expert receives m k / E tokens (balanced routing).

    A rank has E / ep of E experts, to which ep ranks send tokens; where each tensor-parallel rank
    has whole experts (``expert_tensor`` 1), it sends its share of the tokens. Frozen weights have
    no weight gradients.
    """
    cut = tensor_parallel if expert_tensor is None else expert_tensor
    zero = np.zeros_like(np.multiply(1.0, tokens))

    def seconds(weight: Weight) -> Matmuls:
        if weight.is_adapter and fp32_adapters:
            return _weight_seconds(weight, tokens, tensor_parallel, FP32_BYTES, rate.of_single)
        if weight.role == "linear":
            return _weight_seconds(weight, tokens, tensor_parallel, compute_bytes, rate)
        experts = weight.shape[0] / np.multiply(1.0, expert_parallel)
        routed = tokens * np.multiply(1.0, cut) / tensor_parallel
        share = routed * experts_per_token / experts
        return _weight_seconds(weight, share, cut, compute_bytes, rate, batch=experts)

    total = Matmuls(zero, zero, zero)
    known: dict[Weight, Matmuls] = {}  # such as keys and values: equal but for their names
    for weight in weights:
        if is_composed(weight):  # an adapter's matrix is added to it, which has a gradient
            total += seconds(without(weight, is_adapter=True, frozen=False))
        if weight.role in ("linear", "expert"):
            unnamed = without(weight, name="", part="other")
            known[unnamed] = known.get(unnamed) or seconds(unnamed)
            total += known[unnamed]
    return total


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


def attention_core_seconds(
    attention: Attention,
    tokens: Real,
    seq_len: Count | Real,
    tensor_parallel: Count,
    kernel: str,
    compute_bytes: float,
    rate: Rates,
    software: ForwardSoftware,
    *,
    dropout: bool = False,
    autocast: bool = False,
) -> Real:
    """Seconds of scores, softmax and values, forward.

    flash  computed FLOP / (efficiency R): of the keys that a token attends to, and of those that
           the blocks of a causal mask visit in vain; heads: ``_flash_waits``
           on a CPU  FLOP / R and a time per score; a causal mask skips whole blocks of
           CPU_FLASH_KEYS keys, a window none (torch: FlashAttentionKernel.cpp, kvSplitSize)
    eager  two batched matmuls of all keys, and the score matrix moved through memory; autocast
           takes softmax and dropout in fp32, with a cast on either side
    linear attention: ``delta_rule_seconds``
    """
    if attention.delta_rule is not None:
        return delta_rule_seconds(
            attention, tokens, seq_len, tensor_parallel, kernel, compute_bytes, rate, software
        )
    rate = rate.of_core
    if kernel == "flash" and rate.host_is_device:
        visited = np.multiply(1.0, seq_len)
        if attention.causal:
            visited = 0.5 * (visited + np.minimum(visited, CPU_FLASH_KEYS))
        flops = attention_flops_per_token(attention, visited) * tokens / tensor_parallel
        scores = attention.num_heads * visited * tokens / tensor_parallel
        return flops / rate.matmul + scores * rate.score
    if kernel == "flash":
        keys = keys_per_token(attention, seq_len, masked=True)
        if attention.causal:
            visited = np.minimum(keys + rate.masked_keys, np.multiply(1.0, seq_len))
            keys = visited / (1.0 + rate.masked_keys / FLASH_KEYS)
        flops = attention_flops_per_token(attention, keys) * tokens / tensor_parallel
        efficiency = software.kernels.flash_efficiency * rate.flash * rate.attention
        return flops * _flash_waits(attention, rate) / (efficiency * rate.matmul)
    whole = np.multiply(1.0, seq_len)
    heads = attention.num_heads * tokens / whole / tensor_parallel
    products: Real = 0.0
    for size, summed, columns in (
        (attention.head_dim, attention.head_dim, whole),
        (attention.value_head_dim, whole, attention.value_head_dim),
    ):
        shape = whole, summed, columns, compute_bytes, rate
        products = products + matmul_seconds(
            *shape, batch=heads, in_memory=(whole, size), batched=True
        )
    pairs = attention.num_heads * whole * tokens / tensor_parallel
    accesses = software.kernels.eager_scores_accesses + dropout * software.kernels.dropout_accesses
    if autocast and not attention.softmax_in_fp32:
        accesses += AUTOCAST_SCORES + AUTOCAST_DROPOUT * dropout
    moved = accesses * compute_bytes * pairs
    moved = moved * traffic_share(rate.cache, compute_bytes * pairs, FOUND_FORWARD)
    return products + moved / rate.memory


def _flash_waits(attention: Attention, rate: Rates) -> float:
    """Return the time of a flash kernel's FLOP over that of heads of 128 elements.

        ((4 d' + x) / d) / ((4 128 + x) / 128)    d' = d in full pieces; x FLOP in an exponential
        1                                         larger heads

    A score takes 4 d FLOP and one exponential, whatever d is. Source: Shah et al.,
    arXiv:2407.08608, sec. 1. Leaves out: that larger heads wait less, and need more registers.

    >>> from cost_models.compute.rates import Rates
    >>> hopper = Rates(1e12, 1e12, 0.0, False, exponential=256.0)
    >>> [round(_flash_waits(Attention(8, 8, d, d), hopper), 2) for d in (64, 80, 128, 256)]
    [1.33, 1.33, 1.0, 1.0]
    """
    size = 0.5 * (attention.head_dim + attention.value_head_dim)
    if not rate.exponential or size >= FLASH_HEAD:
        return 1.0
    whole = FLASH_PIECE * np.ceil(size / FLASH_PIECE)
    per_element = (4.0 * whole + rate.exponential) / size
    return float(per_element / ((4.0 * FLASH_HEAD + rate.exponential) / FLASH_HEAD))


def delta_rule_seconds(
    attention: Attention,
    tokens: Real,
    seq_len: Count | Real,
    tensor_parallel: Count,
    kernel: str,
    compute_bytes: float,
    rate: Rates,
    software: ForwardSoftware,
) -> Real:
    """Seconds of convolution and gated delta rule, forward: max(FLOP / R, bytes / beta).

        flash  FLOP at a flash kernel's efficiency, for lack of a measured one; bytes moved:
               c (2 Q + 4 Q + 3 a e + 2 a d + 3 C a + 2 a d e / C)   convolution; queries, keys and
               values, read twice; both results of the triangular systems, new values, output;
               tables of C x C; states
        eager  FLOP in fp32; every tensor that the rule saves is written once and read twice

    Leaves out: host seconds of the loop over chunks (eager).
    """
    rule, share = attention.delta_rule, tokens / np.multiply(1.0, tensor_parallel)
    assert rule is not None
    flops = delta_rule_flops_per_token(attention, seq_len) * share
    if kernel == "flash" and not rate.host_is_device:
        key = attention.num_heads * attention.head_dim
        value = attention.num_heads * attention.value_head_dim
        tables = 3.0 * rule.chunk * attention.num_heads
        states = 2.0 * key * attention.value_head_dim / rule.chunk
        moved = 6.0 * attention.conv_channels + 3.0 * value + 2.0 * key + tables + states
        core = rate.of_core
        products = flops / (software.kernels.flash_efficiency * core.flash * core.matmul)
        return np.maximum(products, compute_bytes * moved * share / rate.memory)
    saved = rule_bytes(attention, rule, seq_len, "eager", compute_bytes)
    return np.maximum(flops / rate.of_single.matmul, 3.0 * saved * share / rate.memory)


def elementwise_bytes_per_token(
    kind: LayerKind,
    hidden_size: int,
    compute_bytes: float,
    tensor_parallel: Count,
    sequence_parallel: Flag,
    software: ForwardSoftware,
    *,
    hidden_dropout: bool = False,
    expert_parallel: Count = 1,
    inner_bytes: float | None = None,
) -> Real:
    """Bytes a token that norms, residuals, activation and rotary embeddings move, forward.

    ``inner_bytes``: of an element that matrices give (autocast); None: as of a hidden state.

    Tokens are permuted into the order of their k experts (one read, k written) and summed
    afterwards (k read, one written; weighting reads k more: 3 k + 1 with the reads of the matmuls).
    With expert parallelism they are permuted by rank before the exchange and by expert after it,
    and both once more on the way back: 4 k more. One-hot masks move them in products.
    """
    hidden, activation = _hidden_and_activation_bytes(
        kind,
        hidden_size,
        compute_bytes,
        tensor_parallel,
        sequence_parallel,
        software,
        hidden_dropout=hidden_dropout,
        expert_parallel=expert_parallel,
        inner_bytes=inner_bytes,
    )
    return hidden + activation


def _hidden_and_activation_bytes(
    kind: LayerKind,
    hidden_size: int,
    compute_bytes: float,
    tensor_parallel: Count,
    sequence_parallel: Flag,
    software: ForwardSoftware,
    *,
    hidden_dropout: bool,
    expert_parallel: Count,
    inner_bytes: float | None,
) -> tuple[Real, Real]:
    """``elementwise_bytes_per_token`` of kernels on hidden states, and of the MLP's activation."""
    inner = compute_bytes if inner_bytes is None else inner_bytes
    norms, activation = norm_and_activation_bytes(
        kind, hidden_size, compute_bytes, tensor_parallel, sequence_parallel, software, inner
    )
    along = np.where(sequence_parallel, np.multiply(1.0, tensor_parallel), 1.0)
    blocks = 2.0 + (kind.cross_attention is not None)
    # one access is of what a matrix gave
    residual = compute_bytes * (software.kernels.residual_accesses - 1.0)
    residual += inner * (1.0 + hidden_dropout * software.kernels.dropout_accesses)
    whole: Real = hidden_size * (blocks * residual)
    feed_forward = kind.feed_forward
    if feed_forward.num_experts and not software.kernels.one_hot_capacity:
        copies = np.where(np.greater(expert_parallel, 1), 7.0, 3.0)
        whole = whole + inner * hidden_size * (copies * feed_forward.experts_per_token + 1.0)
    attention = kind.attention
    query_key = (attention.num_heads + attention.num_kv_heads) * attention.head_dim
    split = software.kernels.rotary_accesses * query_key * attention.rotary
    # gates: of attention one kernel (two reads, one write), of linear attention with a norm
    if attention.gated or attention.delta_rule is not None:
        split += GATE_ACCESSES * attention.num_heads * attention.value_head_dim
    moved = whole / along + inner * split / np.multiply(1.0, tensor_parallel)
    return norms + moved, activation


def norm_and_activation_bytes(
    kind: LayerKind,
    hidden_size: int,
    compute_bytes: float,
    tensor_parallel: Count,
    sequence_parallel: Flag,
    software: ForwardSoftware,
    inner_bytes: float,
) -> tuple[Real, Real]:
    """Bytes a token that norms move, and the activation of the MLP (or of all experts)."""
    norm = {
        "layer": software.kernels.layer_norm_accesses,
        "layer_in_fp32": software.kernels.layer_norm_in_fp32_accesses,
    }.get(
        kind.norm,
        software.kernels.rms_norm_accesses + software.kernels.rms_norm_fp32_bytes / compute_bytes,
    )
    feed_forward, tensor = kind.feed_forward, np.multiply(1.0, tensor_parallel)
    accesses = software.kernels.activation_accesses if feed_forward.gated else 2.0  # read, write
    unfused = software.kernels.unfused_activation_accesses
    accesses += by_activation(unfused, feed_forward, 0.0, autocast=inner_bytes < compute_bytes)
    inner = inner_bytes * accesses * activation_width(kind, software)
    norms = compute_bytes * hidden_size * kind.num_norms * norm
    return norms / np.where(sequence_parallel, tensor, 1.0), inner / tensor


def activation_width(kind: LayerKind, software: ForwardSoftware) -> float:
    """Elements a token that an MLP's activation gives; of all its experts."""
    feed_forward = kind.feed_forward
    width = feed_forward.ffn_hidden_size * max(1.0, slots_per_token(feed_forward, software))
    return width + feed_forward.shared_ffn_hidden_size


def bias_elements(kind: LayerKind, tensor_parallel: Count) -> Real:
    """Elements a token of the outputs of a layer's matrices that have a bias."""
    matrices = {w.name.rpartition(".")[0] for w in kind.weights if w.role == "linear"}
    total: Real = 0.0
    for weight in kind.weights:
        stem, _, last = weight.name.rpartition(".")
        if last == "bias" and stem in matrices:
            over: Real = np.multiply(1.0, tensor_parallel if shard_dim(weight) is not None else 1)
            total = total + weight.numel / over
    return total


# an element: int32 written and read (8), int8 written, masked, shifted by its zero, read (6)
# Source: AutoGPTQ: auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, QuantLinear.forward
OPERATORS_UNPACKING_BYTES: Final = 14.0


def dequantised_bytes(kind: LayerKind, compute_bytes: float, tensor_parallel: Count) -> Real:
    """Bytes that a pass moves to dequantise a layer's 4-bit weights."""
    total: Real = 0.0
    for weight in kind.weights:
        if weight.quantised:
            over: Real = np.multiply(1.0, tensor_parallel if shard_dim(weight) is not None else 1)
            total = total + (0.5 + compute_bytes) * weight.numel / over
    return total


def trained_elements(
    kind: LayerKind,
    tensor_parallel: Count,
    expert_tensor: Count | None = None,
    expert_parallel: Count = 1,
) -> Real:
    """Elements of a layer's trained matrices on one rank."""
    cut = tensor_parallel if expert_tensor is None else expert_tensor
    total: Real = 0.0
    for weight in kind.weights:
        if weight.frozen or weight.role not in ("linear", "expert"):
            continue
        over: Real = np.multiply(1.0, tensor_parallel if shard_dim(weight) is not None else 1)
        if weight.role == "expert":
            over = np.multiply(1.0, cut) * expert_parallel
        total = total + float(np.prod(np.multiply(1.0, weight.shape))) / over
    return total


class PassSeconds(Struct, frozen=True):
    """Device seconds of one micro-batch through some layers."""

    forward: Real
    backward: Real
    recompute: Real
    weights: Real = 0.0  # of ``backward``, gradients of matrices
    core: Real = 0.0  # of ``forward``, the attention cores


class LayerWork(Struct, frozen=True):
    """One layer, the tokens of a micro-batch on a rank, and how the work is split and repeated."""

    kind: LayerKind
    hidden_size: int
    seq_len: Count  # keys of each query
    tokens: Real  # queries on this rank
    tensor_parallel: Count
    sequence_parallel: Flag
    recompute_full: Flag
    recompute_core: Flag
    kernel: str
    compute_bytes: float
    rate: Rates
    software: SoftwareProfile
    expert_tensor: Count | None = None  # ranks that cut an expert; None: tensor_parallel
    expert_parallel: Count = 1
    recompute_around: Flag = False  # all operators but matmuls and attention
    recompute_matrices: Sequence[tuple[Flag, tuple[Weight, ...]]] = ()  # where repeated alone
    recompute_norms: Flag = False
    recompute_activation: Flag = False
    computed_score_share: Real = 1.0  # share of a query's keys that the core computes
    context_bytes: tuple[Real, Real] = (0.0, 0.0)  # moved for each token, forward and backward
    hidden_dropout: bool = False
    attention_dropout: bool = False

    @property
    def upcasts(self) -> bool:
        """Whether hidden states are in fp32 between matrices in fewer bits."""
        return self.software.precision.fp32_hidden_states and self.compute_bytes < FP32_BYTES

    @property
    def element(self) -> float:
        """Bytes of an element of a hidden state."""
        return FP32_BYTES if self.upcasts else self.compute_bytes

    @property
    def autocasts(self) -> bool:
        """Whether torch.autocast runs the matrices in fewer bits than the weights have."""
        return self.software.precision.autocasts_weights and self.upcasts

    @property
    def inner(self) -> float:
        """Bytes of an element that a matrix gives; autocast leaves it as it is."""
        return self.compute_bytes if self.autocasts else self.element

    @property
    def each(self) -> Real:
        """Seconds to move one byte for every token: tokens / beta."""
        return self.tokens / self.rate.memory

    def memory_shares(self, found: float) -> tuple[Real, Real]:
        """Share of the bytes that go through memory: of kernels on hidden states, on inner ones."""
        if not self.rate.cache:
            return 1.0, 1.0
        ranks = np.multiply(1.0, self.tensor_parallel)
        hidden = self.element * self.hidden_size * self.tokens
        hidden = hidden / np.where(self.sequence_parallel, ranks, 1.0)
        inner = self.inner * activation_width(self.kind, self.software) * self.tokens / ranks
        of_hidden, of_inner = (
            traffic_share(self.rate.cache, tensor, found) for tensor in (hidden, inner)
        )
        return of_hidden, of_inner


def layer_seconds(work: LayerWork) -> PassSeconds:
    """Device seconds of one layer: forward, backward, and recomputation.

        forward    matrices + cores + elementwise + dequantisation + bias + expert loop
        backward   matrices twice (inputs, weights) + cores + elementwise + dequantisation + bias
                   + expert loop + accumulation of gradients

    In fp8 both also cast.

    The backward pass of a flash core does 2.5 times its forward's FLOP (five matmuls for two: Dao,
    arXiv:2307.08691, sec. 3.1.2) at a lower rate, an eager core twice.
    """
    matrices, core = layer_matrices(work), core_seconds(work)
    moved, moved_back = elementwise_seconds(work)
    bias, bias_back = bias_seconds(work)
    loop, loop_back = expert_loop_seconds(work)
    unpacked, unpacked_again = dequantisation_seconds(work)
    forward = matrices.forward + core + moved + unpacked + bias + loop
    inputs = matrices.inputs + unpacked_again + bias_back
    if work.rate.core is not None:  # fp8
        forward, inputs = with_fp8_casts(work, forward, inputs)
    if work.autocasts:  # weights down, their gradients up
        each = autocast_bytes_per_element(work.compute_bytes) / work.rate.memory
        forward, inputs = forward + each * _trained(work), inputs + each * _trained(work)
    backward = (
        inputs
        + matrices.weights
        + core_ratio(work.kernel, work.rate, work.kind.attention.value_head_dim) * core
        + moved_back
        + loop_back
        + accumulation_seconds(work)
    )
    again = recompute_seconds(work, forward, core, moved)
    return PassSeconds(forward, backward, again, matrices.weights, core)


def layer_matrices(work: LayerWork) -> Matmuls:
    """Seconds of the layer's matrices, with routed experts, one-hot masks and adapters."""
    return _matrices_of(work, work.kind.weights)


def _matrices_of(work: LayerWork, weights: tuple[Weight, ...]) -> Matmuls:
    slots = slots_per_token(work.kind.feed_forward, work.software)
    seconds = matrices_seconds(
        weights,
        work.tokens,
        work.tensor_parallel,
        work.compute_bytes,
        work.rate,
        experts_per_token=slots,
        expert_tensor=work.expert_tensor,
        expert_parallel=work.expert_parallel,
        fp32_adapters=work.software.adapters.in_fp32 and work.compute_bytes < FP32_BYTES,
    )
    routed = any(weight.is_routed_expert for weight in weights)
    if not (routed and work.software.kernels.one_hot_capacity):
        return seconds
    sizes = work.hidden_size, work.tokens, work.seq_len, work.tensor_parallel
    filled, filled_back = one_hot_seconds(slots, *sizes, work.compute_bytes, work.rate)
    return seconds + Matmuls(filled, filled_back, 0.0)


def core_seconds(work: LayerWork) -> Real:
    """Seconds of the attention cores of a forward pass: of self-attention and cross-attention."""
    core: Real = np.zeros_like(np.multiply(1.0, work.tokens))
    for attention in (work.kind.attention, work.kind.cross_attention):
        if attention is not None:
            core = core + work.computed_score_share * attention_core_seconds(
                attention,
                work.tokens,
                work.seq_len,
                work.tensor_parallel,
                work.kernel,
                work.compute_bytes,
                work.rate,
                work.software,
                dropout=work.attention_dropout,
                autocast=work.autocasts,
            )
    return core


def elementwise_seconds(work: LayerWork) -> tuple[Real, Real]:
    """Seconds of norms, residuals, activation, rotary embeddings, adapters, casts, sums of blocks.

        (bytes that the operators read and write) / beta, but for what a large cache holds

    Forward and backward. Source: ``elementwise_bytes_per_token``, ``adapters``, ``casts``,
    ``context_bytes_moved_per_token``, ``traffic_share``.
    """
    software, each = work.software, work.each
    hidden, activation = _hidden_and_activation_bytes(
        work.kind,
        work.hidden_size,
        work.element,
        work.tensor_parallel,
        work.sequence_parallel,
        software,
        hidden_dropout=work.hidden_dropout,
        expert_parallel=work.expert_parallel,
        inner_bytes=work.inner,
    )
    ratio = software.kernels.backward_access_ratio
    adapters = adapter_bytes_per_token(
        work.kind, work.element, work.tensor_parallel, software, work.tokens
    )
    casts: Real = 0.0
    if work.upcasts:
        cast = autocast_bytes_per_token if work.autocasts else cast_bytes_per_token
        casts = cast(work.kind, work.compute_bytes, work.tensor_parallel)
    passes = zip(
        (FOUND_FORWARD, FOUND_BACKWARD), (1.0, ratio), adapters, work.context_bytes, strict=True
    )
    forward, backward = (
        each
        * (
            of_hidden * (times * hidden + of_adapters + casts)
            + of_inner * times * activation
            + sums
        )
        for found, times, of_adapters, sums in passes
        for of_hidden, of_inner in (work.memory_shares(found),)
    )
    return forward, backward


def bias_seconds(work: LayerWork) -> tuple[Real, Real]:
    """Seconds of adding biases and of summing their gradients: accesses c tokens out / beta."""
    elements = bias_elements(work.kind, work.tensor_parallel)
    biased = work.compute_bytes * work.tokens / work.rate.memory * elements
    kernels = work.software.kernels
    return kernels.bias_accesses * biased, kernels.bias_gradient_accesses * biased


def dequantisation_seconds(work: LayerWork) -> tuple[Real, Real]:
    """Seconds of dequantising 4-bit weights, in the forward and in the backward pass.

    A chain of operators moves its temporaries as well, and the backward pass has what it gave.
    """
    frozen = work.software.frozen
    moved = dequantised_bytes(work.kind, work.compute_bytes, work.tensor_parallel)
    seconds = moved / (frozen.unpacking_share * work.rate.memory)
    if not frozen.unpacks_by_operators:
        return seconds, seconds
    packed = 0.5 + work.compute_bytes
    return seconds * (packed + OPERATORS_UNPACKING_BYTES) / packed, 0.0


def expert_loop_seconds(work: LayerWork) -> tuple[Real, Real]:
    """Seconds that a loop over experts adds to a forward and to a backward pass."""
    forward, backward = loop_bytes(work.kind, work.hidden_size, work.element, work.software)
    return forward * work.tokens / work.rate.memory, backward * work.tokens / work.rate.memory


def accumulation_seconds(work: LayerWork) -> Real:
    """Seconds of adding the gradients of weights to those of earlier micro-batches."""
    return work.software.gradients.accumulation_bytes * _trained(work) / work.rate.memory


def with_fp8_casts(work: LayerWork, forward: Real, inputs: Real) -> tuple[Real, Real]:
    """Return both passes with the casts to fp8 of inputs, of gradients of outputs, of weights.

    Backward, also the scales of gradients of inputs and of weights that matmuls do not apply.
    """
    software, rate = work.software, work.rate
    cast = software.fp8.cast_bytes / rate.memory
    gathered = gathered_cast_share(
        work.tensor_parallel, work.sequence_parallel, software, copies=rate.copies_fp8
    )
    to_inputs, to_outputs = cast_elements(work.kind, work.tensor_parallel, gathered)
    of_weights = software.fp8.weight_casts * cast * _trained(work)
    scaled = matmul_inputs(work.kind, work.tensor_parallel) * work.tokens + _trained(work)
    scaling = software.fp8.scaling_bytes * scaled / rate.memory
    return (
        forward + cast * work.tokens * to_inputs + of_weights,
        inputs + cast * work.tokens * to_outputs + of_weights + scaling,
    )


def recompute_seconds(work: LayerWork, forward: Real, core: Real, moved: Real) -> Real:
    """Seconds of recomputation: forward pass without its last matrix, or its parts.

    Parts: the core, all elementwise operators, those of norms or of the activation, and matrices.
    """
    again = np.where(work.recompute_core, core, 0.0) + np.where(work.recompute_around, moved, 0.0)
    last = skipped_last_matrix(
        work.kind, hidden_dropout=work.hidden_dropout, software=work.software
    )
    for repeats_it, matrices in work.recompute_matrices:
        left = tuple(w for w in matrices if w not in last)
        again = again + np.where(repeats_it, _matrices_of(work, left).forward, 0.0)
    norms, activation = norm_and_activation_bytes(
        work.kind,
        work.hidden_size,
        work.element,
        work.tensor_parallel,
        work.sequence_parallel,
        work.software,
        work.inner,
    )
    of_hidden, of_inner = work.memory_shares(FOUND_FORWARD)
    norms, activation = of_hidden * norms, of_inner * activation
    again = again + np.where(work.recompute_norms, work.each * norms, 0.0)
    again = again + np.where(work.recompute_activation, work.each * activation, 0.0)
    return np.where(work.recompute_full, forward - _matrices_of(work, last).forward, again)


def _trained(work: LayerWork) -> Real:
    return trained_elements(
        work.kind, work.tensor_parallel, work.expert_tensor, work.expert_parallel
    )


def optimizer_seconds(parameters: Real, rate: Rates, accesses: float) -> Real:
    """Seconds of optimizer step and clipping of a rank's parameters: bytes / bandwidth."""
    return accesses * np.multiply(1.0, parameters) / rate.memory
