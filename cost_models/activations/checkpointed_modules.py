"""Saved bytes of the modules that ``modules:...`` computes again.

Symbols   h hidden_size   F ffn_hidden_size   a, k query and key/value heads   d head_dim
          e value_head_dim   t tensor_parallel   c compute_bytes
Units     bytes a token on one rank; columns of a plan table.

    core_attn        scores, or the log-sums of a fused kernel
    mla_up_proj      c (a d + k d + k e) / t   queries, keys, values behind the latents; keys'
                     positions stay, in front of it
    layernorm        c h of each norm, the inputs of the first matrices; its own copies; those of
                     queries and keys with trainers that keep these by name, behind their norms
    mlp              all between its matrices; its input stays
    moe              the same of all experts, routed rows, the router; its input stays
    shared_experts   all between their matrices
    moe_act          the activation's result and the product; outputs of the first matrices stay

Source: NVIDIA/Megatron-LM (megatron/core/transformer: transformer_layer.py, attention.py,
multi_latent_attention.py, moe/moe_layer.py, moe/experts.py, each with its ``recompute_modules``);
norms of queries and keys: AI-Hypercomputer/maxtext (attentions.py, checkpoint_name).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cost_models.activations.frozen_layers import (
    normalised_bytes,
    saved_inputs,
    unsaved_mlp_bytes,
    unsaved_norm_bytes,
)
from cost_models.activations.layer_backward import AT_CORE, COLUMNS, INNER, QUERIES, ROUTED
from cost_models.activations.saved import (
    Regions,
    activation_copies,
    attention_bytes,
    feed_forward_bytes,
    head_norms_bytes,
    norm_bytes,
    saves_input,
)
from cost_models.arrays import Flag, Real
from cost_models.model.spec import LayerKind
from cost_models.partition.rank_view import RankView
from cost_models.plan.recompute import repeats_module


class Restored(NamedTuple):
    """Bytes that a layer does not keep, and that its backward pass restores."""

    dropped: Real
    at: tuple[tuple[int, Real], ...]  # restored where the backward pass first reads them

    def by(self, point: int) -> Real:
        """Return the bytes that are restored by a point of the backward pass."""
        return sum((size for first, size in self.at if first <= point), start=0.0 * self.dropped)

    @property
    def at_once(self) -> Real:
        """Return the larger half: the MLP's tensors are freed before attention's are restored."""
        of_mlp = self.by(COLUMNS)
        return np.maximum(of_mlp, self.by(QUERIES) - of_mlp)


def restored_modules(view: RankView, kind: LayerKind, regions: Regions) -> Restored:
    """Return the bytes of the modules that each plan computes again.

    A norm in fp32 saves a copy of its input; computed again it keeps the input itself, until that
    copy exists again.
    """
    table, software, compute = view.table, view.software, view.workload.compute_bytes
    feed_forward, hidden = kind.feed_forward, view.model.hidden_size
    tensor, along = 1.0 * table.tensor_parallel, view.sequence_shards
    share = table.expert_tensor / tensor

    def where(module: str, size: Real) -> Real:
        again: Flag = repeats_module(table.recompute, module)
        return np.where(again, size, 0.0)

    at_core = where("core_attn", regions.core / tensor)
    if kind.attention.kv_lora_rank:
        at_core = at_core + where("mla_up_proj", _latent_heads(view, kind) / tensor)
    inputs_over = 1.0 if software.activations.keeps_gathered_inputs else along
    norm = norm_bytes(kind, hidden, compute, software) - compute * hidden
    if any(w.frozen and w.part == "norm" and w.shape == (hidden,) for w in kind.weights):
        norm -= normalised_bytes(kind, hidden, compute, software)
    norm_size = max(0.0, norm) / along
    by_attention, by_mlp = saved_inputs(kind, software)
    given = compute * hidden / inputs_over
    routes_only = feed_forward.num_experts and not feed_forward.shared_ffn_hidden_size
    zero: Real = np.zeros(len(table))
    first = second = zero  # norms before attention and before the MLP
    if not (kind.norms_after and kind.num_norms == 2):
        first = where("layernorm", given * by_attention + norm_size)
    if not (kind.norms_after and kind.num_norms == 2) and kind.num_norms > 1:
        routed = compute * hidden * share
        second = where("layernorm", (routed if routes_only else given) * by_mlp + norm_size)
    shared = kind.parallel_residual and kind.num_norms == 1  # one norm, which the MLP reads first
    extra = 0.0 if saves_input(kind, compute, view.software) else compute * hidden / along
    block = repeats_module(table.recompute, "moe" if feed_forward.num_experts else "mlp")
    begins = ROUTED if feed_forward.num_experts else INNER  # a repeated block reads its input first
    at_first, at_second = first + extra * (first > 0), second + extra * (second > 0)
    of_block = np.where(block, at_first if shared else at_second, 0.0)
    heads = zero
    if software.activations.recomputes_head_norms:
        frozen = [w for w in kind.weights if w.frozen]
        copies = unsaved_norm_bytes(kind, frozen, hidden, compute, software)[1]
        heads = where("layernorm", (head_norms_bytes(kind, compute, software) - copies) / tensor)
    norms = (
        (QUERIES, heads),
        (begins, of_block),
        (COLUMNS if shared else QUERIES, at_first - of_block * shared),
        (COLUMNS, at_second - of_block * (not shared)),
    )
    dropped = at_core + heads + first + second
    saved = feed_forward_bytes(feed_forward, compute, software)
    inside = (saved - unsaved_mlp_bytes(kind, compute, software)) / tensor
    if not feed_forward.num_experts:
        of_mlp = where("mlp", inside)
        return Restored(dropped + of_mlp, ((AT_CORE, at_core), *norms, (INNER, of_mlp)))
    whole = where("moe", 1.0)
    copies = activation_copies(feed_forward, software) + (3.0 if feed_forward.gated else 1.0)
    of_shared = copies * compute * feed_forward.shared_ffn_hidden_size / tensor
    each = max(0.0, copies - (2.0 if feed_forward.gated else 1.0)) * compute
    made = each * feed_forward.experts_per_token * feed_forward.ffn_hidden_size / tensor
    rows = regions.routed - compute * hidden * float(routes_only)
    routed = whole * (inside + np.maximum(0.0, rows) * share)
    rest = (1.0 - whole) * (where("shared_experts", of_shared) + where("moe_act", made))
    passing = whole * _routed_results(view, kind)
    again = ((ROUTED, routed), (ROUTED, passing), (INNER, rest - passing))
    return Restored(dropped + routed + rest, ((AT_CORE, at_core), *norms, *again))


def _routed_results(view: RankView, kind: LayerKind) -> Real:
    """Bytes of a repeated mixture's results while its shared experts are still to be computed.

    The sum of the weighted results, w h, and its cast, c h; with sequence parallelism the gathered
    inputs of both, 2 c h, and the rank's share of the cast. A mixture without shared experts ends
    before these. Source: tensors of the trace (``benchmarks.memory_truth --rows``).
    """
    feed_forward, compute = kind.feed_forward, view.workload.compute_bytes
    if not feed_forward.shared_ffn_hidden_size:
        return 0.0
    summed = 4.0 if feed_forward.weighted_in_fp32 else compute
    along = view.sequence_shards
    inputs = np.where(np.greater(along, 1.0), 2.0 * compute, 0.0)
    return view.model.hidden_size * (summed + compute / along + inputs)


def _latent_heads(view: RankView, kind: LayerKind) -> Real:
    """Bytes of queries, keys and values behind the latents.

    Values that a fused kernel needs as wide as keys are copied behind the module: they stay.
    """
    attention, compute, software = kind.attention, view.workload.compute_bytes, view.software
    output = attention.num_heads * attention.value_head_dim
    read = attention_bytes(attention, compute) - compute * output
    padded = attention.head_dim > attention.value_head_dim
    fused = view.workload.attention_kernel != "eager"
    if padded and fused and software.activations.window_needs_mask:
        read -= compute * attention.num_kv_heads * attention.value_head_dim
    return read - compute * attention.rope_head_dim * view.table.tensor_parallel
