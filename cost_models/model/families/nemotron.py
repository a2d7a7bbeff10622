"""Nemotron: llama's attention with half-rotated heads, layer norms and squared ReLU."""

from __future__ import annotations

from cost_models.model.families.blocks import ordinary_attention, read_sizes, rotary_dim
from cost_models.model.families.llama_like import causal_lm, plain_layer
from cost_models.model.families.reader import Config, decoder_defaults
from cost_models.model.spec import ModelSpec

NEMOTRON = decoder_defaults(
    (256000, 6144, 24576, 32, 48, None, 4096),
    hidden_act="relu2",
    head_dim=None,
    attention_bias=False,
    mlp_bias=False,
)


def nemotron(config: Config) -> ModelSpec:
    """Nemotron-3 and 4, Minitron (arXiv:2402.16819, arXiv:2407.14679)."""
    sizes = read_sizes(config)
    attention = ordinary_attention(sizes, rotary_dim=rotary_dim(config, sizes.head_dim, 0.5))
    biases = "attention_bias", "mlp_bias"
    kind = plain_layer(config, attention, sizes.hidden_size, "mlp.up_proj", "mlp.down_proj", biases)
    return causal_lm(config, sizes, (kind,), norm_bias=True)
