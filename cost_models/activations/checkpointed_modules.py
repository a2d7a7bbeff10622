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
    attn             all between its input and its output
    experts          all between the routed experts' matrices; their inputs and outputs stay

``attn`` and ``experts`` are not traced: no trainer that the executor builds has them.

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
from cost_models.activations.operators import (
    activation_copies,
    attention_bytes,
    feed_forward_bytes,
    head_norms_bytes,
    norm_bytes,
    of_routed,
    saves_input,
)
from cost_models.activations.saved import Regions
from cost_models.arrays import Real
from cost_models.communication.expert_parallel import most_loaded
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

    def times(self, share: float) -> Restored:
        """Return so many times the bytes."""
        return Restored(share * self.dropped, tuple((at, share * size) for at, size in self.at))

    @property
    def at_once(self) -> Real:
        """Return the larger half: the MLP's tensors are freed before attention's are restored."""
        of_mlp = self.by(COLUMNS)
        return np.maximum(of_mlp, self.by(QUERIES) - of_mlp)


def restored_modules(view: RankView, kind: LayerKind, regions: Regions) -> Restored:
    """Return the bytes of the modules that each plan computes again."""
    tensor = 1.0 * view.table.tensor_parallel
    at_core = _if_repeated(view, "core_attn", regions.core / tensor)
    if kind.attention.kv_lora_rank:
        at_core = at_core + _if_repeated(view, "mla_up_proj", _latent_heads(view, kind) / tensor)
    at_core = at_core + _if_repeated(view, "attn", _rest_of_attention(view, kind))
    norms = _norms(view, kind)
    mlp = _mixture(view, kind, regions) if kind.feed_forward.num_experts else _mlp(view, kind)
    dropped = at_core + norms.dropped + mlp.dropped
    return Restored(dropped, ((AT_CORE, at_core), *norms.at, *mlp.at))


def _if_repeated(view: RankView, module: str, size: Real) -> Real:
    return np.where(repeats_module(view.table.recompute, module), size, 0.0)


def _norms(view: RankView, kind: LayerKind) -> Restored:
    """Return the bytes of norms that are computed again.

    A norm in fp32 saves a copy of its input; computed again it keeps the input itself, until that
    copy exists again. A repeated MLP or mixture reads the norm before it first.
    """
    before_attention, before_mlp = _norms_before(view, kind)
    shared = kind.parallel_residual and kind.num_norms == 1  # one norm, which the MLP reads first
    mixture = bool(kind.feed_forward.num_experts)
    kept = view.workload.compute_bytes * view.model.hidden_size / view.sequence_shards
    extra = 0.0 if saves_input(kind, view.workload.compute_bytes, view.software) else kept
    at_attention = before_attention + extra * (before_attention > 0)
    at_mlp = before_mlp + extra * (before_mlp > 0)
    repeated = repeats_module(view.table.recompute, "moe" if mixture else "mlp")
    of_block = np.where(repeated, at_attention if shared else at_mlp, 0.0)
    heads = _head_norms(view, kind)
    return Restored(
        heads + before_attention + before_mlp,
        (
            (QUERIES, heads),
            (ROUTED if mixture else INNER, of_block),
            (COLUMNS if shared else QUERIES, at_attention - of_block * shared),
            (COLUMNS, at_mlp - of_block * (not shared)),
        ),
    )


def _norms_before(view: RankView, kind: LayerKind) -> tuple[Real, Real]:
    """Return the bytes of the repeated norms before attention and before the MLP."""
    software, compute, hidden = view.software, view.workload.compute_bytes, view.model.hidden_size
    zero: Real = np.zeros(len(view.table))
    if kind.norms_after and kind.num_norms == 2:
        return zero, zero
    own = norm_bytes(kind, hidden, compute, software) - compute * hidden
    if any(w.frozen and w.part == "norm" and w.shape == (hidden,) for w in kind.weights):
        own -= normalised_bytes(kind, hidden, compute, software)
    own_copies = max(0.0, own) / view.sequence_shards
    by_attention, by_mlp = saved_inputs(kind, software)
    gathered = software.activations.keeps_gathered_inputs
    result = compute * hidden / (1.0 if gathered else view.sequence_shards)
    first = _if_repeated(view, "layernorm", result * by_attention + own_copies)
    if kind.num_norms <= 1:
        return first, zero
    if _routes_only(kind):
        result = compute * hidden * (view.table.expert_tensor / (1.0 * view.table.tensor_parallel))
    return first, _if_repeated(view, "layernorm", result * by_mlp + own_copies)


def _head_norms(view: RankView, kind: LayerKind) -> Real:
    """Return the bytes of repeated norms of queries and keys."""
    software, compute = view.software, view.workload.compute_bytes
    if not software.activations.recomputes_head_norms:
        return np.zeros(len(view.table))
    frozen = [weight for weight in kind.weights if weight.frozen]
    copies = unsaved_norm_bytes(kind, frozen, view.model.hidden_size, compute, software)[1]
    size = head_norms_bytes(kind, compute, software) - copies
    again = _if_repeated(view, "layernorm", size / (1.0 * view.table.tensor_parallel))
    return np.where(repeats_module(view.table.recompute, "attn"), 0.0, again)


def _routes_only(kind: LayerKind) -> bool:
    """Whether all of a layer's feed-forward part is routed."""
    return bool(kind.feed_forward.num_experts) and not kind.feed_forward.shared_ffn_hidden_size


def _inside(view: RankView, kind: LayerKind) -> Real:
    """Return the bytes that a feed-forward part saves in addition to its input."""
    compute, software = view.workload.compute_bytes, view.software
    saved = feed_forward_bytes(kind.feed_forward, compute, software)
    unsaved = unsaved_mlp_bytes(kind, compute, software)
    return (saved - unsaved) / (1.0 * view.table.tensor_parallel)


def _mlp(view: RankView, kind: LayerKind) -> Restored:
    again = _if_repeated(view, "mlp", _inside(view, kind))
    return Restored(again, ((INNER, again),))


def _mixture(view: RankView, kind: LayerKind, regions: Regions) -> Restored:
    """Return the bytes of experts that are computed again: all, the shared ones, activations."""
    feed_forward, compute = kind.feed_forward, view.workload.compute_bytes
    tensor, hidden = 1.0 * view.table.tensor_parallel, view.model.hidden_size
    whole = _if_repeated(view, "moe", 1.0)
    copies = activation_copies(feed_forward, view.software) + (3.0 if feed_forward.gated else 1.0)
    of_shared = copies * compute * feed_forward.shared_ffn_hidden_size / tensor
    each = max(0.0, copies - (2.0 if feed_forward.gated else 1.0)) * compute
    width = feed_forward.experts_per_token * feed_forward.ffn_hidden_size
    between = _inside(view, kind)
    routed_part = of_routed(feed_forward, between)
    again = repeats_module(view.table.recompute, "experts")
    loaded = most_loaded(feed_forward, view.table.expert_parallel, view.software)
    made = loaded * np.where(again, routed_part, each * width / tensor)
    rows = regions.routed - compute * hidden * float(_routes_only(kind))
    share = view.table.expert_tensor / tensor
    inside = between + (loaded - 1.0) * routed_part
    routed = whole * (inside + np.maximum(0.0, rows) * share)
    parts = _if_repeated(view, "shared_experts", of_shared) + _if_repeated(view, "moe_act", made)
    rest = (1.0 - whole) * parts
    passing = whole * _routed_results(view, kind)
    return Restored(routed + rest, ((ROUTED, routed), (ROUTED, passing), (INNER, rest - passing)))


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


def _rest_of_attention(view: RankView, kind: LayerKind) -> Real:
    """Bytes of attention's tensors besides its core's own and those behind its latents."""
    attention, compute, software = kind.attention, view.workload.compute_bytes, view.software
    tensor = 1.0 * view.table.tensor_parallel
    heads = attention_bytes(attention, compute) + head_norms_bytes(kind, compute, software)
    if not attention.kv_lora_rank:
        return heads / tensor
    ranks = [rank for rank in (attention.q_lora_rank, attention.kv_lora_rank) if rank]
    norms = sum(norm_bytes(kind, rank, compute, software) for rank in ranks)
    return (heads - _latent_heads(view, kind)) / tensor + (
        norms + compute * sum(ranks)
    ) / view.sequence_shards


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
