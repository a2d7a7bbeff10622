"""Command R: parallel attention and MLP under one norm without a shift, scaled logits."""

from __future__ import annotations

from cost_models.model.families.blocks import (
    Weights,
    check_rotary,
    norm,
    ordinary_attention,
    read_feed_forward,
    read_sizes,
)
from cost_models.model.families.llama_like import attention_weights, causal_lm, gated_mlp
from cost_models.model.families.reader import Config, decoder_defaults
from cost_models.model.spec import Attention, LayerKind, ModelSpec

COHERE = decoder_defaults(
    (256000, 8192, 22528, 40, 64, None, 8192),
    tie_word_embeddings=True,
    attention_bias=False,
    use_qk_norm=False,
)


def cohere(config: Config) -> ModelSpec:
    """Command R and R+ (Cohere, 2024); R+ norms queries and keys with separate weights per head."""
    sizes = read_sizes(config)
    check_rotary(config, sizes.head_dim)
    hidden_size, feed_forward = sizes.hidden_size, read_feed_forward(config, gated=True)
    bias, qk_norm = config.flag("attention_bias"), config.flag("use_qk_norm")
    attention = ordinary_attention(sizes, qk_norm="head" if qk_norm else "")
    kind = LayerKind(
        name="layer",
        attention=attention,
        feed_forward=feed_forward,
        norm="layer_in_fp32",
        num_norms=1,
        weights=(
            *attention_weights(hidden_size, attention, bias=bias, output_bias=bias),
            *(_head_norms(attention) if qk_norm else ()),
            *gated_mlp(hidden_size, feed_forward.ffn_hidden_size),
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
