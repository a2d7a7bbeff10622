"""Phi 1 to 2: parallel attention and MLP under one layer norm, biases everywhere."""

from __future__ import annotations

from cost_models.model.families.blocks import (
    TransformerSizes,
    Weights,
    assemble,
    embedding,
    linear,
    max_positions,
    norm,
    numbered,
    ordinary_attention,
    output_projection,
    part,
    plain_mlp,
    read_feed_forward,
    read_sizes,
    rotary_dim,
)
from cost_models.model.families.reader import Config, decoder_defaults
from cost_models.model.spec import LayerKind, ModelSpec, Weight

PHI = decoder_defaults(
    (51200, 2048, 8192, 24, 32, None, 2048),
    hidden_act="gelu_new",
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    qk_layernorm=False,
)


def phi(config: Config) -> ModelSpec:
    """Phi-1, 1.5 and 2 (arXiv:2306.11644, arXiv:2309.05463)."""
    sizes = read_sizes(config)
    hidden_size, vocab_size = sizes.hidden_size, sizes.vocab_size
    bias = Weight("lm_head.bias", (vocab_size,), "vector", "vocab")
    return assemble(
        config,
        sizes,
        embedding=embedding("model.embed_tokens", vocab_size, hidden_size),
        kinds=(_layer(config, sizes),),
        prefixes=numbered("model.layers", sizes.num_layers),
        head=(
            *norm("model.final_layernorm", hidden_size, bias=True),
            *output_projection(config, hidden_size, vocab_size),
            *part("head", bias),
        ),
        max_seq_len=max_positions(config),
        hidden_dropout=config.dropout("resid_pdrop"),
        embedding_dropout=config.dropout("embd_pdrop"),
    )


def _layer(config: Config, sizes: TransformerSizes) -> LayerKind:
    rotated = rotary_dim(config, sizes.head_dim, 0.5)
    hidden_size, feed_forward = sizes.hidden_size, read_feed_forward(config, gated=False)
    qk_norm = config.flag("qk_layernorm")
    if qk_norm:  # the module's norms have that width regardless of head_dim
        width = hidden_size // sizes.num_heads
        if width != sizes.head_dim:
            raise config.wrong("head_dim", sizes.head_dim, f"{width} where qk_layernorm = true")
    return LayerKind(
        name="layer",
        attention=ordinary_attention(sizes, rotary_dim=rotated, qk_norm="head" if qk_norm else ""),
        feed_forward=feed_forward,
        norm="layer",
        num_norms=1,
        weights=(
            *part(
                "attention",
                *linear("self_attn.q_proj", hidden_size, sizes.query_size, "column", bias=True),
                *linear("self_attn.k_proj", hidden_size, sizes.kv_size, "column", bias=True),
                *linear("self_attn.v_proj", hidden_size, sizes.kv_size, "column", bias=True),
                *linear("self_attn.dense", sizes.query_size, hidden_size, "row", bias=True),
            ),
            *(_head_norms(sizes.head_dim) if qk_norm else ()),
            *plain_mlp("mlp.fc1", "mlp.fc2", hidden_size, feed_forward.ffn_hidden_size, bias=True),
            *norm("input_layernorm", hidden_size, bias=True),
        ),
        parallel_residual=True,
    )


def _head_norms(head_dim: int) -> Weights:
    return (
        *norm("self_attn.q_layernorm", head_dim, bias=True),
        *norm("self_attn.k_layernorm", head_dim, bias=True),
    )
