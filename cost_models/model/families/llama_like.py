"""Decoders with rotary positions, separate q, k, v projections, a gated MLP: llama and variants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from msgspec import Struct

from cost_models.model.families.blocks import (
    TransformerSizes,
    Weights,
    assemble,
    check_rotary,
    embedding,
    linear,
    max_positions,
    norm,
    norm_and_projection,
    numbered,
    ordinary_attention,
    part,
    plain_mlp,
    read_feed_forward,
    read_sizes,
    stack,
)
from cost_models.model.families.reader import (
    MAX_LAYERS,
    MAX_POSITIONS,
    Config,
    Defaults,
    decoder_defaults,
)
from cost_models.model.spec import Attention, FeedForward, LayerKind, ModelSpec

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
PRE_NORMS: Final = ("input_layernorm", "post_attention_layernorm")
POST_NORMS: Final = ("post_attention_layernorm", "post_feedforward_layernorm")

LLAMA = decoder_defaults(
    (32000, 4096, 11008, 32, 32, None, 2048), head_dim=None, attention_bias=False, mlp_bias=False
)
MISTRAL = decoder_defaults(
    (32000, 4096, 14336, 32, 32, 8, 131072), head_dim=None, sliding_window=4096
)
QWEN2 = decoder_defaults(
    (151936, 4096, 22016, 32, 32, 32, 32768),
    use_sliding_window=False,
    sliding_window=4096,
    max_window_layers=28,
)
QWEN3 = Defaults({**QWEN2.values, "head_dim": 128, "attention_bias": False})
OLMO2 = decoder_defaults((50304, 4096, 11008, 32, 32, None, 2048), attention_bias=False)

GRANITE = Defaults(
    {
        **{key: value for key, value in LLAMA.values.items() if key != "head_dim"},
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    }
)
SMOLLM3 = decoder_defaults(
    (128256, 2048, 11008, 36, 16, 4, 32768),
    tie_word_embeddings=True,
    use_sliding_window=False,
    sliding_window=None,
    no_rope_layer_interval=4,
    attention_bias=False,
    mlp_bias=False,
)


class Style(Struct, frozen=True):
    """Differences between the tensors of llama-like families."""

    bias: bool = False  # of q, k and v
    output_bias: bool = False  # of o
    mlp_bias: bool = False
    qk_norm: str = ""  # norms of q and k over each "head" or over "all" heads together; "": none
    norms: tuple[str, ...] = PRE_NORMS
    norms_after: bool = False
    capped: bool = False  # scores
    rotary_by_window: bool = False  # layers with a window have separate rotary tables
    norm: Literal["rms", "rms_in_fp32"] = "rms"
    causal: bool = True
    activation: str = "hidden_act"  # key of the activation


def qk_norms(attention: Attention, width: str) -> Weights:
    """Return the norms of queries and keys over each ``head``, or over ``all`` of them."""
    if width == "head":
        size = attention.head_dim
        return (*norm("self_attn.q_norm", size), *norm("self_attn.k_norm", size))
    return (
        *norm("self_attn.q_norm", attention.num_heads * attention.head_dim, sharding="heads"),
        *norm("self_attn.k_norm", attention.num_kv_heads * attention.head_dim, sharding="heads"),
    )


def attention_weights(
    hidden_size: int, attention: Attention, *, bias: bool = False, output_bias: bool = False
) -> Weights:
    """Return q, k, v and o projections."""
    query = attention.num_heads * attention.head_dim
    key_value = attention.num_kv_heads * attention.head_dim
    return part(
        "attention",
        *linear("self_attn.q_proj", hidden_size, query, "column", bias=bias),
        *linear("self_attn.k_proj", hidden_size, key_value, "column", bias=bias),
        *linear("self_attn.v_proj", hidden_size, key_value, "column", bias=bias),
        *linear("self_attn.o_proj", query, hidden_size, "row", bias=output_bias),
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


def dense_layer(
    sizes: TransformerSizes,
    feed_forward: FeedForward,
    style: Style,
    window: int | None,
    rotary: bool = True,
) -> LayerKind:
    """Build one layer."""
    name = FULL if window is None else SLIDING
    attention = ordinary_attention(
        sizes,
        window=window,
        rotary=rotary,
        rotary_table=name if style.rotary_by_window else "",
        causal=style.causal,
        capped=style.capped,
        qk_norm=style.qk_norm,
    )
    hidden_size, ffn_hidden_size = sizes.hidden_size, feed_forward.ffn_hidden_size
    return LayerKind(
        name=name,
        attention=attention,
        feed_forward=feed_forward,
        norm=style.norm,
        num_norms=len(style.norms),
        norms_after=style.norms_after,
        weights=(
            *attention_weights(
                hidden_size, attention, bias=style.bias, output_bias=style.output_bias
            ),
            *(qk_norms(attention, style.qk_norm) if style.qk_norm else ()),
            *gated_mlp(hidden_size, ffn_hidden_size, bias=style.mlp_bias),
            *rms_norms(hidden_size, *style.norms),
        ),
    )


def plain_layer(
    config: Config,
    attention: Attention,
    hidden_size: int,
    up: str,
    down: str,
    biases: tuple[str, str],
) -> LayerKind:
    """Return a layer with layer norms and an MLP without a gate, whose matrices are named.

    ``biases``: flags of the biases of attention, and of the MLP.
    """
    feed_forward = read_feed_forward(config, gated=False)
    of_attention, of_mlp = map(config.flag, biases)
    return LayerKind(
        name="layer",
        attention=attention,
        feed_forward=feed_forward,
        norm="layer",
        num_norms=len(PRE_NORMS),
        weights=(
            *attention_weights(hidden_size, attention, bias=of_attention, output_bias=of_attention),
            *plain_mlp(up, down, hidden_size, feed_forward.ffn_hidden_size, bias=of_mlp),
            *(w for name in PRE_NORMS for w in norm(name, hidden_size, bias=True)),
        ),
    )


def decoder(
    config: Config, sizes: TransformerSizes, style: Style, windows: Sequence[int | None] = ()
) -> ModelSpec:
    """Build a decoder whose layers may have different attention windows."""
    check_rotary(config, sizes.head_dim)
    feed_forward = read_feed_forward(config, gated=True, activation=style.activation)
    kinds, pattern = stack(
        windows or [None] * sizes.num_layers,
        lambda window: dense_layer(sizes, feed_forward, style, window),
    )
    return causal_lm(config, sizes, kinds, pattern)


def causal_lm(
    config: Config,
    sizes: TransformerSizes,
    kinds: tuple[LayerKind, ...],
    pattern: tuple[int, ...] = (),
    *,
    norm_bias: bool = False,
    **others: Any,
) -> ModelSpec:
    """Assemble embedding, layers, final norm and output projection under llama's names."""
    return assemble(
        config,
        sizes,
        embedding=embedding("model.embed_tokens", sizes.vocab_size, sizes.hidden_size),
        kinds=kinds,
        pattern=pattern,
        prefixes=numbered("model.layers", sizes.num_layers),
        head=norm_and_projection(config, sizes, "model.norm", bias=norm_bias),
        max_seq_len=max_positions(config),
        **others,
    )


def llama(config: Config) -> ModelSpec:
    """Llama 1 to 3 (Touvron et al., arXiv:2302.13971), and models converted to its format."""
    bias = config.flag("attention_bias")
    style = Style(bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))
    return decoder(config, read_sizes(config), style)


def mistral(config: Config) -> ModelSpec:
    """Mistral (Jiang et al., arXiv:2310.06825): grouped queries, a window in every layer."""
    sizes = read_sizes(config)
    window = config.optional_size("sliding_window", MAX_POSITIONS)
    return decoder(config, sizes, Style(), [window] * sizes.num_layers)


def qwen2(config: Config) -> ModelSpec:
    """Qwen2 and Qwen2.5 (arXiv:2407.10671): biases on q, k and v."""
    sizes = read_sizes(config)
    return decoder(config, sizes, Style(bias=True), late_windows(config, sizes.num_layers))


def qwen3(config: Config) -> ModelSpec:
    """Qwen3 (arXiv:2505.09388): norms of q and k per head, an independent head_dim."""
    sizes = read_sizes(config)
    bias = config.flag("attention_bias")
    style = Style(bias=bias, output_bias=bias, qk_norm="head")
    return decoder(config, sizes, style, late_windows(config, sizes.num_layers))


def olmo2(config: Config) -> ModelSpec:
    """OLMo 2 (arXiv:2501.00656): norms after attention and MLP, norms of q and k over all heads."""
    bias = config.flag("attention_bias")
    style = Style(
        bias=bias,
        output_bias=bias,
        qk_norm="all",
        norms=POST_NORMS,
        norms_after=True,
        norm="rms_in_fp32",
    )
    return decoder(config, read_sizes(config), style)


def granite(config: Config) -> ModelSpec:
    """Granite 3 (IBM, 2024): llama with four multipliers (Yang et al., arXiv:2203.03466)."""
    return llama(config)


def smollm3(config: Config) -> ModelSpec:
    """SmolLM3: llama; every fourth layer without positions (Yang et al., arXiv:2501.18795)."""
    sizes = read_sizes(config)
    bias = config.flag("attention_bias")
    style = Style(bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))
    check_rotary(config, sizes.head_dim)
    feed_forward = read_feed_forward(config, gated=True)
    turned = _layers_with_positions(config, sizes.num_layers)
    window = switched_window(config)
    types = [SLIDING if window is not None and not turns else FULL for turns in turned]
    windows = windows_by_type(config, types, window=window)
    kinds, pattern = stack(
        list(zip(windows, turned, strict=True)),
        lambda key: dense_layer(sizes, feed_forward, style, key[0], rotary=key[1]),
    )
    return causal_lm(config, sizes, kinds, pattern)


def _layers_with_positions(config: Config, num_layers: int) -> list[bool]:
    """Return whether each layer rotates queries and keys."""
    given = config.whole_numbers("no_rope_layers", 1) if config.has("no_rope_layers") else None
    if given is not None:
        if len(given) != num_layers:
            raise config.wrong("no_rope_layers", given, f"{num_layers:,} of 0 and 1, one a layer")
        return [bool(turns) for turns in given]
    every = config.size("no_rope_layer_interval", MAX_LAYERS)
    return [(i + 1) % every != 0 for i in range(num_layers)]


def windows_by_type(
    config: Config, types: Sequence[str], *, window: int | None
) -> list[int | None]:
    """Return the window of each layer; ``layer_types`` in the file overrides ``types``."""
    given = config.layer_types(len(types), (FULL, SLIDING))
    return [window if kind == SLIDING else None for kind in given or types]


def late_windows(config: Config, num_layers: int) -> list[int | None]:
    """Return the window of each layer: if enabled, from layer ``max_window_layers`` on."""
    first = config.index("max_window_layers", MAX_LAYERS)
    types = [SLIDING if i >= first else FULL for i in range(num_layers)]
    return windows_by_type(config, types, window=switched_window(config))


def switched_window(config: Config) -> int | None:
    """Return the window of Qwen's models, which ``use_sliding_window`` enables."""
    if not config.flag("use_sliding_window"):
        return None
    return config.optional_size("sliding_window", MAX_POSITIONS)
