"""Nemotron: llama's attention with half-rotated heads, layer norms and squared ReLU."""

from __future__ import annotations

from cost_models.model.families.blocks import (
    check_rotary,
    ordinary_attention,
    read_sizes,
    rotary_fraction,
)
from cost_models.model.families.llama_like import causal_lm, plain_layer
from cost_models.model.families.reader import Config, Defaults
from cost_models.model.spec import ModelSpec

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
    attention = ordinary_attention(sizes, rotary_dim=int(sizes.head_dim * fraction))
    biases = "attention_bias", "mlp_bias"
    kind = plain_layer(config, attention, sizes.hidden_size, "mlp.up_proj", "mlp.down_proj", biases)
    return causal_lm(config, sizes, (kind,), norm_bias=True)
