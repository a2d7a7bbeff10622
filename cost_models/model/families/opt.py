"""OPT: learned positions, layer norms before (or after) each sublayer, a plain MLP."""

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
    positions,
    read_feed_forward,
    read_sizes,
)
from cost_models.model.families.reader import Config, Defaults
from cost_models.model.spec import LayerKind, ModelSpec

OPT = Defaults(
    {
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "word_embed_proj_dim": None,
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "num_attention_heads": 12,
        "activation_function": "relu",
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
    }
)
# OPT's table of positions starts with two unused rows
POSITION_OFFSET = 2


def opt(config: Config) -> ModelSpec:
    """OPT (Zhang et al., arXiv:2205.01068); the embedding of 350m is narrower than its layers."""
    sizes = read_sizes(config, kv_heads=None, head_dim=None)
    width = config.optional_size("word_embed_proj_dim") or sizes.hidden_size
    max_seq_len = max_positions(config)
    return assemble(
        config,
        sizes,
        embedding=_embedding(sizes, width, max_seq_len),
        kinds=(_layer(config, sizes),),
        prefixes=numbered("model.decoder.layers", sizes.num_layers),
        head=_head(config, sizes, width),
        max_seq_len=max_seq_len,
        max_seq_len_is_hard=True,
        head_multiply=width * sizes.vocab_size,
        hidden_dropout=config.dropout("dropout"),
    )


def _embedding(sizes: TransformerSizes, width: int, max_seq_len: int) -> Weights:
    hidden_size = sizes.hidden_size
    project_in: Weights = ()
    if width != hidden_size:
        project_in = linear("model.decoder.project_in", width, hidden_size, "replicate")
    return (
        *embedding("model.decoder.embed_tokens", sizes.vocab_size, width),
        *positions("model.decoder.embed_positions", max_seq_len + POSITION_OFFSET, hidden_size),
        *part("embedding", *project_in),
    )


def _head(config: Config, sizes: TransformerSizes, width: int) -> Weights:
    """Return final norm (of pre-norm models), projection to ``width``, output projection."""
    hidden_size = sizes.hidden_size
    head: Weights = ()
    norms_first = config.flag("do_layer_norm_before")
    if norms_first and not config.flag("_remove_final_layer_norm") and _affine(config):
        head += norm("model.decoder.final_layer_norm", hidden_size, bias=True)
    if width != hidden_size:
        project_out = linear("model.decoder.project_out", hidden_size, width, "replicate")
        head += part("head", *project_out)
    return head + output_projection(config, width, sizes.vocab_size)


def _affine(config: Config) -> bool:
    """Whether norms have a scale and a shift."""
    return config.flag("layer_norm_elementwise_affine")


def _layer(config: Config, sizes: TransformerSizes) -> LayerKind:
    hidden_size, bias = sizes.hidden_size, config.flag("enable_bias")
    keys = {"width": "ffn_dim", "activation": "activation_function"}
    feed_forward = read_feed_forward(config, gated=False, **keys)
    norms = (
        *norm("self_attn_layer_norm", hidden_size, bias=True),
        *norm("final_layer_norm", hidden_size, bias=True),
    )
    return LayerKind(
        name="layer",
        attention=ordinary_attention(sizes, rotary=False),
        feed_forward=feed_forward,
        norm="layer",
        num_norms=2,
        weights=(
            *part(
                "attention",
                *linear("self_attn.k_proj", hidden_size, hidden_size, "column", bias=bias),
                *linear("self_attn.v_proj", hidden_size, hidden_size, "column", bias=bias),
                *linear("self_attn.q_proj", hidden_size, hidden_size, "column", bias=bias),
                *linear("self_attn.out_proj", hidden_size, hidden_size, "row", bias=bias),
            ),
            *plain_mlp("fc1", "fc2", hidden_size, feed_forward.ffn_hidden_size, bias=bias),
            *(norms if _affine(config) else ()),
        ),
    )
