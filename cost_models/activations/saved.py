"""Bytes that the backward pass needs: what each layer saves for one token.

Symbols   h hidden_size   F ffn_hidden_size   a, k query and key/value heads   d head_dim
          e value_head_dim
          s seq_len   t tensor_parallel   c compute_bytes
Units     bytes a token, unless a name says otherwise; every function broadcasts over plan columns.

Three regions behave differently under tensor parallelism (Korthikanti et al.,
arXiv:2205.05198, sec. 4): norms and dropouts are whole on every rank, or split along the sequence
with sequence parallelism; the inputs of the column-parallel matrices are whole, split, or (DTensor)
gathered and kept; everything between the two matrices of a block is split t ways.

Leaves out: what the allocator reserves in addition to tensors (``memory.allocator``).

Source: Korthikanti et al., eq. 1 to 4, generalised; tensors that autograd saves of the real modules
of every family (``python -m benchmarks.memory_truth``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from msgspec import Struct

from cost_models.activations.delta_rule import around_rule_bytes, rule_bytes
from cost_models.arrays import FP8, FP32, Count, Flag, Real
from cost_models.model.spec import Attention, FeedForward, LayerKind, ModelSpec
from cost_models.plan.recompute import EVERY_SECOND_MM, FULL, SELECTIVE, SELECTIVE_OPS
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import SoftwareProfile

SINK_FEATURES = 8  # that queries and keys get for their product with a sink, in our executor
CAPPED_BLOCK = (
    128.0  # queries whose capped scores are alive at once: executor.ops.soft_cap.QUERY_BLOCK
)


class Regions(Struct, frozen=True):
    """Saved bytes a token by region, before any division."""

    # of routed experts: inputs and outputs, whole on every tensor-parallel rank that cuts them
    routed: float
    replicated: float  # norms, dropout masks
    inputs: float  # inputs of column-parallel matrices
    split: Real  # between the matrices
    core: Real  # of ``split``, what selective recomputation drops
    # kept operator by operator besides the layer's input, see ``kept_results``
    results_split: Real = 0.0  # over the tensor-parallel ranks
    results_along: Real = 0.0  # along the sequence, with sequence parallelism
    results_whole: Real = 0.0  # on every rank
    results_unread: Real = 0.0  # of ``results_along``, see ``selective_ops.Results``


def norm_bytes(
    kind: LayerKind, width: float, compute_bytes: float, software: SoftwareProfile
) -> float:
    """Bytes that one norm over ``width`` features saves: input, normalised copy, statistics."""
    if kind.norm in ("rms", "rms_mixed"):
        saved = (
            software.activations.rms_norm_saved * compute_bytes
            + software.activations.rms_norm_saved_fp32_bytes
        )
        if (
            kind.norm == "rms_mixed"
            and software.activations.rms_norm_saved_fp32_bytes
            and compute_bytes < FP32
        ):
            saved += compute_bytes
        return saved * width + software.activations.rms_norm_statistics_bytes
    if kind.norm == "rms_in_fp32":
        saved = software.activations.rms_norm_in_fp32_saved * compute_bytes
        saved += software.activations.rms_norm_in_fp32_saved_fp32_bytes
        return saved * width + software.activations.rms_norm_statistics_bytes
    if kind.norm == "layer_in_fp32":
        saved = software.activations.layer_norm_in_fp32_saved * compute_bytes
        saved += software.activations.layer_norm_in_fp32_saved_fp32_bytes
        return saved * width + software.activations.layer_norm_statistics_bytes
    return (
        software.activations.layer_norm_saved * compute_bytes * width
        + software.activations.layer_norm_statistics_bytes
    )


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

    c (a d + k d + k e + a e), c 2 a e more of a gated output; linear attention:
    ``delta_rule.around_rule_bytes``
    """
    if attention.delta_rule is not None:
        return around_rule_bytes(attention, compute_bytes)
    query = attention.num_heads * attention.head_dim
    key = attention.num_kv_heads * attention.head_dim
    value = attention.num_kv_heads * attention.value_head_dim
    output = attention.num_heads * attention.value_head_dim
    gate = 2 * output if attention.gated else 0  # its sigmoid, and the gated output
    return compute_bytes * (query + key + value + output + gate)


def score_bytes(
    attention: Attention,
    seq_len: Count,
    kernel: str,
    dropout: bool,
    software: SoftwareProfile,
    compute_bytes: float = 2.0,
) -> Real:
    """Bytes that the attention core saves: softmax and dropout (eager), or the log-sum-exp (flash).

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
    return per_pair * attention.num_heads * np.multiply(1.0, seq_len)


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


def routed_bytes(
    feed_forward: FeedForward, hidden_size: int, compute_bytes: float, software: SoftwareProfile
) -> float:
    """Around the experts: the router's input, the k copies of the token and its k outputs.

        c h (k + o k + 1) + the router's tensors for each of E experts

    o: 1 where the outputs are saved for their product with the routing weights, 0 where these
    multiply inside the experts' activation.

    A router in fp32 (DeepSeek) saves 4 h instead of c h, 0 if everything is in fp32. On average
    over ranks, also where experts lie on other ranks (balanced routing).
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


def layer_regions(
    model: ModelSpec,
    workload: Workload,
    software: SoftwareProfile,
    kind: LayerKind,
    blockwise: Flag = False,
) -> Regions:
    """Saved bytes of one layer for one token, by region.

    ``blockwise``: attention is put together from blocks of keys (context parallelism), whose scores
    no kernel keeps.
    """
    compute, hidden_size, mlp = workload.compute_bytes, model.hidden_size, kind.feed_forward
    attentions = [kind.attention]
    if kind.cross_attention is not None:
        attentions.append(kind.cross_attention)
    if software.activations.repeats_keys:
        attentions = [
            each if each.delta_rule else replace(each, num_kv_heads=each.num_heads)
            for each in attentions
        ]
    masks = (1 + len(attentions)) * software.activations.dropout_mask_bytes
    masks = masks * (model.hidden_dropout > 0)
    latents = [rank for rank in (kind.attention.q_lora_rank, kind.attention.kv_lora_rank) if rank]
    core = _core_bytes(model, workload, software, attentions, blockwise)
    split = core + sum(attention_bytes(attention, compute) for attention in attentions)
    split = split + feed_forward_bytes(mlp, compute, software)
    if mlp.inner_dropout and model.hidden_dropout > 0:
        mask_bytes = software.activations.dropout_mask_bytes
        split = split + (mask_bytes + compute) * mlp.ffn_hidden_size
    if software.activations.keeps_fused_qkv:  # with the values, queries and keys to be rotated
        heads = kind.attention.num_heads + kind.attention.num_kv_heads
        split = split + compute * heads * kind.attention.head_dim
    inputs = _column_inputs(kind) * hidden_size + sum(latents)
    return Regions(
        routed=routed_bytes(mlp, hidden_size, compute, software),
        replicated=_norms_bytes(kind, hidden_size, latents, compute, software)
        + masks * hidden_size,
        inputs=compute * inputs,
        split=split + head_norms_bytes(kind, compute, software),
        core=core,
    )


def _core_bytes(
    model: ModelSpec,
    workload: Workload,
    software: SoftwareProfile,
    attentions: Sequence[Attention],
    blockwise: Flag,
) -> Real:
    """Bytes of scores, or in blocks only of the logarithms of their sums."""
    dropout = model.attention_dropout > 0
    kernel, compute = workload.attention_kernel, workload.compute_bytes
    scores = (
        score_bytes(attention, workload.seq_len, kernel, dropout, software, compute)
        for attention in attentions
    )
    log_sums = FP32 * sum(attention.num_heads for attention in attentions)
    return np.where(blockwise, log_sums, sum(scores, start=np.asarray(0.0)))


def _column_inputs(kind: LayerKind) -> int:
    """Inputs of column-parallel matrices: of attentions and the MLP, one if they share it."""
    if kind.parallel_residual and kind.num_norms == 1:
        return 1
    mlp = kind.feed_forward
    reads = not mlp.num_experts or mlp.shared_ffn_hidden_size > 0  # else only the router does
    return 1 + (kind.cross_attention is not None) + int(reads)


def _norms_bytes(
    kind: LayerKind,
    hidden_size: int,
    latents: Sequence[int],
    compute_bytes: float,
    software: SoftwareProfile,
) -> float:
    """Bytes of the norms of hidden states and latents."""
    norms = kind.num_norms * norm_bytes(kind, hidden_size, compute_bytes, software)
    norms += sum(norm_bytes(kind, rank, compute_bytes, software) for rank in latents)
    if kind.parallel_residual and kind.num_norms == 2 and kind.norm == "layer":  # of one input
        norms -= software.activations.layer_norm_saved * compute_bytes * hidden_size
    return norms


def head_norms_bytes(kind: LayerKind, compute_bytes: float, software: SoftwareProfile) -> float:
    """Bytes of the norms of queries and keys."""
    attention = kind.attention
    if not attention.qk_norm:
        return 0.0
    heads = attention.num_heads + attention.num_kv_heads
    norms = heads if attention.qk_norm == "head" else 2.0
    width = attention.head_dim * heads / norms
    return norms * norm_bytes(kind, width, compute_bytes, software)


def saved_bytes_per_token(
    regions: Regions,
    hidden_size: int,
    *,
    compute_bytes: float,
    tensor_parallel: Count,
    sequence_parallel: Flag,
    recompute: Count,
    keeps_gathered_inputs: bool,
    expert_tensor: Count | None = None,
) -> Real:
    """Bytes that one layer keeps for one token from its forward to its backward pass.

        none       replicated / (t if sp) + inputs / (t if sp and re-gathered) + split / t
                   + routed (/ t where tensor-parallel ranks hold experts whole)
        selective  without the attention core's own tensors
        full       the layer's input: c h / (t if sp)
        selective_ops  that, and results of matmuls, fused attention and collectives;
                   ops:every-2nd-mm  fewer of them (``selective_ops.kept_results``)
        modules:...  see ``checkpointed_modules``

    Source: Korthikanti et al. (arXiv:2205.05198), eq. 2, 4, 6; generalised to grouped queries,
    gated MLPs and flash attention.

    With Megatron's coefficients, 34 s b h + 5 a s^2 b (eq. 1) for GPT-3's h = 12288, a = 96:
    see tests/cost_models/activations/test_saved.py.
    """
    along_sequence = np.where(sequence_parallel, np.multiply(1.0, tensor_parallel), 1.0)
    inputs_over = 1.0 if keeps_gathered_inputs else along_sequence
    everything = (
        regions.replicated / along_sequence
        + regions.inputs / inputs_over
        + regions.split / tensor_parallel
        + regions.routed * (1.0 if expert_tensor is None else expert_tensor / tensor_parallel)
    )
    selective = everything - regions.core / tensor_parallel
    full = compute_bytes * hidden_size / along_sequence
    kept = full + regions.results_split / tensor_parallel
    kept = kept + regions.results_along / along_sequence + regions.results_whole
    return np.select(
        [np.equal(recompute, code) for code in (FULL, SELECTIVE, SELECTIVE_OPS, EVERY_SECOND_MM)],
        [full, selective, kept, kept],
        everything,
    )


def backward_working_bytes_per_token(
    kind: LayerKind,
    hidden_size: int,
    compute_bytes: float,
    tensor_parallel: Count,
    software: SoftwareProfile,
) -> Real:
    """Largest simultaneous gradients of activations in the backward pass of one layer.

        c (3 F / t + 3 h)   gated: gradients of the product, of the activation, of the up projection
        c (2 F / t + 3 h)   plain: gradients of the activation's output and input

    The MLP is the widest point; the gradients of the layer's output, of the residual stream and of
    the block's input are also alive. Capped scores (executor/ops/soft_cap.py) are computed in
    blocks of Q = 128 queries: three fp32 tensors of a Q s / t, and a product in compute precision.
    A loop over experts processes one of them at a time.
    """
    feed_forward = kind.feed_forward
    width = float(feed_forward.ffn_hidden_size * max(1, feed_forward.experts_per_token))
    if software.activations.experts_one_by_one:
        width /= max(1, feed_forward.num_experts)
    width += feed_forward.shared_ffn_hidden_size
    tensors = 3.0 if feed_forward.gated else 2.0
    between = compute_bytes * tensors * width / np.multiply(1.0, tensor_parallel)
    if kind.attention.capped:
        exact = max(FP32, compute_bytes)
        block = kind.attention.num_heads * CAPPED_BLOCK / np.multiply(1.0, tensor_parallel)
        products = compute_bytes if compute_bytes < exact else 0.0
        between = np.maximum(between, (3.0 * exact + products) * block)
    return between + 3.0 * compute_bytes * hidden_size


def due_bytes_per_token(
    kind: LayerKind,
    regions: Regions,
    hidden_size: int,
    operand_bytes: float,
    tensor_parallel: Count,
    sequence_parallel: Flag,
) -> Real:
    """Bytes that a layer keeps for one token from its input gradients to its weight gradients.

        inputs / (t if sp) + c (sum of column-cut (out) / t + sum of row-cut ((in) / t + out))
        experts: k times c (sum of (out) / t and (in) / t, h of their inputs and outputs)

    Operands of the pending matmuls: inputs and output gradients of every matrix, c bytes an element
    (of fp8 matmuls: cast already, as Transformer Engine's WeightGradStore keeps them). A
    column-cut one gathers its input again; the gradient of a row-cut one's output is whole, since
    its input's gradient needed it so. Frozen matrices have no pending matmul; of adapters only A of
    a column-cut matrix is pending, with its gradient of a few features.
    """
    along = np.where(sequence_parallel, np.multiply(1.0, tensor_parallel), 1.0)
    shares, whole, inputs_due = 0.0, 0.0, regions.inputs
    own = [w for w in kind.weights if w.role == "linear" and not w.frozen and not w.is_adapter]
    if any(w.frozen for w in kind.weights):
        first = [w for w in kind.weights if w.is_adapter and w.sharding == "replicate"]
        first = [w for w in first if w.role == "linear" and w.shape[1] == hidden_size]  # A
        whole += float(sum(w.shape[0] for w in first))
        parts = {w.part for w in (*first, *(w for w in own if w.sharding == "column"))}
        inputs_due = operand_bytes * hidden_size * len(parts)
    for weight in own:
        if weight.sharding in ("column", "row"):
            outputs, inputs = weight.shape[::-1] if weight.transposed else weight.shape
            shares += outputs if weight.sharding == "column" else inputs
            whole += 0.0 if weight.sharding == "column" else outputs
    experts = kind.feed_forward
    if experts.num_experts and not all(w.frozen for w in kind.weights if w.is_routed_expert):
        inner = 3.0 if experts.gated else 2.0
        shares += experts.experts_per_token * inner * experts.ffn_hidden_size
        whole += 2.0 * experts.experts_per_token * hidden_size
    return (
        inputs_due / along
        + operand_bytes * shares / np.multiply(1.0, tensor_parallel)
        + operand_bytes * whole
    )
