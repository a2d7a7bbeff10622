"""Falcon: parallel attention and MLP, one key-value head (7B) or groups of them (40B, 180B)."""

from __future__ import annotations

from msgspec.structs import replace

from cost_models.model.families.blocks import (
    TransformerSizes,
    assemble,
    check_rotary,
    embedding,
    max_positions,
    norm_and_projection,
    numbered,
    ordinary_attention,
    read_sizes,
)
from cost_models.model.families.gpt_like import megatron_layer
from cost_models.model.families.reader import MAX_FFN, MAX_HEADS, Config, Defaults
from cost_models.model.spec import FeedForward, LayerKind, ModelSpec

FALCON = Defaults(
    {
        "vocab_size": 65024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "num_ln_in_parallel_attn": None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "num_kv_heads": None,
        "alibi": False,
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "max_position_embeddings": 2048,
        "ffn_hidden_size": None,
        "activation": "gelu",
        "tie_word_embeddings": True,
    },
    synonyms={"hidden_size": ("n_embed",)},
)


def falcon(config: Config) -> ModelSpec:
    """Falcon (Almazrouei et al., arXiv:2311.16867)."""
    sizes = _sizes(config)
    if not config.flag("alibi"):
        check_rotary(config, sizes.head_dim)
    return assemble(
        config,
        sizes,
        embedding=embedding("transformer.word_embeddings", sizes.vocab_size, sizes.hidden_size),
        kinds=(_layer(config, sizes),),
        prefixes=numbered("transformer.h", sizes.num_layers),
        head=norm_and_projection(config, sizes, "transformer.ln_f", bias=True),
        max_seq_len=max_positions(config),
        hidden_dropout=config.dropout("hidden_dropout"),
    )


def _sizes(config: Config) -> TransformerSizes:
    """Read the sizes; ``num_kv_heads`` applies to the newer architecture only."""
    sizes = read_sizes(config, kv_heads=None, head_dim=None)
    if config.flag("new_decoder_architecture"):
        groups = config.optional_size("num_kv_heads", MAX_HEADS) or sizes.num_heads
        config.must_divide("num_kv_heads", groups, "num_attention_heads", sizes.num_heads)
        return replace(sizes, num_kv_heads=groups)
    return replace(sizes, num_kv_heads=1 if config.flag("multi_query") else sizes.num_heads)


def _layer(config: Config, sizes: TransformerSizes) -> LayerKind:
    inner = config.optional_size("ffn_hidden_size", MAX_FFN) or 4 * sizes.hidden_size
    bias, rotary = config.flag("bias"), not config.flag("alibi")
    return megatron_layer(
        sizes,
        FeedForward(inner, gated=False, activation=config.activation("activation")),
        ordinary_attention(sizes, rotary=rotary, softmax_in_fp32=False),
        "self_attention",
        norms=_norm_names(config),
        biases=(bias, bias),
        parallel_residual=config.flag("parallel_attn") or config.flag("new_decoder_architecture"),
    )


def _norm_names(config: Config) -> tuple[str, ...]:
    if not config.flag("parallel_attn"):
        return ("input_layernorm", "post_attention_layernorm")
    count = config.optional_size("num_ln_in_parallel_attn", 2)
    if count is None:
        count = 2 if config.flag("new_decoder_architecture") else 1
    return ("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm",)
