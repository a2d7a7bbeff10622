"""Saved tensors of one layer for one token: the textbook's 34 h, generalised to any layer.

Symbols   h hidden size   F ffn_hidden_size   a, k query and key/value heads
          d head_dim   e value_head_dim   s tokens of a sequence   c bytes of the compute precision
          Q channels of linear attention's convolution
Units     bytes a token on one tensor-parallel rank.

Leaves out: the embedding, the head and the tensors that layers share.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from cost_models.activations.operators import (
    attention_bytes,
    feed_forward_bytes,
    routed_bytes,
    router_bytes,
    score_bytes,
)
from cost_models.activations.saved import layer_regions
from cost_models.model.spec import Attention, FeedForward, LayerKind
from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario


class LayerTerm(Struct, frozen=True):
    """One kind of tensors of a layer."""

    name: str
    formula: str
    size: float  # bytes a token, on one rank


def layer_terms(scenario: Scenario, plan: Plan, kind: LayerKind) -> list[LayerTerm]:
    """Return the saved tensors of a layer of a kind without recomputation, largest first.

    Source: ``activations.layer_regions`` (Korthikanti et al., arXiv:2205.05198, eq. 1 and 4).
    """
    workload, software, model = scenario.workload, scenario.software, scenario.model
    compute, kernel = workload.compute_bytes, workload.attention_kernel
    dropout = model.attention_dropout > 0
    regions = layer_regions(model, workload, software, kind)
    tensor = float(plan.tensor_parallel)
    along = tensor if plan.sequence_parallel else 1.0
    inputs_over = 1.0 if software.activations.keeps_gathered_inputs else along
    attentions = [kind.attention]
    if kind.cross_attention is not None:
        attentions.append(kind.cross_attention)
    heads = sum(attention_bytes(attention, compute) for attention in attentions)
    scores = sum(
        float(score_bytes(each, workload.seq_len, kernel, dropout, software, compute))
        for each in attentions
    )
    mlp = feed_forward_bytes(kind.feed_forward, compute, software)
    split = float(np.asarray(regions.split))
    routed = routed_bytes(kind.feed_forward, model.hidden_size, compute, software)
    router = 0.0
    if kind.feed_forward.num_experts:
        router = router_bytes(kind.feed_forward, model.hidden_size, compute, software)
    core = "5·a·s with dropout" if dropout else "bytes of softmax · a·s"
    if kernel == "flash":
        bare = 4.0 * sum(each.num_heads for each in attentions)
        core = "4·a" if scores <= bare else "4·a, and what is copied for the kernel"
    if kind.attention.delta_rule is not None:
        core = "c·(Q + 64·a) + 4·a + 8·k" if kernel == "flash" else "tensors of each chunk in fp32"
    over = 1.0 if plan.expert_tensor_parallel else 1.0 / tensor
    copies = f"{1.0 + software.activations.expert_outputs_saved:g}·experts a token·c·h"
    terms = [
        LayerTerm("norms, dropout masks", "∝ h", regions.replicated / along),
        LayerTerm("inputs of matrices", "c·h each", regions.inputs / inputs_over),
        LayerTerm(*_heads_formula(kind.attention), heads / tensor),
        LayerTerm(
            "convolution and delta rule" if kind.attention.delta_rule else "attention core",
            core,
            scores / tensor,
        ),
        LayerTerm("MLP", _mlp_formula(kind.feed_forward, scenario), mlp / tensor),
        LayerTerm("norms of queries and keys", "∝ a·d", (split - heads - scores - mlp) / tensor),
        LayerTerm("copies for experts", copies, (routed - router) * over),
        LayerTerm("router", "its input, ∝ experts", router * over),
    ]
    return sorted((t for t in terms if t.size > 0.5), key=lambda term: -term.size)


def _heads_formula(attention: Attention) -> tuple[str, str]:
    """Return name and formula of tensors around the attention core."""
    if attention.delta_rule is not None:
        return "input of the convolution, gates, output", "c·(Q + 3·a·e + a) + fp32·(3·a·e + 3·a)"
    gate = " + 2·a·e" if attention.gated else ""
    return "queries, keys, values, output", f"c·(a·d + k·d + k·e + a·e{gate})"


def _mlp_formula(mlp: FeedForward, scenario: Scenario) -> str:
    """Return c (saved + 3) F with its numbers: 8 F for a gated MLP in 16 bits."""
    saved = scenario.software.activations.activation_saved.get(
        mlp.activation, scenario.software.activations.activation_saved["default"]
    )
    copies = scenario.workload.compute_bytes * (saved + (3.0 if mlp.gated else 1.0))
    one = f"{copies:g}·F"
    if not mlp.num_experts:
        return one
    shared = " + shared" if mlp.shared_ffn_hidden_size else ""
    return f"{mlp.experts_per_token}·{one}{shared}"
