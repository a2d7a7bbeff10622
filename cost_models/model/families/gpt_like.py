"""Decoders with layer norms and a plain MLP: GPT-2, GPT-NeoX, BLOOM."""

from __future__ import annotations

from functools import partial

from cost_models.model.families.blocks import (
    TransformerSizes,
    assemble,
    embedding,
    linear,
    max_positions,
    norm,
    norm_and_projection,
    numbered,
    ordinary_attention,
    part,
    plain_mlp,
    positions,
    read_feed_forward,
    read_sizes,
    rotary_dim,
)
from cost_models.model.families.reader import MAX_FFN, MAX_POSITIONS, Config, Defaults
from cost_models.model.spec import Attention, FeedForward, LayerKind, ModelSpec

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
        "embd_pdrop": 0.1,
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
GPT_NEOX = Defaults(
    {
        "vocab_size": 50432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "hidden_act": "gelu",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "attention_bias": True,
    }
)
BLOOM = Defaults(
    {
        "vocab_size": 250880,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
    },
    synonyms={
        "hidden_size": ("n_embed",),
        "n_head": ("num_attention_heads",),
        "n_layer": ("num_hidden_layers",),
    },
)


def gpt2(config: Config) -> ModelSpec:
    """GPT-2 (Radford et al., 2019): fused q, k, v; weights stored (in, out)."""
    sizes = read_sizes(
        config, hidden="n_embd", layers="n_layer", heads="n_head", kv_heads=None, head_dim=None
    )
    if config.flag("add_cross_attention"):
        raise config.wrong("add_cross_attention", True, "false: only decoders are supported")
    hidden_size, vocab_size = sizes.hidden_size, sizes.vocab_size
    max_seq_len = max_positions(config, "n_positions")
    return assemble(
        config,
        sizes,
        embedding=(
            *embedding("transformer.wte", vocab_size, hidden_size),
            *positions("transformer.wpe", max_seq_len, hidden_size),
        ),
        kinds=(_gpt2_layer(config, sizes),),
        prefixes=numbered("transformer.h", sizes.num_layers),
        head=norm_and_projection(config, sizes, "transformer.ln_f", bias=True),
        max_seq_len=max_seq_len,
        max_seq_len_is_hard=True,
        hidden_dropout=config.dropout("resid_pdrop"),
        attention_dropout="attn_pdrop",
        embedding_dropout=config.dropout("embd_pdrop"),
    )


def _gpt2_layer(config: Config, sizes: TransformerSizes) -> LayerKind:
    hidden_size = sizes.hidden_size
    inner = config.optional_size("n_inner", MAX_FFN) or 4 * hidden_size
    fused = 3 * (hidden_size,)  # queries, keys, values
    conv1d = partial(linear, bias=True, transposed=True)
    return LayerKind(
        name="layer",
        attention=ordinary_attention(sizes, rotary=False, softmax_in_fp32=False),
        feed_forward=FeedForward(
            inner, gated=False, activation=config.activation("activation_function")
        ),
        norm="layer",
        num_norms=2,
        weights=(
            *norm("ln_1", hidden_size, bias=True),
            *part(
                "attention",
                *conv1d("attn.c_attn", hidden_size, sum(fused), "column", parts=fused),
                *conv1d("attn.c_proj", hidden_size, hidden_size, "row"),
            ),
            *norm("ln_2", hidden_size, bias=True),
            *part(
                "mlp",
                *conv1d("mlp.c_fc", hidden_size, inner, "column"),
                *conv1d("mlp.c_proj", inner, hidden_size, "row"),
            ),
        ),
    )


def megatron_layer(
    sizes: TransformerSizes,
    feed_forward: FeedForward,
    attention: Attention,
    name: str,
    *,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    biases: tuple[bool, bool] = (True, True),
    parallel_residual: bool = False,
) -> LayerKind:
    """Return a layer under the names of Megatron's GPT, with fused q, k, v.

    ``name``: of its attention. ``biases``: of the matrices of attention, and of the MLP.
    """
    hidden_size, ffn_hidden_size = sizes.hidden_size, feed_forward.ffn_hidden_size
    qkv_size, (bias, mlp_bias) = sizes.query_size + 2 * sizes.kv_size, biases
    up, down = "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"
    return LayerKind(
        name="layer",
        attention=attention,
        feed_forward=feed_forward,
        norm="layer",
        num_norms=len(norms),
        weights=(
            *(w for one in norms for w in norm(one, hidden_size, bias=True)),
            *part(
                "attention",
                *linear(f"{name}.query_key_value", hidden_size, qkv_size, "column", bias=bias),
                *linear(f"{name}.dense", hidden_size, hidden_size, "row", bias=bias),
            ),
            *plain_mlp(up, down, hidden_size, ffn_hidden_size, bias=mlp_bias),
        ),
        parallel_residual=parallel_residual,
    )


def gpt_neox(config: Config) -> ModelSpec:
    """GPT-NeoX-20B and Pythia (Black et al., arXiv:2204.06745): parallel attention and MLP."""
    sizes = read_sizes(config, kv_heads=None, head_dim=None)
    rotated = rotary_dim(config, sizes.head_dim, 0.25, "rotary_pct")
    dropout = config.dropout("hidden_dropout")
    kind = megatron_layer(
        sizes,
        read_feed_forward(config, gated=False),
        ordinary_attention(sizes, rotary_dim=rotated),
        "attention",
        biases=(config.flag("attention_bias"), True),
        parallel_residual=config.flag("use_parallel_residual"),
    )
    return assemble(
        config,
        sizes,
        embedding=embedding("gpt_neox.embed_in", sizes.vocab_size, sizes.hidden_size),
        kinds=(kind,),
        prefixes=numbered("gpt_neox.layers", sizes.num_layers),
        head=norm_and_projection(config, sizes, "gpt_neox.final_layer_norm", bias=True),
        max_seq_len=max_positions(config),
        hidden_dropout=dropout,
        embedding_dropout=dropout,
    )


def bloom(config: Config) -> ModelSpec:
    """BLOOM (arXiv:2211.05100): ALiBi instead of positions, a norm after the embedding."""
    sizes = read_sizes(config, layers="n_layer", heads="n_head", kv_heads=None, head_dim=None)
    hidden_size, vocab_size = sizes.hidden_size, sizes.vocab_size
    feed_forward = FeedForward(4 * hidden_size, gated=False, activation="gelu_pytorch_tanh")
    attention = ordinary_attention(sizes, rotary=False)
    kind = megatron_layer(sizes, feed_forward, attention, "self_attention")
    return assemble(
        config,
        sizes,
        embedding=(
            *embedding("transformer.word_embeddings", vocab_size, hidden_size),
            *norm("transformer.word_embeddings_layernorm", hidden_size, bias=True),
        ),
        kinds=(kind,),
        prefixes=numbered("transformer.h", sizes.num_layers),
        head=norm_and_projection(config, sizes, "transformer.ln_f", bias=True),
        max_seq_len=config.optional_size("seq_length", MAX_POSITIONS),
        hidden_dropout=config.dropout("hidden_dropout"),
    )
