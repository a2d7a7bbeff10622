"""GLM-4 (0414): norms around attention and MLP, fused gate and up; GLM-4.5: a mixture of experts.

Both rotate half of each head.
"""

from __future__ import annotations

from dataclasses import replace

from cost_models.model.families.blocks import (
    ordinary_attention,
    part,
    read_feed_forward,
    read_sizes,
    rotary_dim,
)
from cost_models.model.families.llama_like import (
    PRE_NORMS,
    attention_weights,
    causal_lm,
    qk_norms,
    rms_norms,
)
from cost_models.model.families.mla import dense_then_sparse, read_sparse, without_prediction
from cost_models.model.families.phi3 import fused_gate_up
from cost_models.model.families.reader import Config, decoder_defaults
from cost_models.model.spec import LayerKind, ModelSpec

GLM4 = decoder_defaults((151552, 4096, 13696, 40, 32, 2, 131072), head_dim=128, attention_bias=True)
GLM4_MOE = decoder_defaults(
    (151552, 4096, 10944, 46, 96, 8, 131072),
    synonyms={"n_routed_experts": ("num_local_experts",)},
    attention_bias=False,
    moe_intermediate_size=1408,
    num_experts_per_tok=8,
    n_shared_experts=1,
    n_routed_experts=128,
    first_k_dense_replace=1,
    use_qk_norm=False,
)
NORMS = (*PRE_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm")


def glm4(config: Config) -> ModelSpec:
    """GLM-4-0414 (arXiv:2406.12793)."""
    sizes = read_sizes(config)
    hidden_size, feed_forward = sizes.hidden_size, read_feed_forward(config, gated=True)
    attention = ordinary_attention(sizes, rotary_dim=rotary_dim(config, sizes.head_dim, 0.5))
    kind = LayerKind(
        name="layer",
        attention=attention,
        feed_forward=feed_forward,
        norm="rms",
        num_norms=len(NORMS),
        weights=(
            *attention_weights(hidden_size, attention, bias=config.flag("attention_bias")),
            *part("mlp", *fused_gate_up(hidden_size, feed_forward.ffn_hidden_size)),
            *rms_norms(hidden_size, *NORMS),
        ),
        norms_after=True,
    )
    return causal_lm(config, sizes, (kind,))


def glm4_moe(config: Config) -> ModelSpec:
    """GLM-4.5 and GLM-4.5-Air (arXiv:2508.06471), without the multi-token prediction layer."""
    sizes = read_sizes(config)
    rotated, qk_norm = rotary_dim(config, sizes.head_dim, 0.5), config.flag("use_qk_norm")
    attention = ordinary_attention(sizes, rotary_dim=rotated, qk_norm="head" if qk_norm else "")
    weights = (
        *attention_weights(sizes.hidden_size, attention, bias=config.flag("attention_bias")),
        *(qk_norms(attention, "head") if qk_norm else ()),
    )
    sparse = replace(read_sparse(config), balanced_by_bias=True)
    layers = dense_then_sparse(config, sizes, attention, weights, sparse)
    return causal_lm(config, sizes, *layers, assumptions=without_prediction(config))
