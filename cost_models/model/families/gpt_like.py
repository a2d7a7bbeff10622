"""Decoders with layer norms and a plain MLP: GPT-2, GPT-NeoX, BLOOM."""

from __future__ import annotations

from cost_models.model.families.blocks import (
    TransformerSizes,
    Weights,
    assemble,
    check_rotary,
    embedding,
    ffn_size,
    linear,
    max_positions,
    norm,
    norm_and_projection,
    numbered,
    ordinary_attention,
    part,
    plain_mlp,
    positions,
    read_sizes,
    rotary_fraction,
)
from cost_models.model.families.reader import MAX_FFN, MAX_POSITIONS, Config, Defaults
from cost_models.model.spec import FeedForward, LayerKind, ModelSpec, Sharding

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

    def conv1d(
        name: str,
        in_features: int,
        out_features: int,
        sharding: Sharding,
        parts: tuple[int, ...] = (),
    ) -> Weights:
        return linear(
            name, in_features, out_features, sharding, bias=True, transposed=True, parts=parts
        )

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
                *conv1d("attn.c_attn", hidden_size, 3 * hidden_size, "column", 3 * (hidden_size,)),
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


def four_linears(
    hidden_size: int,
    ffn_hidden_size: int,
    *,
    attention: str,
    qkv_size: int,
    attention_bias: bool = True,
    mlp_bias: bool = True,
) -> Weights:
    """Return the fused q, k, v; output; up; down projections under the names of Megatron's GPT."""
    return (
        *part(
            "attention",
            *linear(
                f"{attention}.query_key_value", hidden_size, qkv_size, "column", bias=attention_bias
            ),
            *linear(f"{attention}.dense", hidden_size, hidden_size, "row", bias=attention_bias),
        ),
        *plain_mlp(
            "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", hidden_size, ffn_hidden_size, bias=mlp_bias
        ),
    )


def gpt_neox(config: Config) -> ModelSpec:
    """GPT-NeoX-20B and Pythia (Black et al., arXiv:2204.06745): parallel attention and MLP."""
    sizes = read_sizes(config, kv_heads=None, head_dim=None)
    fraction = rotary_fraction(config, "rotary_pct", default=0.25)
    check_rotary(config, sizes.head_dim, fraction)
    hidden_size, vocab_size = sizes.hidden_size, sizes.vocab_size
    ffn_hidden_size = ffn_size(config)
    dropout = config.dropout("hidden_dropout")
    kind = LayerKind(
        name="layer",
        attention=ordinary_attention(sizes, rotary_dim=int(sizes.head_dim * fraction)),
        feed_forward=FeedForward(
            ffn_hidden_size, gated=False, activation=config.activation("hidden_act")
        ),
        norm="layer",
        num_norms=2,
        weights=(
            *norm("input_layernorm", hidden_size, bias=True),
            *norm("post_attention_layernorm", hidden_size, bias=True),
            *four_linears(
                hidden_size,
                ffn_hidden_size,
                attention="attention",
                qkv_size=3 * hidden_size,
                attention_bias=config.flag("attention_bias"),
            ),
        ),
        parallel_residual=config.flag("use_parallel_residual"),
    )
    return assemble(
        config,
        sizes,
        embedding=embedding("gpt_neox.embed_in", vocab_size, hidden_size),
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
    kind = LayerKind(
        name="layer",
        attention=ordinary_attention(sizes, rotary=False),
        feed_forward=FeedForward(4 * hidden_size, gated=False, activation="gelu_pytorch_tanh"),
        norm="layer",
        num_norms=2,
        weights=(
            *norm("input_layernorm", hidden_size, bias=True),
            *norm("post_attention_layernorm", hidden_size, bias=True),
            *four_linears(
                hidden_size, 4 * hidden_size, attention="self_attention", qkv_size=3 * hidden_size
            ),
        ),
    )
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
