"""Bytes that one layer saves for the backward pass, for one token.

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

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import Struct

from cost_models.activations.operators import (
    attention_bytes,
    feed_forward_bytes,
    head_norms_bytes,
    norm_bytes,
    routed_bytes,
    score_bytes,
)
from cost_models.arrays import FP32, Count, Flag, Real
from cost_models.model.spec import Attention, LayerKind, ModelSpec
from cost_models.partition.tensor_sharding import sequence_shards
from cost_models.plan.recompute import EVERY_SECOND_MM, FULL, SELECTIVE, SELECTIVE_OPS
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import SoftwareProfile


class Regions(Struct, frozen=True):
    """Saved bytes a token by region, before any division."""

    # of routed experts: inputs and outputs, whole on every tensor-parallel rank that cuts them
    routed: Real
    replicated: float  # norms, dropout masks
    inputs: float  # inputs of column-parallel matrices
    split: Real  # between the matrices
    core: Real  # of ``split``, what selective recomputation drops
    # kept operator by operator besides the layer's input, see ``kept_results``
    results_split: Real = 0.0  # over the tensor-parallel ranks
    results_along: Real = 0.0  # along the sequence, with sequence parallelism
    results_whole: Real = 0.0  # on every rank
    results_unread: Real = 0.0  # of ``results_along``, see ``selective_ops.Results``


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
    along_sequence = sequence_shards(tensor_parallel, sequence_parallel)
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
    along = sequence_shards(tensor_parallel, sequence_parallel)
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
            inputs, outputs = weight.features
            rows = kind.rows_of(weight, 1.0)
            shares += rows * outputs if weight.sharding == "column" else inputs
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
