"""Phi-3: llama with fused q, k, v and fused gate and up projections."""

from __future__ import annotations

from cost_models.model.families.blocks import (
    Weights,
    check_rotary,
    ffn_size,
    linear,
    ordinary_attention,
    part,
    read_sizes,
    rotary_fraction,
)
from cost_models.model.families.llama_like import PRE_NORMS, causal_lm, rms_norms
from cost_models.model.families.reader import MAX_POSITIONS, Config, Defaults
from cost_models.model.spec import FeedForward, LayerKind, ModelSpec

PHI3 = Defaults(
    {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "resid_pdrop": 0.0,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "sliding_window": None,
    }
)


def fused_gate_up(hidden_size: int, ffn_hidden_size: int) -> Weights:
    """Return one matrix for gate and up projection, and the down projection."""
    width = ffn_hidden_size
    return (
        *linear("mlp.gate_up_proj", hidden_size, 2 * width, "column", parts=(width, width)),
        *linear("mlp.down_proj", width, hidden_size, "row"),
    )


def phi3(config: Config) -> ModelSpec:
    """Phi-3 and Phi-4-mini (arXiv:2404.14219)."""
    sizes = read_sizes(config)
    fraction = rotary_fraction(config, "partial_rotary_factor")
    check_rotary(config, sizes.head_dim, fraction)
    hidden_size, ffn_hidden_size = sizes.hidden_size, ffn_size(config)
    kind = LayerKind(
        name="layer",
        attention=ordinary_attention(
            sizes,
            window=config.optional_size("sliding_window", MAX_POSITIONS),
            rotary_dim=int(sizes.head_dim * fraction),
        ),
        feed_forward=FeedForward(
            ffn_hidden_size, gated=True, activation=config.activation("hidden_act")
        ),
        norm="rms",
        num_norms=2,
        weights=(
            *part(
                "attention",
                *linear("self_attn.o_proj", sizes.query_size, hidden_size, "row"),
                *linear(
                    "self_attn.qkv_proj",
                    hidden_size,
                    sizes.query_size + 2 * sizes.kv_size,
                    "column",
                    parts=(sizes.query_size, sizes.kv_size, sizes.kv_size),
                ),
            ),
            *part("mlp", *fused_gate_up(hidden_size, ffn_hidden_size)),
            *rms_norms(hidden_size, *PRE_NORMS),
        ),
    )
    return causal_lm(config, sizes, (kind,), hidden_dropout=config.dropout("resid_pdrop"))
