"""Seconds of computation on one accelerator: matrices by a roofline, the rest by bytes.

Symbols   m tokens   (k) input features, the summed dimension   n output features
          R achievable FLOP/s of large matmuls   beta memory bandwidth [bytes/s]   c compute_bytes
          t tensor_parallel   s seq_len
Units     seconds; every function broadcasts over plan columns.

Leaves out: tile and wave quantisation, power throttling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cost_models.arrays import Count, Flag, Real
from cost_models.flops import attention_flops_per_token
from cost_models.model import Attention, LayerKind, ModelSpec, Weight
from cost_models.sharding import cut_dim
from hardware_profiles.errors import InputError
from hardware_profiles.schema import Accelerator
from hardware_profiles.software import SoftwareProfile

# Share of the peak that the best large matmul reaches where nobody measured it: the median of the
# NVIDIA cards that were measured (stas00/ml-engineering, MAMF: A100 0.87, A100-PCIe 0.81, H100
# 0.80,
# GH200 0.84, B200 0.78, GB200 0.73, B300 0.79)
ACHIEVABLE_SHARE = 0.80
# Rate of the typical large matmul over the best one: the median of 183 bf16 shapes on an A100-PCIe,
# 0.718 of peak (MooreThreads/SimuMax@4dcaae5:configs/system/a100_pcie.json), over the best, 0.811
# (stas00/ml-engineering, MAMF 252.9 TFLOP/s)
TYPICAL_SHARE = 0.886
# Share of the datasheet's bandwidth that a copy kernel reaches; STREAM-like tests on A100 and H100
# read
# 0.87 to 0.93 (stas00/ml-engineering: compute/accelerator, memory bandwidth)
MEMORY_SHARE = 0.88
CPU_FLASH_KEYS = 512.0
# backward over forward FLOP of the attention core (see ``layer_seconds``)
CORE_RATIO = {"flash": 2.5, "eager": 2.0}


@dataclass(frozen=True, slots=True)
class Rates:
    """What the formulas need of an accelerator."""

    matmul: float  # FLOP/s
    memory: float  # bytes/s
    operator: float  # host seconds to start one operator
    host_is_device: bool  # a CPU: starting an operator and running it add up
    score: float = 0.0  # CPU: seconds of one attention score beside its matmuls
    core: float | None = None  # FLOP/s of attention cores and head, where they differ (fp8)

    @property
    def of_core(self) -> Rates:
        """The rates of attention cores and head."""
        return self if self.core is None else replace(self, matmul=self.core, core=None)


def rates(accelerator: Accelerator, precision: str, software: SoftwareProfile) -> Rates:
    """Return the rates of an accelerator in a precision; unknown is an error, not a guess.

    On a CPU both rates are those measured with all processes at work. On a GPU a typical matmul
    runs at TYPICAL_SHARE of the best one, and that at ACHIEVABLE_SHARE of the peak where nobody
    measured it.
    """
    best = best_matmul(accelerator, precision)
    if best is None:
        have = ", ".join(sorted(accelerator.peak_flops)) or "none"
        raise InputError(
            f"{accelerator.name}: no rate is known for {precision} (known: {have}); choose one "
            "with --precision"
        )
    measured = accelerator.device == "cpu"
    launch = accelerator.kernel_launch
    wide = best_matmul(accelerator, "bf16") if precision == "fp8" else None
    return Rates(
        core=None if wide is None else TYPICAL_SHARE * wide,
        matmul=best if measured else TYPICAL_SHARE * best,
        memory=accelerator.memory_bandwidth.value * (1.0 if measured else MEMORY_SHARE),
        operator=launch.value if launch is not None else software.operator_seconds,
        host_is_device=measured,
        score=accelerator.score_seconds.value if accelerator.score_seconds is not None else 0.0,
    )


def best_matmul(accelerator: Accelerator, precision: str) -> float | None:
    """Return FLOP/s of the best large matmul; 16-bit formats of one peak share one measurement."""
    peaks, measured = accelerator.peak_flops, accelerator.achievable_flops
    if precision in measured:
        return measured[precision].value
    peak = peaks.get(precision)
    if peak is None:
        return None
    twin = {"fp16": "bf16", "bf16": "fp16"}.get(precision, precision)
    if twin in measured and twin in peaks and peaks[twin].value == peak.value:
        return measured[twin].value
    return ACHIEVABLE_SHARE * peak.value


def matmul_seconds(
    tokens: Real, inputs: Real, outputs: Real, compute_bytes: float, rate: Rates
) -> Real:
    """One matmul: max(2 m (k) n / R, c (m k + k n + m n) / beta).

    Source: Williams, Waterman, Patterson, Roofline, CACM 52 (2009).

    >>> float(matmul_seconds(1024.0, 1024.0, 1024.0, 2.0, Rates(1e12, 1e12, 0.0, False)))
    0.002147483648
    """
    work = 2.0 * tokens * inputs * outputs / rate.matmul
    moved = compute_bytes * (tokens * inputs + inputs * outputs + tokens * outputs) / rate.memory
    return np.maximum(work, moved)


def _linear_seconds(
    weight: Weight,
    tokens: Real,
    tensor_parallel: Count,
    compute_bytes: float,
    rate: Rates,
) -> Real:
    # a matmul costs the same either way round; the cut dimension shrinks t-fold
    first, second = (np.multiply(1.0, length) for length in weight.shape[-2:])
    cut = cut_dim(weight)
    if cut == len(weight.shape) - 2:
        first = first / tensor_parallel
    elif cut == len(weight.shape) - 1:
        second = second / tensor_parallel
    return matmul_seconds(tokens, first, second, compute_bytes, rate)


def matrices_seconds(
    weights: tuple[Weight, ...],
    tokens: Real,
    tensor_parallel: Count,
    compute_bytes: float,
    rate: Rates,
    *,
    experts_per_token: int = 0,
    expert_tensor: Count | None = None,
    expert_parallel: Count = 1,
) -> Real:
    """All matrices of a block, forward; an expert meets m k / E tokens (balanced routing).

    Of E experts a rank holds E / ep, to which ep ranks send theirs; where tensor-parallel ranks
    hold experts whole (``expert_tensor`` 1), each sends its share of the tokens.
    """
    cut = tensor_parallel if expert_tensor is None else expert_tensor
    total: Real = np.zeros_like(np.multiply(1.0, tokens))
    for weight in weights:
        if weight.role == "linear":
            total = total + _linear_seconds(weight, tokens, tensor_parallel, compute_bytes, rate)
        elif weight.role == "expert":
            experts = weight.shape[0] / np.multiply(1.0, expert_parallel)
            routed = tokens * np.multiply(1.0, cut) / tensor_parallel
            share = routed * experts_per_token / experts
            total = total + experts * _linear_seconds(weight, share, cut, compute_bytes, rate)
    return total


def attention_core_seconds(
    attention: Attention,
    tokens: Real,
    seq_len: Count,
    tensor_parallel: Count,
    kernel: str,
    compute_bytes: float,
    rate: Rates,
    software: SoftwareProfile,
) -> Real:
    """Scores, softmax and values, forward.

    flash  FLOPs really done / (efficiency R): half of them under a causal mask, min(s, window) keys
           on a CPU  FLOPs / R and a time per score; a causal mask leaves out whole blocks of
           CPU_FLASH_KEYS keys, a window nothing (torch: FlashAttentionKernel.cpp, kvSplitSize)
    eager  all FLOPs / R, and the score matrix moved through memory
    """
    rate = rate.of_core
    if kernel == "flash" and rate.host_is_device:
        causal = attention.causal and attention.window is None
        visited = np.multiply(1.0, seq_len)
        if causal:
            visited = 0.5 * (visited + np.minimum(visited, CPU_FLASH_KEYS))
        flops = attention_flops_per_token(attention, visited) * tokens / tensor_parallel
        scores = attention.num_heads * visited * tokens / tensor_parallel
        return flops / rate.matmul + scores * rate.score
    keys = np.multiply(1.0, seq_len)
    if attention.window is not None:
        keys = np.minimum(keys, attention.window)
    if kernel == "flash":
        done = 0.5 if attention.causal and attention.window is None else 1.0
        flops = done * attention_flops_per_token(attention, keys) * tokens / tensor_parallel
        return flops / (software.flash_efficiency * rate.matmul)
    whole = np.multiply(1.0, seq_len)
    flops = attention_flops_per_token(attention, whole) * tokens / tensor_parallel
    pairs = attention.num_heads * whole * tokens / tensor_parallel
    moved = software.eager_scores_accesses * compute_bytes * pairs
    return flops / rate.matmul + moved / rate.memory


def elementwise_bytes_per_token(
    kind: LayerKind,
    hidden_size: int,
    compute_bytes: float,
    tensor_parallel: Count,
    sequence_parallel: Flag,
    software: SoftwareProfile,
) -> Real:
    """Bytes a token that norms, residuals, activation and rotary embeddings move, forward."""
    norm = {
        "layer": software.layer_norm_accesses,
        "layer_in_fp32": software.layer_norm_in_fp32_accesses,
    }.get(kind.norm, software.rms_norm_accesses)
    along = np.where(sequence_parallel, np.multiply(1.0, tensor_parallel), 1.0)
    blocks = 2.0 + (kind.cross_attention is not None)
    whole = hidden_size * (kind.num_norms * norm + blocks * software.residual_accesses)
    feed_forward = kind.feed_forward
    width = feed_forward.ffn_hidden_size * max(1, feed_forward.experts_per_token)
    split = software.activation_accesses * (width + feed_forward.shared_ffn_hidden_size)
    attention = kind.attention
    query_key = (attention.num_heads + attention.num_kv_heads) * attention.head_dim
    split += software.rotary_accesses * query_key * attention.rotary
    return compute_bytes * (whole / along + split / np.multiply(1.0, tensor_parallel))


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Device seconds of one micro-batch through some layers."""

    forward: Real
    backward: Real
    recompute: Real
    weights: Real = 0.0  # of ``backward``, gradients of matrices
    core: Real = 0.0  # of ``forward``, the attention cores


def layer_seconds(
    kind: LayerKind,
    hidden_size: int,
    seq_len: Count,
    tokens: Real,
    *,
    tensor_parallel: Count,
    sequence_parallel: Flag,
    expert_tensor: Count | None = None,
    expert_parallel: Count = 1,
    recompute_full: Flag,
    recompute_core: Flag,
    recompute_around: Flag = False,
    kernel: str,
    compute_bytes: float,
    rate: Rates,
    software: SoftwareProfile,
    core_work: Real = 1.0,
) -> PassSeconds:
    """Device seconds of one layer: forward, backward, and what is computed twice.

    ``tokens``: queries on this rank; each meets ``seq_len`` keys. ``core_work``: the share of
    them that it does meet, where the core skips some. ``recompute_around``: what is neither a
    matmul nor attention is computed again.

    Backward: two matmuls for each one; the flash core 2.5 times its forward (five matmuls for two,
    Dao, arXiv:2307.08691, sec. 3.1.2), the eager core twice. One of the two matmuls gives the
    gradient of the weight.
    """
    matrices = matrices_seconds(
        kind.weights,
        tokens,
        tensor_parallel,
        compute_bytes,
        rate,
        experts_per_token=kind.feed_forward.experts_per_token,
        expert_tensor=expert_tensor,
        expert_parallel=expert_parallel,
    )
    core: Real = np.zeros_like(matrices)
    for attention in (kind.attention, kind.cross_attention):
        if attention is not None:
            core = core + core_work * attention_core_seconds(
                attention, tokens, seq_len, tensor_parallel, kernel, compute_bytes, rate, software
            )
    moved = (
        elementwise_bytes_per_token(
            kind, hidden_size, compute_bytes, tensor_parallel, sequence_parallel, software
        )
        * tokens
        / rate.memory
    )
    forward = matrices + core + moved
    trained = matrices
    if any(w.frozen for w in kind.weights):  # no gradients of their own
        trained = matrices_seconds(
            tuple(w for w in kind.weights if not w.frozen),
            tokens,
            tensor_parallel,
            compute_bytes,
            rate,
            experts_per_token=kind.feed_forward.experts_per_token,
        )
    backward = (
        matrices + trained + CORE_RATIO[kernel] * core + software.backward_access_ratio * moved
    )
    again = np.where(recompute_core, core, 0.0) + np.where(recompute_around, moved, 0.0)
    again = np.where(recompute_full, forward, again)
    return PassSeconds(forward, backward, again, matrices, core)


def head_seconds(
    model: ModelSpec, tokens: Real, tensor_parallel: Count, compute_bytes: float, rate: Rates
) -> PassSeconds:
    """Output projection and cross-entropy: the matmul, and ten fp32 passes over the logits.

    A head's other matrices (a masked language model's, OPT's projection) are whole on every rank.
    """
    if not model.head_multiply:
        zero = np.zeros_like(np.multiply(1.0, tokens))
        return PassSeconds(zero, zero, zero, zero)
    rate = rate.of_core
    outputs = np.multiply(1.0, model.vocab_size) / tensor_parallel
    inputs = model.head_multiply / model.vocab_size
    matmul = matmul_seconds(tokens, inputs, outputs, compute_bytes, rate)
    others = tuple(w for w in model.head if w.cut != "vocab")
    matmul = matmul + matrices_seconds(others, tokens, tensor_parallel, compute_bytes, rate)
    # forward: cast (read, write), log-softmax (read twice, write), pick; backward: write, read
    # twice, write
    passes = 4.0 * tokens * outputs / rate.memory
    zero = np.zeros_like(matmul)
    return PassSeconds(matmul + 5.0 * passes, 2.0 * matmul + 5.0 * passes, zero, zero)


def optimizer_seconds(parameters: Real, rate: Rates, accesses: float) -> Real:
    """Optimizer step and clipping of the parameters that a rank updates: bytes / bandwidth."""
    return accesses * np.multiply(1.0, parameters) / rate.memory
