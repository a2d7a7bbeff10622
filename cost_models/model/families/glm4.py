"""GLM-4 (0414): norms around attention and MLP, fused gate and up; GLM-4.5: a mixture of experts.

Both rotate half of each head.
"""

from __future__ import annotations

from cost_models.model.families.blocks import (
    check_rotary,
    ffn_size,
    ordinary_attention,
    part,
    read_sizes,
    rotary_fraction,
)
from cost_models.model.families.llama_like import (
    PRE_NORMS,
    attention_weights,
    causal_lm,
    qk_norms,
    rms_norms,
)
from cost_models.model.families.mla import dense_then_sparse
from cost_models.model.families.moe import read_experts
from cost_models.model.families.phi3 import fused_gate_up
from cost_models.model.families.reader import (
    MAX_EXPERTS,
    MAX_FFN,
    MAX_LAYERS,
    Config,
    Defaults,
    whole,
)
from cost_models.model.spec import FeedForward, LayerKind, ModelSpec

GLM4 = Defaults(
    {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "attention_dropout": 0.0,
    }
)
GLM4_MOE = Defaults(
    {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
    },
    synonyms={"n_routed_experts": ("num_local_experts",)},
)
NORMS = (*PRE_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm")


def glm4(config: Config) -> ModelSpec:
    """GLM-4-0414 (arXiv:2406.12793)."""
    sizes = read_sizes(config)
    fraction = rotary_fraction(config, "partial_rotary_factor", default=0.5)
    check_rotary(config, sizes.head_dim, fraction)
    hidden_size, ffn_hidden_size = sizes.hidden_size, ffn_size(config)
    attention = ordinary_attention(sizes, rotary_dim=int(sizes.head_dim * fraction))
    kind = LayerKind(
        name="layer",
        attention=attention,
        feed_forward=FeedForward(
            ffn_hidden_size, gated=True, activation=config.activation("hidden_act")
        ),
        norm="rms",
        num_norms=len(NORMS),
        weights=(
            *attention_weights(hidden_size, attention, bias=config.flag("attention_bias")),
            *part("mlp", *fused_gate_up(hidden_size, ffn_hidden_size)),
            *rms_norms(hidden_size, *NORMS),
        ),
        norms_after=True,
    )
    return causal_lm(config, sizes, (kind,))


def glm4_moe(config: Config) -> ModelSpec:
    """GLM-4.5 and GLM-4.5-Air (arXiv:2508.06471), without the multi-token prediction layer."""
    sizes = read_sizes(config)
    fraction = rotary_fraction(config, "partial_rotary_factor", default=0.5)
    check_rotary(config, sizes.head_dim, fraction)
    hidden_size = sizes.hidden_size
    qk_norm = "head" if config.flag("use_qk_norm") else ""
    attention = ordinary_attention(
        sizes, rotary_dim=int(sizes.head_dim * fraction), qk_norm=qk_norm
    )
    expert = config.size("moe_intermediate_size", MAX_FFN)
    sparse = read_experts(
        config,
        "n_routed_experts",
        expert,
        shared_ffn_hidden_size=expert * config.size("n_shared_experts", MAX_EXPERTS),
        weighted_in_fp32=True,
        router_in_fp32=True,
    )
    weights = (
        *attention_weights(hidden_size, attention, bias=config.flag("attention_bias")),
        *(qk_norms(attention, qk_norm) if qk_norm else ()),
    )
    layers = dense_then_sparse(config, sizes, attention, weights, sparse)
    left_out: tuple[str, ...] = ()
    if config.read("num_nextn_predict_layers", whole(0, MAX_LAYERS), 0):
        left_out = ("multi-token prediction layers are left out, as in transformers",)
    return causal_lm(config, sizes, *layers, assumptions=left_out)
