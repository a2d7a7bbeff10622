"""GLM-4 (0414): norms around attention and MLP, half of each head rotated, fused gate and up."""

from __future__ import annotations

from cost_models.model.families.blocks import (
    check_rotary,
    ffn_size,
    ordinary_attention,
    part,
    read_sizes,
    rotary_fraction,
)
from cost_models.model.families.llama_like import PRE_NORMS, attention_weights, causal_lm, rms_norms
from cost_models.model.families.phi3 import fused_gate_up
from cost_models.model.families.reader import Config, Defaults
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
