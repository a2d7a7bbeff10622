"""Saved bytes of the modules that ``modules:...`` computes again.

Symbols   h hidden_size   F ffn_hidden_size   a, k query and key/value heads   d head_dim
          e value_head_dim   t tensor_parallel   c compute_bytes
Units     bytes a token on one rank; columns of a plan table.

    core_attn        scores, or the log-sums of a fused kernel
    mla_up_proj      c (a d + k d + k e) / t   queries, keys, values behind the latents
    layernorm        c h of each norm, the inputs of the first matrices; its own copies
    mlp              all between its matrices; its input stays
    moe              the same of all experts, routed rows, the router; its input stays
    shared_experts   all between their matrices
    moe_act          the activation's result and the product; outputs of the first matrices stay

Source: NVIDIA/Megatron-LM (megatron/core/transformer: transformer_layer.py, attention.py,
multi_latent_attention.py, moe/moe_layer.py, moe/experts.py, each with its ``recompute_modules``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cost_models.activations.saved import (
    Regions,
    activation_copies,
    attention_bytes,
    feed_forward_bytes,
    norm_bytes,
)
from cost_models.arrays import Flag, Real
from cost_models.model.spec import LayerKind
from cost_models.partition.rank_view import RankView
from cost_models.plan.recompute import repeats_module


class Restored(NamedTuple):
    """Bytes that a layer does not keep, and that its backward pass restores."""

    attention: Real  # for the backward pass of attention, its norm included
    feed_forward: Real


def restored_modules(view: RankView, kind: LayerKind, regions: Regions) -> Restored:
    """Return the bytes of the modules that each plan computes again."""
    table, software, compute = view.table, view.software, view.workload.compute_bytes
    feed_forward, hidden = kind.feed_forward, view.model.hidden_size
    tensor, along = 1.0 * table.tensor_parallel, view.sequence_shards
    share = table.expert_tensor / tensor

    def where(module: str, size: Real) -> Real:
        again: Flag = repeats_module(table.recompute, module)
        return np.where(again, size, 0.0)

    attention = where("core_attn", regions.core / tensor)
    if kind.attention.kv_lora_rank:
        heads = kind.attention.num_heads * kind.attention.value_head_dim
        read = attention_bytes(kind.attention, compute) - compute * heads
        attention = attention + where("mla_up_proj", read / tensor)
    inputs_over = 1.0 if software.activations.keeps_gathered_inputs else along
    norm = norm_bytes(kind, hidden, compute, software) - compute * hidden
    given = compute * hidden / inputs_over + max(0.0, norm) / along
    routes_only = feed_forward.num_experts and not feed_forward.shared_ffn_hidden_size
    if not kind.norms_after:
        attention = attention + where("layernorm", given)
    found: Real = np.zeros(len(table))
    if not kind.norms_after and kind.num_norms > 1:
        routed = compute * hidden * share + max(0.0, norm) / along
        found = where("layernorm", routed if routes_only else given)
    inside = feed_forward_bytes(feed_forward, compute, software) / tensor
    if not feed_forward.num_experts:
        return Restored(attention, found + where("mlp", inside))
    whole = where("moe", 1.0)
    copies = activation_copies(feed_forward, software) + (3.0 if feed_forward.gated else 1.0)
    shared = copies * compute * feed_forward.shared_ffn_hidden_size / tensor
    each = max(0.0, copies - (2.0 if feed_forward.gated else 1.0)) * compute
    made = each * feed_forward.experts_per_token * feed_forward.ffn_hidden_size / tensor
    rows = regions.routed - compute * hidden * float(routes_only)
    found = found + whole * (inside + np.maximum(0.0, rows) * share)
    rest = where("shared_experts", shared) + where("moe_act", made)
    return Restored(attention, found + (1.0 - whole) * rest)
