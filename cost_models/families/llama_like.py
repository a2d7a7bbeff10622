"""Decoders with rotary positions, separate q, k, v projections, a gated MLP: llama and its kin."""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.families.blocks import (
    Sizes,
    Weights,
    check_rotary,
    embedding,
    ffn_size,
    linear,
    max_positions,
    norm,
    ordinary_attention,
    output_projection,
    part,
    read_sizes,
    stack,
)
from cost_models.families.reader import MAX_LAYERS, MAX_POSITIONS, Config, Defaults
from cost_models.model import Attention, FeedForward, LayerKind, ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"

LLAMA = Defaults(
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
    }
)
MISTRAL = Defaults(
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
        "attention_dropout": 0.0,
    }
)
QWEN2 = Defaults(
    {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "attention_dropout": 0.0,
    }
)
QWEN3 = Defaults({**QWEN2.values, "head_dim": 128, "attention_bias": False})


def attention_weights(
    hidden_size: int, attention: Attention, *, bias: bool = False, output_bias: bool = False
) -> Weights:
    """Return q, k, v and o projections, and per-head norms of q and k where there are any."""
    query = attention.num_heads * attention.head_dim
    key_value = attention.num_kv_heads * attention.head_dim
    norms: Weights = ()
    if attention.qk_norm:
        norms = (
            *norm("self_attn.q_norm", attention.head_dim),
            *norm("self_attn.k_norm", attention.head_dim),
        )
    return part(
        "attention",
        *linear("self_attn.q_proj", hidden_size, query, "column", bias=bias),
        *linear("self_attn.k_proj", hidden_size, key_value, "column", bias=bias),
        *linear("self_attn.v_proj", hidden_size, key_value, "column", bias=bias),
        *linear("self_attn.o_proj", query, hidden_size, "row", bias=output_bias),
        *norms,
    )


def gated_mlp(
    hidden_size: int, ffn_hidden_size: int, *, name: str = "mlp", bias: bool = False
) -> Weights:
    """Return gate, up and down projections (Shazeer, arXiv:2002.05202)."""
    return part(
        "mlp",
        *linear(f"{name}.gate_proj", hidden_size, ffn_hidden_size, "column", bias=bias),
        *linear(f"{name}.up_proj", hidden_size, ffn_hidden_size, "column", bias=bias),
        *linear(f"{name}.down_proj", ffn_hidden_size, hidden_size, "row", bias=bias),
    )


def rms_norms(hidden_size: int, *names: str) -> Weights:
    """Return RMS norms of the hidden size."""
    return tuple(weight for name in names for weight in norm(name, hidden_size))


def pre_norms(hidden_size: int) -> Weights:
    """Return the norms before attention and before the MLP."""
    return rms_norms(hidden_size, "input_layernorm", "post_attention_layernorm")


def causal_lm(
    config: Config,
    sizes: Sizes,
    kinds: tuple[LayerKind, ...],
    pattern: tuple[int, ...],
    *,
    norm_bias: bool = False,
    hidden_dropout: float = 0.0,
    assumptions: tuple[str, ...] = (),
) -> ModelSpec:
    """Put embedding, layers, final norm and output projection together under llama's names."""
    tied = config.flag("tie_word_embeddings")
    hidden_size, vocab_size = sizes.hidden_size, sizes.vocab_size
    return ModelSpec(
        name="",
        family=config.family,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_seq_len=max_positions(config),
        max_seq_len_is_hard=False,
        tie_embeddings=tied,
        hidden_dropout=hidden_dropout,
        attention_dropout=config.dropout("attention_dropout"),
        embedding=embedding("model.embed_tokens", vocab_size, hidden_size),
        kinds=kinds,
        pattern=pattern,
        layer_prefixes=tuple(f"model.layers.{i}" for i in range(len(pattern))),
        head=(
            *norm("model.norm", hidden_size, bias=norm_bias),
            *output_projection("lm_head", hidden_size, vocab_size, tied=tied),
        ),
        head_multiply=hidden_size * vocab_size,
        config=config.fields.values,
        assumptions=assumptions,
    )


def gated_feed_forward(config: Config, activation: str = "hidden_act") -> FeedForward:
    """Read a gated MLP."""
    return FeedForward(ffn_size(config), gated=True, activation=config.text(activation))


def llama(config: Config) -> ModelSpec:
    """Llama 1 to 3 (Touvron et al., arXiv:2302.13971), and models converted to its names."""
    sizes = read_sizes(config)
    check_rotary(config, sizes.head_dim)
    feed_forward = gated_feed_forward(config)
    attention = ordinary_attention(sizes)
    bias = config.flag("attention_bias")
    hidden_size = sizes.hidden_size
    kind = LayerKind(
        name="layer",
        attention=attention,
        feed_forward=feed_forward,
        norm="rms",
        num_norms=2,
        weights=(
            *attention_weights(hidden_size, attention, bias=bias, output_bias=bias),
            *gated_mlp(hidden_size, feed_forward.ffn_hidden_size, bias=config.flag("mlp_bias")),
            *pre_norms(hidden_size),
        ),
    )
    return causal_lm(config, sizes, (kind,), (0,) * sizes.num_layers)


def mistral(config: Config) -> ModelSpec:
    """Mistral (Jiang et al., arXiv:2310.06825): grouped queries, a window in every layer."""
    sizes = read_sizes(config)
    check_rotary(config, sizes.head_dim)
    window = config.optional_size("sliding_window", MAX_POSITIONS)
    return windowed_decoder(config, sizes, [window] * sizes.num_layers)


def qwen2(config: Config) -> ModelSpec:
    """Qwen2 and Qwen2.5 (arXiv:2407.10671): biases on q, k and v."""
    sizes = read_sizes(config)
    check_rotary(config, sizes.head_dim)
    return windowed_decoder(config, sizes, late_windows(config, sizes.num_layers), bias=True)


def qwen3(config: Config) -> ModelSpec:
    """Qwen3 (arXiv:2505.09388): norms of q and k per head, head_dim apart from the hidden size."""
    sizes = read_sizes(config)
    check_rotary(config, sizes.head_dim)
    bias = config.flag("attention_bias")
    windows = late_windows(config, sizes.num_layers)
    return windowed_decoder(config, sizes, windows, bias=bias, output_bias=bias, qk_norm=True)


def late_windows(config: Config, num_layers: int) -> list[int | None]:
    """Return the window of each layer: if switched on, from layer ``max_window_layers`` on."""
    first = config.size("max_window_layers", MAX_LAYERS, low=0)
    window = (
        config.optional_size("sliding_window", MAX_POSITIONS)
        if config.flag("use_sliding_window")
        else None
    )
    types = config.choices_per_layer("layer_types", num_layers, (FULL, SLIDING))
    if types is None:
        types = [SLIDING if i >= first else FULL for i in range(num_layers)]
    return [window if kind == SLIDING else None for kind in types]


def windowed_decoder(
    config: Config,
    sizes: Sizes,
    windows: Sequence[int | None],
    *,
    bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
) -> ModelSpec:
    """Build a pre-norm gated decoder whose layers may differ in their attention window."""
    feed_forward = gated_feed_forward(config)
    hidden_size = sizes.hidden_size

    def build(window: int | None) -> LayerKind:
        attention = ordinary_attention(sizes, window=window, qk_norm=qk_norm)
        return LayerKind(
            name=FULL if window is None else SLIDING,
            attention=attention,
            feed_forward=feed_forward,
            norm="rms",
            num_norms=2,
            weights=(
                *attention_weights(hidden_size, attention, bias=bias, output_bias=output_bias),
                *gated_mlp(hidden_size, feed_forward.ffn_hidden_size),
                *pre_norms(hidden_size),
            ),
        )

    return causal_lm(config, sizes, *stack(windows, build))
