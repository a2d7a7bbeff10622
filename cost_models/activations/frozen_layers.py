"""Saved activations of a layer with frozen weights, with adapters on some of its matrices.

The gradient of a matrix needs the matrix's input; a frozen matrix has no gradient, so autograd
saves neither its input nor the output of its norm. An adapter needs its own input.

Symbols   h hidden_size   F ffn_hidden_size   c compute_bytes
Units     bytes a token.

Source: Hu et al., LoRA (arXiv:2106.09685), sec. 4; tensors that autograd saves of real modules,
counted in the tests; ``model.adapter_methods``. Leaves out: prompts, prefixes and new layers.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec.structs import replace

from cost_models.activations.saved import Regions
from cost_models.arrays import FP32, Real
from cost_models.model.adapter_methods import METHODS
from cost_models.model.spec import LayerKind, ModelSpec, Weight
from cost_models.plan.plan import PlanTable
from cost_models.plan.recompute import FULL
from hardware_profiles.software.trainer import SoftwareProfile

MLP_PARTS: Final = ("mlp", "shared_experts", "experts")


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
                     precision), in place of the block's own; what it keeps of their outputs, and
                     what their method keeps of theirs and of the frozen matrices'
        4 bits       inputs of matrices in 4 bits, where their library saves them nevertheless

    Unchanged if all weights are trained; if a trainer's own functions save inputs in any case, only
    norms lose their copies.
    """
    frozen = [w for w in kind.weights if w.frozen]
    of_hidden, of_heads = unsaved_norm_bytes(kind, frozen, hidden_size, compute_bytes, software)
    split, replicated = regions.split - of_heads, regions.replicated - of_hidden
    kept, kept_whole = _method_bytes(frozen, compute_bytes, software)
    split, replicated = split + kept, replicated + kept_whole
    if not frozen or software.frozen.saves_inputs:
        return replace(regions, replicated=replicated, split=split)
    adapted = _adapted(kind)
    unread = _unread_blocks(frozen, adapted, software) * compute_bytes * hidden_size
    split = split - _unread_product_bytes(kind, frozen, adapted, compute_bytes, software)
    inputs, outputs = _adapter_bytes([w for w in frozen if w.name in adapted], software)
    split = split + outputs
    small = [w for w in frozen if w.quantised and w.role == "linear"]
    split = split + software.frozen.quantised_input_bytes * _distinct_inputs(small)
    # routed experts read copies of the tokens, which only their weights' gradients need
    outputs_saved = software.activations.expert_outputs_saved
    read = outputs_saved / (1.0 + outputs_saved)
    routed = regions.routed * (read if kind.feed_forward.num_experts else 1.0)
    return replace(
        regions,
        inputs=regions.inputs - unread + inputs,
        replicated=max(0.0, replicated),
        split=split,
        routed=routed,
    )


def unsaved_mlp_bytes(kind: LayerKind, compute_bytes: float, software: SoftwareProfile) -> float:
    """Return the bytes between the MLP's matrices that no weight gradient needs."""
    frozen = [w for w in kind.weights if w.frozen]
    if software.frozen.saves_inputs:
        return 0.0
    return _unread_product_bytes(kind, frozen, _adapted(kind), compute_bytes, software)


def unsaved_norm_bytes(
    kind: LayerKind,
    frozen: list[Weight],
    hidden_size: int,
    compute_bytes: float,
    software: SoftwareProfile,
) -> tuple[float, float]:
    """Bytes of normalised copies that frozen norms do not save: of the layer, and of heads."""
    norms = [w for w in frozen if w.part == "norm"]
    of_heads = [w for w in norms if w.is_head_norm or w.sharding == "heads"]
    norms = [w for w in norms if w not in of_heads and w.shape == (hidden_size,)]
    width = (kind.attention.num_heads + kind.attention.num_kv_heads) * kind.attention.head_dim
    if kind.attention.delta_rule is not None:  # a norm of the output
        width = kind.attention.num_heads * kind.attention.value_head_dim
    return (
        len(norms) * normalised_bytes(kind, hidden_size, compute_bytes, software),
        bool(of_heads) * normalised_bytes(kind, width, compute_bytes, software),
    )


def saved_inputs(kind: LayerKind, software: SoftwareProfile) -> tuple[float, float]:
    """Return whether the inputs of attention and of the MLP are saved for a weight gradient."""
    frozen = [w for w in kind.weights if w.frozen]
    if software.frozen.saves_inputs:
        return 1.0, 1.0
    blocks = ([w for w in frozen if w.part in parts] for parts in (("attention",), MLP_PARTS))
    attention, mlp = (1.0 - _unread_blocks(block, _adapted(kind), software) for block in blocks)
    return attention, mlp


def _unread_blocks(frozen: list[Weight], adapted: set[str], software: SoftwareProfile) -> int:
    """Blocks whose input nothing needs: none of their first matrices is adapted, or reads it."""
    first = [w for w in frozen if w.is_matrix and w.sharding == "column"]
    blocks = (
        [w for w in first if w.part == "attention"],
        [w for w in first if w.part in MLP_PARTS],
    )
    made_anew = software.adapters.input_bytes > 0.0
    return sum(
        bool(block) and (made_anew or not any(w.name in adapted for w in block)) for block in blocks
    )


def _unread_product_bytes(
    kind: LayerKind,
    frozen: list[Weight],
    adapted: set[str],
    compute_bytes: float,
    software: SoftwareProfile,
) -> float:
    """Bytes of the MLP's product, if no last matrix is adapted or each reads a copy."""
    last = [w for w in frozen if w.sharding == "row" and w.part in MLP_PARTS]
    made_anew = software.adapters.input_bytes > 0.0
    if not last or (any(w.name in adapted for w in last) and not made_anew):
        return 0.0
    mlp = kind.feed_forward
    width = mlp.ffn_hidden_size * max(1, mlp.experts_per_token) + mlp.shared_ffn_hidden_size
    return compute_bytes * width


def _adapter_bytes(matrices: list[Weight], software: SoftwareProfile) -> tuple[float, float]:
    """Bytes of adapters: of inputs that the trainer makes anew, and of outputs of attention."""
    outputs = (
        w for w in matrices if w.part == "attention" and w.is_matrix and w.sharding == "column"
    )
    adapters = software.adapters
    read = sum(w.features[0] for w in matrices)
    if adapters.of_fused_matrices:
        read = _distinct_inputs(matrices)
    return (
        adapters.input_bytes * read,
        adapters.output_bytes * sum(w.features[1] for w in outputs),
    )


def _method_bytes(
    frozen: list[Weight], compute_bytes: float, software: SoftwareProfile
) -> tuple[float, float]:
    """Bytes of outputs that methods keep: of column-cut matrices, and of others."""
    each = max(FP32, compute_bytes) if software.adapters.in_fp32 else compute_bytes
    cut = whole = 0.0
    for weight in (w for w in frozen if w.adapter):
        method = METHODS[weight.adapter]
        kept = compute_bytes * method.kept_outputs + each * method.kept_results
        if weight.sharding == "column":
            cut += kept * weight.features[1]
        else:
            whole += kept * weight.features[1]
    return cut, whole


def normalised_bytes(
    kind: LayerKind, hidden_size: float, compute_bytes: float, software: SoftwareProfile
) -> float:
    """Bytes of what only the weights of a norm, and of matrices behind it, need.

    c h that the norm's weight multiplies, in fp32 where the product is. Under autocast, where all
    matrices are frozen, all but the norm's fp32 input: the casts for what reads it, too.
    """
    if kind.norm == "layer":  # saved is its input
        return 0.0
    if software.precision.autocasts_weights and compute_bytes < FP32:
        frozen = all(w.frozen for w in kind.weights if w.is_matrix and not w.is_adapter)
        saved = software.activations.rms_norm_saved_fp32_bytes - FP32
        return frozen * max(0.0, saved) * hidden_size
    saved = software.activations.rms_norm_saved * compute_bytes
    if kind.norm == "rms_in_fp32":
        saved = software.activations.rms_norm_in_fp32_saved_fp32_bytes / 2.0
    if kind.norm == "layer_in_fp32":
        saved = software.activations.layer_norm_in_fp32_saved_fp32_bytes / 3.0
    return saved * hidden_size


def _adapted(kind: LayerKind) -> set[str]:
    """Return the names of matrices whose adapters need their input."""
    return {w.name for w in kind.weights if w.adapter and METHODS[w.adapter].reads_input}


def _distinct_inputs(matrices: list[Weight]) -> int:
    """Return the features of what matrices read, once for those that read the same."""
    blocks = {(w.part, w.sharding): w.features[0] for w in matrices}
    return sum(blocks.values())


def kept_input_bytes(
    model: ModelSpec, compute_bytes: float, software: SoftwareProfile, table: PlanTable
) -> Real:
    """Additional bytes a token of a recomputed layer until the backward pass ends: n c h.

    FSDP1 reshards frozen weights by a hook on their layer's inputs, which stays. Under reentrant
    checkpointing these are leaves: their input and its gradient, of which one counts as saved.
    Source: torch 2.13, distributed/fsdp/_runtime_utils.py,
    _register_post_backward_reshard_only_hook (autograd/graph.py, register_multi_grad_hook);
    utils/checkpoint.py, detach_variable.
    """
    reentrant = software.kernels.recomputes_whole_layers and software.sharding.flat_parameters
    if not reentrant or not any(w.frozen for w in model.embedding):
        return np.zeros(len(table))
    hooked = (table.zero_stage >= 2) & (table.shard_ranks > 1) & (table.recompute == FULL)
    one = software.frozen.layer_inputs * compute_bytes * model.hidden_size
    return np.where(hooked, one, 0.0)
