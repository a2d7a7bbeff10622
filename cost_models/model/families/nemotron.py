"""Nemotron: llama's attention with half-rotated heads, layer norms and squared ReLU."""

from __future__ import annotations

from cost_models.model.families.blocks import (
    check_rotary,
    ffn_size,
    norm,
    ordinary_attention,
    plain_mlp,
    read_sizes,
    rotary_fraction,
)
from cost_models.model.families.llama_like import attention_weights, causal_lm
from cost_models.model.families.reader import Config, Defaults
from cost_models.model.spec import FeedForward, LayerKind, ModelSpec

NEMOTRON = Defaults(
    {
        "vocab_size": 256000,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 32,
        "num_attention_heads": 48,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
)


def nemotron(config: Config) -> ModelSpec:
    """Nemotron-3 and 4, Minitron (arXiv:2402.16819, arXiv:2407.14679)."""
    sizes = read_sizes(config)
    fraction = rotary_fraction(config, "partial_rotary_factor", default=0.5)
    check_rotary(config, sizes.head_dim, fraction)
    hidden_size, ffn_hidden_size = sizes.hidden_size, ffn_size(config)
    bias = config.flag("attention_bias")
    attention = ordinary_attention(sizes, rotary_dim=int(sizes.head_dim * fraction))
    kind = LayerKind(
        name="layer",
        attention=attention,
        feed_forward=FeedForward(
            ffn_hidden_size, gated=False, activation=config.activation("hidden_act")
        ),
        norm="layer",
        num_norms=2,
        weights=(
            *attention_weights(hidden_size, attention, bias=bias, output_bias=bias),
            *plain_mlp(
                "mlp.up_proj",
                "mlp.down_proj",
                hidden_size,
                ffn_hidden_size,
                bias=config.flag("mlp_bias"),
            ),
            *norm("input_layernorm", hidden_size, bias=True),
            *norm("post_attention_layernorm", hidden_size, bias=True),
        ),
    )
    return causal_lm(config, sizes, (kind,), norm_bias=True)
