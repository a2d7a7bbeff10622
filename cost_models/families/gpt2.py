"""GPT-2: learned positions, layer norms, a fused q, k, v projection stored (in, out)."""

from __future__ import annotations

from cost_models.families.blocks import (
    Sizes,
    Weights,
    embedding,
    linear,
    max_positions,
    norm,
    ordinary_attention,
    output_projection,
    part,
    positions,
    read_sizes,
)
from cost_models.families.reader import MAX_FFN, Config, Defaults
from cost_models.model import Cut, FeedForward, LayerKind, ModelSpec

GPT2 = Defaults(
    {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    synonyms={
        "n_embd": ("hidden_size",),
        "n_positions": ("max_position_embeddings",),
        "n_head": ("num_attention_heads",),
        "n_layer": ("num_hidden_layers",),
    },
)


def gpt2(config: Config) -> ModelSpec:
    """GPT-2 (Radford et al., 2019)."""
    sizes = read_sizes(config, hidden="n_embd", layers="n_layer", heads="n_head", kv_heads=None)
    if config.flag("add_cross_attention"):
        raise config.wrong("add_cross_attention", True, "false: only the decoder alone is known")
    hidden_size, vocab_size = sizes.hidden_size, sizes.vocab_size
    max_seq_len = max_positions(config, "n_positions")
    tied = config.flag("tie_word_embeddings")
    return ModelSpec(
        name="",
        family=config.family,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        max_seq_len_is_hard=True,
        tie_embeddings=tied,
        hidden_dropout=config.dropout("resid_pdrop"),
        attention_dropout=config.dropout("attn_pdrop"),
        embedding=(
            *embedding("transformer.wte", vocab_size, hidden_size),
            *positions("transformer.wpe", max_seq_len, hidden_size),
        ),
        kinds=(_layer(config, sizes),),
        pattern=(0,) * sizes.num_layers,
        layer_prefixes=tuple(f"transformer.h.{i}" for i in range(sizes.num_layers)),
        head=(
            *norm("transformer.ln_f", hidden_size, bias=True),
            *output_projection("lm_head", hidden_size, vocab_size, tied=tied),
        ),
        head_multiply=hidden_size * vocab_size,
        config=config.fields.values,
    )


def _layer(config: Config, sizes: Sizes) -> LayerKind:
    hidden_size = sizes.hidden_size
    inner = config.optional_size("n_inner", MAX_FFN) or 4 * hidden_size
    return LayerKind(
        name="layer",
        attention=ordinary_attention(sizes, rotary=False),
        feed_forward=FeedForward(inner, gated=False, activation=config.text("activation_function")),
        norm="layer",
        num_norms=2,
        weights=(
            *norm("ln_1", hidden_size, bias=True),
            *part(
                "attention",
                *_conv1d("attn.c_attn", hidden_size, 3 * hidden_size, "column"),
                *_conv1d("attn.c_proj", hidden_size, hidden_size, "row"),
            ),
            *norm("ln_2", hidden_size, bias=True),
            *part(
                "mlp",
                *_conv1d("mlp.c_fc", hidden_size, inner, "column"),
                *_conv1d("mlp.c_proj", inner, hidden_size, "row"),
            ),
        ),
    )


def _conv1d(name: str, in_features: int, out_features: int, cut: Cut) -> Weights:
    return linear(name, in_features, out_features, cut, bias=True, transposed=True)
