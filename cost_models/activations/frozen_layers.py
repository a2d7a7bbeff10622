"""Saved activations of a layer with frozen weights, with adapters on some of its matrices.

The gradient of a matrix needs the matrix's input; a frozen matrix has no gradient, so autograd
saves neither its input nor the output of its norm. An adapter needs its own input.

Symbols   h hidden_size   F ffn_hidden_size   c compute_bytes
Units     bytes a token.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cost_models.activations.saved import Regions
from cost_models.arrays import Real
from cost_models.model.lora import adapter_names
from cost_models.model.spec import LayerKind, ModelSpec, Weight
from cost_models.plan.plan import PlanTable
from hardware_profiles.software.trainer import SoftwareProfile


def of_frozen_layer(
    regions: Regions,
    kind: LayerKind,
    hidden_size: int,
    compute_bytes: float,
    software: SoftwareProfile,
) -> Regions:
    """Return the saved tensors of a layer without those only frozen weights need, plus adapters.

        norms        without the normalised copy, c h each, or c (a + k) d of queries and keys (RMS;
                     torch's layer norm keeps its input)
        inputs       without c h of a block none of whose first matrices is adapted
        MLP          without its product c F (of all experts that a token visits), where the last
                     matrix is not adapted, or reads a copy
        adapters     b h for each, where the trainer copies their input (dropout, another
                     precision), in place of the block's own; what it keeps of their outputs
        fused qkv    c (a d + k d), where values are a view of the whole
        4 bits       inputs of matrices in 4 bits, where their library saves them nevertheless

    Unchanged if all weights are trained; if a trainer's own functions save inputs in any case, only
    norms lose their copies.
    """
    frozen = [w for w in kind.weights if w.frozen]
    norms = [w for w in frozen if w.part == "norm"]
    of_heads = [w for w in norms if w.is_head_norm or w.sharding == "heads"]
    norms = [w for w in norms if w not in of_heads and w.shape == (hidden_size,)]
    dropped = len(norms) * normalised_bytes(kind, hidden_size, compute_bytes, software)
    if of_heads:
        both = (kind.attention.num_heads + kind.attention.num_kv_heads) * kind.attention.head_dim
        less = normalised_bytes(kind, both, compute_bytes, software)
        regions = replace(regions, split=regions.split - less)
    if not frozen or software.frozen.saves_inputs:
        return replace(regions, replicated=regions.replicated - dropped)
    adapted = _adapted(kind)
    first = [w for w in frozen if w.role in ("linear", "expert") and w.sharding == "column"]
    attention = [w for w in first if w.part == "attention"]
    mlp = [w for w in first if w.part in ("mlp", "shared_experts", "experts")]
    made_anew = software.adapters.input_bytes > 0.0
    inputs, replicated, split = regions.inputs, regions.replicated, np.asarray(regions.split)
    for block in (attention, mlp):
        kept = any(w.name in adapted for w in block)
        if not kept or made_anew:
            inputs = inputs - compute_bytes * hidden_size * bool(block)
    replicated -= dropped
    last = [
        w for w in frozen if w.sharding == "row" and w.part in ("mlp", "experts", "shared_experts")
    ]
    if last and (made_anew or not any(w.name in adapted for w in last)):
        feed_forward = kind.feed_forward
        width = feed_forward.ffn_hidden_size * max(1, feed_forward.experts_per_token)
        split = split - compute_bytes * (width + feed_forward.shared_ffn_hidden_size)
    matrices = [w for w in frozen if w.name in adapted]
    inputs += software.adapters.input_bytes * sum(_features(w)[0] for w in matrices)
    queries = [w for w in matrices if w in attention]
    split = split + software.adapters.output_bytes * sum(_features(w)[1] for w in queries)
    small = [w for w in frozen if w.quantised and w.role == "linear"]
    split = split + software.frozen.quantised_input_bytes * _distinct_inputs(small)
    if software.activations.keeps_fused_qkv:
        heads = kind.attention
        width = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
        split = split + compute_bytes * width
    # routed experts read copies of the tokens, which only their weights' gradients need
    routed = regions.routed * (0.5 if kind.feed_forward.num_experts else 1.0)
    return replace(
        regions, inputs=inputs, replicated=max(0.0, replicated), split=split, routed=routed
    )


def normalised_bytes(
    kind: LayerKind, hidden_size: float, compute_bytes: float, software: SoftwareProfile
) -> float:
    """Bytes of what only the weight of a norm multiplies: c h, in fp32 where the product is."""
    if kind.norm == "layer":  # saved is its input
        return 0.0
    saved = software.activations.rms_norm_saved * compute_bytes
    if kind.norm == "rms_in_fp32":
        saved = software.activations.rms_norm_in_fp32_saved_fp32_bytes / 2.0
    if kind.norm == "layer_in_fp32":
        saved = software.activations.layer_norm_in_fp32_saved_fp32_bytes / 3.0
    return saved * hidden_size


def _adapted(kind: LayerKind) -> set[str]:
    names = {w.name for w in kind.weights if w.is_adapter}
    return {w.name for w in kind.weights if w.frozen and adapter_names(w.name)[0] in names}


def _distinct_inputs(matrices: list[Weight]) -> int:
    """Return the features of what matrices read, once for those that read the same."""
    blocks = {(w.part, w.sharding): _features(w)[0] for w in matrices}
    return sum(blocks.values())


def _features(weight: Weight) -> tuple[int, int]:
    """Return input and output features of a matrix."""
    if weight.transposed:
        return weight.shape[-2], weight.shape[-1]
    return weight.shape[-1], weight.shape[-2]


def sharded_input_bytes(
    model: ModelSpec, compute_bytes: float, software: SoftwareProfile, table: PlanTable
) -> Real:
    """Additional bytes a token and layer that a trainer with sharded frozen layers saves: n c h."""
    if not software.frozen.layer_inputs or not any(w.frozen for w in model.embedding):
        return np.zeros(len(table))
    sharded = (table.zero_stage >= 3) & (table.shard_ranks > 1)
    one = software.frozen.layer_inputs * compute_bytes * model.hidden_size
    return np.where(sharded, one, 0.0)
