"""Device seconds of one layer: matrices, attention core, all other operators by bytes moved.

Symbols   beta memory bandwidth [bytes/s]   c compute_bytes
Units     seconds; every function broadcasts over plan columns.

Source: Williams, Waterman, Patterson, Roofline (CACM 52, 2009), operator by operator; rates and
shares with their own sources in ``hardware_profiles``; a large cache: ``cached``. Leaves out: the
caches of cards with HBM, and of older ones, which may hold small tensors between two kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from cost_models.activations.fp8 import cast_elements, gathered_cast_share, matmul_inputs
from cost_models.arrays import Count, Flag, Real
from cost_models.communication.expert_parallel import most_loaded, slots_per_token
from cost_models.compute.adapters import adapter_bytes_per_token
from cost_models.compute.attention import CoreWork, attention_core_seconds, core_ratio
from cost_models.compute.cached import FOUND_BACKWARD, FOUND_FORWARD, traffic_share
from cost_models.compute.casts import (
    FP32_BYTES,
    autocast_bytes_per_token,
    cast_bytes_per_token,
)
from cost_models.compute.elementwise import (
    ElementwiseWork,
    activation_width,
    bias_elements,
    elementwise_bytes_per_token,
    loop_bytes,
    norm_and_activation_bytes,
)
from cost_models.compute.matrices import Matmuls, matrices_seconds
from cost_models.compute.one_hot_dispatch import one_hot_seconds
from cost_models.compute.rates import Rates
from cost_models.model.parameters import shard_numel
from cost_models.model.spec import Attention, LayerKind, Weight
from cost_models.partition.frozen_weights import rounded_elements
from cost_models.partition.recomputed_layers import skipped_last_matrix
from cost_models.partition.tensor_sharding import cut_ranks, sequence_shards
from hardware_profiles.software.trainer import SoftwareProfile

# an element: int32 written and read (8), int8 written, masked, shifted by its zero, read (6)
# Source: AutoGPTQ: auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, QuantLinear.forward
OPERATORS_UNPACKING_BYTES: Final = 14.0


def dequantised_bytes(kind: LayerKind, compute_bytes: float, tensor_parallel: Count) -> Real:
    """Bytes that a pass moves to dequantise a layer's 4-bit weights."""
    each, matrices = 0.5 + compute_bytes, (w for w in kind.weights if w.quantised)
    return sum((each * w.numel / cut_ranks(w, tensor_parallel) for w in matrices), 0.0)


def trained_elements(
    kind: LayerKind,
    tensor_parallel: Count,
    expert_tensor: Count | None = None,
    expert_parallel: Count = 1,
) -> Real:
    """Elements of a layer's trained matrices on one rank."""
    trained = (w for w in kind.weights if w.is_matrix and not w.frozen)
    ranks = tensor_parallel, expert_tensor, expert_parallel
    return sum((shard_numel(weight, *ranks) for weight in trained), 0.0)


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
    seq_len: Count  # tokens of the layer's own sequences
    tokens: Real  # of these, on this rank
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

    @property
    def source_tokens(self) -> Real:
        """Tokens that cross-attention reads; without it the layer's own."""
        across = self.kind.cross_attention
        return self.tokens if across is None else across.keys_of(self.tokens)

    def core(self, attention: Attention) -> CoreWork:
        """Return the work of one of the layer's attention cores."""
        return CoreWork(
            attention,
            self.tokens,
            attention.keys_of(self.seq_len),
            self.tensor_parallel,
            self.kernel,
            self.compute_bytes,
            self.rate,
            self.software,
            self.attention_dropout,
            self.autocasts,
        )

    @property
    def elementwise(self) -> ElementwiseWork:
        """The work of the operators between matrices and attention."""
        return ElementwiseWork(
            self.kind,
            self.hidden_size,
            self.element,
            self.tensor_parallel,
            self.sequence_parallel,
            self.software,
            self.hidden_dropout,
            self.expert_parallel,
            self.inner,
            self.rate.gather,
        )

    def memory_shares(self, found: float) -> tuple[Real, Real]:
        """Share of the bytes that go through memory: of kernels on hidden states, on inner ones."""
        if not self.rate.cache:
            return 1.0, 1.0
        ranks = np.multiply(1.0, self.tensor_parallel)
        hidden = self.element * self.hidden_size * self.tokens
        hidden = hidden / sequence_shards(self.tensor_parallel, self.sequence_parallel)
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
    rounded, rounded_back = rounding_seconds(work)
    forward, inputs = forward + rounded, inputs + rounded_back
    if work.autocasts:  # weights down, their gradients up
        each = (work.compute_bytes + FP32_BYTES) / work.rate.memory
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
    loaded = most_loaded(work.kind.feed_forward, work.expert_parallel, work.software)
    seconds = matrices_seconds(
        weights,
        work.tokens,
        work.tensor_parallel,
        work.compute_bytes,
        work.rate,
        experts_per_token=slots * loaded,
        expert_tensor=work.expert_tensor,
        expert_parallel=work.expert_parallel,
        fp32_adapters=work.software.adapters.in_fp32 and work.compute_bytes < FP32_BYTES,
        source_tokens=work.source_tokens,
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
            core = core + work.computed_score_share * attention_core_seconds(work.core(attention))
    return core


def elementwise_seconds(work: LayerWork) -> tuple[Real, Real]:
    """Seconds of norms, residuals, activation, rotary embeddings, adapters, casts, sums of blocks.

        (bytes that the operators read and write) / beta, but for what a large cache holds

    Forward and backward. Source: ``elementwise_bytes_per_token``, ``adapters``, ``casts``,
    ``context_bytes_moved_per_token``, ``traffic_share``.
    """
    software, each = work.software, work.each
    hidden, activation = elementwise_bytes_per_token(work.elementwise)
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


def rounding_seconds(work: LayerWork) -> tuple[Real, Real]:
    """Seconds of rounding weights and inputs of all matrices, and of the gradients through it.

        (r P + q b s i) / beta      r, q bytes moved for an element of a matrix, of its input

    i: inputs of all matrices together. Source: pytorch/ao: torchao/quantization/qat. Leaves out:
    operators that a compiler fuses.
    """
    rounding = work.software.rounding
    if not (rounding.weight_bytes or rounding.input_bytes):
        return 0.0, 0.0
    rounded = rounded_elements(work.kind, work.tensor_parallel) / work.rate.memory
    trained = _trained(work) / work.rate.memory
    inputs = work.each * matmul_inputs(work.kind, work.tensor_parallel)
    return (
        rounding.weight_bytes * rounded + rounding.input_bytes * inputs,
        rounding.weight_gradient_bytes * trained + rounding.input_gradient_bytes * inputs,
    )


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

    Without the core, too, where a trainer keeps what that gives (``recomputes_attention``).
    Parts: the core, all elementwise operators, those of norms or of the activation, and matrices.
    """
    again = np.where(work.recompute_core, core, 0.0) + np.where(work.recompute_around, moved, 0.0)
    last = skipped_last_matrix(
        work.kind, hidden_dropout=work.hidden_dropout, software=work.software
    )
    for repeats_it, matrices in work.recompute_matrices:
        left = tuple(w for w in matrices if w not in last)
        again = again + np.where(repeats_it, _matrices_of(work, left).forward, 0.0)
    norms, activation = norm_and_activation_bytes(work.elementwise)
    of_hidden, of_inner = work.memory_shares(FOUND_FORWARD)
    norms, activation = of_hidden * norms, of_inner * activation
    again = again + np.where(work.recompute_norms, work.each * norms, 0.0)
    again = again + np.where(work.recompute_activation, work.each * activation, 0.0)
    whole = forward - _matrices_of(work, last).forward
    whole = whole - (0.0 if work.software.kernels.recomputes_attention else core)
    return np.where(work.recompute_full, whole, again)


def _trained(work: LayerWork) -> Real:
    return trained_elements(
        work.kind, work.tensor_parallel, work.expert_tensor, work.expert_parallel
    )
