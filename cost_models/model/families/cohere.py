"""Command R: parallel attention and MLP under one norm without a shift, scaled logits."""

from __future__ import annotations

from cost_models.model.families.blocks import (
    Weights,
    check_rotary,
    ffn_size,
    norm,
    ordinary_attention,
    read_sizes,
)
from cost_models.model.families.llama_like import attention_weights, causal_lm, gated_mlp
from cost_models.model.families.reader import Config, Defaults
from cost_models.model.spec import Attention, FeedForward, LayerKind, ModelSpec

COHERE = Defaults(
    {
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_qk_norm": False,
    }
)


def cohere(config: Config) -> ModelSpec:
    """Command R and R+ (Cohere, 2024); R+ norms queries and keys with separate weights per head."""
    sizes = read_sizes(config)
    check_rotary(config, sizes.head_dim)
    hidden_size, ffn_hidden_size = sizes.hidden_size, ffn_size(config)
    bias, qk_norm = config.flag("attention_bias"), config.flag("use_qk_norm")
    attention = ordinary_attention(sizes, qk_norm="head" if qk_norm else "")
    kind = LayerKind(
        name="layer",
        attention=attention,
        feed_forward=FeedForward(
            ffn_hidden_size, gated=True, activation=config.activation("hidden_act")
        ),
        norm="layer_in_fp32",
        num_norms=1,
        weights=(
            *attention_weights(hidden_size, attention, bias=bias, output_bias=bias),
            *(_head_norms(attention) if qk_norm else ()),
            *gated_mlp(hidden_size, ffn_hidden_size),
            *norm("input_layernorm", hidden_size),
        ),
        parallel_residual=True,
    )
    return causal_lm(config, sizes, (kind,))


def _head_norms(attention: Attention) -> Weights:
    width = attention.head_dim
    return (
        *norm("self_attn.q_norm", attention.num_heads, width, sharding="heads"),
        *norm("self_attn.k_norm", attention.num_kv_heads, width, sharding="heads"),
    )
