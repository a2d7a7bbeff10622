"""Phi-3: llama with fused q, k, v and fused gate and up projections."""

from __future__ import annotations

from cost_models.model.families.blocks import (
    Weights,
    linear,
    ordinary_attention,
    part,
    read_feed_forward,
    read_sizes,
    rotary_dim,
)
from cost_models.model.families.llama_like import PRE_NORMS, causal_lm, rms_norms
from cost_models.model.families.reader import MAX_POSITIONS, Config, decoder_defaults
from cost_models.model.spec import LayerKind, ModelSpec

PHI3 = decoder_defaults(
    (32064, 3072, 8192, 32, 32, None, 4096), resid_pdrop=0.0, sliding_window=None
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
    rotated = rotary_dim(config, sizes.head_dim, 1.0)
    hidden_size, feed_forward = sizes.hidden_size, read_feed_forward(config, gated=True)
    kind = LayerKind(
        name="layer",
        attention=ordinary_attention(
            sizes, window=config.optional_size("sliding_window", MAX_POSITIONS), rotary_dim=rotated
        ),
        feed_forward=feed_forward,
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
            *part("mlp", *fused_gate_up(hidden_size, feed_forward.ffn_hidden_size)),
            *rms_norms(hidden_size, *PRE_NORMS),
        ),
    )
    return causal_lm(config, sizes, (kind,), hidden_dropout=config.dropout("resid_pdrop"))
