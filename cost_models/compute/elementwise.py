"""Bytes that elementwise operators move: norms, residuals, activations, biases, expert loops.

Symbols   h hidden_size   c compute_bytes   E experts   k experts of a token
Units     bytes a token, unless a name says otherwise; every function broadcasts over plan columns.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from cost_models.activations.operators import by_activation
from cost_models.arrays import Count, Flag, Real
from cost_models.communication.expert_parallel import slots_per_token
from cost_models.compute.rates import Rates
from cost_models.model.parameters import shard_numel
from cost_models.model.spec import LayerKind
from cost_models.partition.tensor_sharding import sequence_shards
from hardware_profiles.software.kernels import ForwardSoftware
from hardware_profiles.software.trainer import SoftwareProfile

GATE_ACCESSES = 3.0  # of a gated output: two reads, one write


class ElementwiseWork(Struct, frozen=True):
    """A layer whose operators between matrices and attention are counted, and who runs them."""

    kind: LayerKind
    hidden_size: int
    compute_bytes: float  # of an element of a hidden state
    tensor_parallel: Count
    sequence_parallel: Flag
    software: ForwardSoftware
    hidden_dropout: bool = False
    expert_parallel: Count = 1
    inner_bytes: float | None = None  # of an element that matrices give (autocast); None: the same
    gather_share: float = 1.0  # of the memory bandwidth, at which tokens are permuted

    @property
    def inner(self) -> float:
        """Bytes of an element that a matrix gives."""
        return self.compute_bytes if self.inner_bytes is None else self.inner_bytes

    @property
    def along(self) -> Real:
        """Ranks that split hidden states along the sequence."""
        return sequence_shards(self.tensor_parallel, self.sequence_parallel)


def elementwise_bytes_per_token(work: ElementwiseWork) -> tuple[Real, Real]:
    """Bytes a token that kernels on hidden states and the MLP's activation move, forward.

    Kernels on hidden states: norms, residuals, rotary embeddings, gates, permutations of tokens.

    Tokens are permuted into the order of their k experts (one read, k written) and summed
    afterwards (k read, one written; weighting reads k more: 3 k + 1 with the reads of the matmuls).
    With expert parallelism they are permuted by rank before the exchange and by expert after it,
    and both once more on the way back: 4 k more. Their bytes are divided by ``gather_share``.
    One-hot masks move them in products. Where rows are weighted in fp32, operator by operator, this
    moves ``weighting_bytes`` more an element.
    """
    kind, inner, kernels = work.kind, work.inner, work.software.kernels
    norms, activation = norm_and_activation_bytes(work)
    blocks = 2.0 + (kind.cross_attention is not None)
    # one access is of what a matrix gave
    residual = work.compute_bytes * (kernels.residual_accesses - 1.0)
    residual += inner * (1.0 + work.hidden_dropout * kernels.dropout_accesses)
    whole: Real = work.hidden_size * (blocks * residual)
    feed_forward = kind.feed_forward
    if feed_forward.num_experts and not kernels.one_hot_capacity:
        copies = np.where(np.greater(work.expert_parallel, 1), 7.0, 3.0)
        permuted = copies * feed_forward.experts_per_token + 1.0
        whole = whole + inner * work.hidden_size * permuted / work.gather_share
        weighted = kernels.weighting_bytes * feed_forward.experts_per_token
        whole = whole + weighted * work.hidden_size
    attention = kind.attention
    query_key = (attention.num_heads + attention.num_kv_heads) * attention.head_dim
    split = kernels.rotary_accesses * query_key * attention.rotary
    # gates: of attention one kernel (two reads, one write), of linear attention with a norm
    if attention.gated or attention.delta_rule is not None:
        split += GATE_ACCESSES * attention.num_heads * attention.value_head_dim
    moved = whole / work.along + inner * split / np.multiply(1.0, work.tensor_parallel)
    return norms + moved, activation


def norm_and_activation_bytes(work: ElementwiseWork) -> tuple[Real, Real]:
    """Bytes a token that norms move, and the activation of the MLP (or of all experts)."""
    kind, kernels, compute_bytes = work.kind, work.software.kernels, work.compute_bytes
    rms_norm = kernels.rms_norm_accesses + kernels.rms_norm_fp32_bytes / compute_bytes
    norm = {
        "layer": kernels.layer_norm_accesses,
        "layer_in_fp32": kernels.layer_norm_in_fp32_accesses,
    }.get(kind.norm, rms_norm)
    feed_forward = kind.feed_forward
    accesses = kernels.activation_accesses if feed_forward.gated else 2.0  # read, write
    unfused = kernels.unfused_activation_accesses
    accesses += by_activation(unfused, feed_forward, 0.0, autocast=work.inner < compute_bytes)
    inner = work.inner * accesses * activation_width(kind, work.software)
    norms = compute_bytes * work.hidden_size * kind.num_norms * norm
    return norms / work.along, inner / np.multiply(1.0, work.tensor_parallel)


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
            total = total + shard_numel(weight, tensor_parallel)
    return total


def optimizer_seconds(parameters: Real, rate: Rates, accesses: float) -> Real:
    """Seconds of optimizer step and clipping of a rank's parameters: bytes / bandwidth."""
    return accesses * np.multiply(1.0, parameters) / rate.memory


def loop_bytes(
    kind: LayerKind, hidden_size: int, compute_bytes: float, software: SoftwareProfile
) -> tuple[float, float]:
    """Bytes a token that a loop over experts moves beyond one kernel for all, forward and backward.

    One kernel: 3 k + 1 accesses forward, twice these backward. A loop:

        forward    7 k + 1       zeros written; for each expert its rows gathered (2 k in all),
                                 weighted (2 k), added to the sum (3 k)
        backward   4 E + 11 k - 3
                                 gradients of sums and weights (8 k); of each expert's rows,
                                 written into zeros of the size of all tokens (E + 3 k), which are
                                 then summed (3 (E - 1))

    Leaves out: the host's time for each expert (``kernel_launch``).

    Source: counted at torch's dispatcher, transformers MixtralSparseMoeBlock of 2024 (index,
    index_add_ and their gradients).
    """
    feed_forward = kind.feed_forward
    if not (feed_forward.num_experts and software.activations.experts_one_by_one):
        return 0.0, 0.0
    experts, chosen = 1.0 * feed_forward.num_experts, 1.0 * feed_forward.experts_per_token
    forward = 4.0 * chosen
    backward = 4.0 * experts + 11.0 * chosen - 3.0 - 2.0 * (3.0 * chosen + 1.0)
    return compute_bytes * hidden_size * forward, compute_bytes * hidden_size * backward
