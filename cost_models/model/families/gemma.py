"""Gemma 1 to 3: wide heads, tied embeddings; from Gemma 2 four norms and alternating windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Final

from msgspec import Meta

from cost_models.model.families.blocks import TransformerSizes, read_sizes, text_model
from cost_models.model.families.llama_like import (
    FULL,
    PRE_NORMS,
    SLIDING,
    Style,
    decoder,
    windows_by_type,
)
from cost_models.model.families.reader import (
    MAX_LAYERS,
    MAX_POSITIONS,
    Config,
    Defaults,
    decoder_defaults,
    whole,
)
from cost_models.model.spec import ModelSpec

FOUR_NORMS: Final = (*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")

GEMMA = decoder_defaults(
    (256000, 3072, 24576, 28, 16, 16, 8192),
    hidden_act="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    head_dim=256,
    attention_bias=False,
    use_bidirectional_attention=None,
)
GEMMA2 = Defaults(
    {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": None,
    }
)
GEMMA3 = Defaults(
    {
        **GEMMA2.values,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "use_bidirectional_attention": False,
    }
)


def _style(
    config: Config,
    norms: tuple[str, ...],
    activation: str,
    qk_norm: str = "",
    *,
    rotary_by_window: bool = False,
    capped: bool = False,
) -> Style:
    bias = config.flag("attention_bias")
    return Style(
        bias=bias,
        output_bias=bias,
        qk_norm=qk_norm,
        norms=norms,
        norms_after=norms == FOUR_NORMS,
        capped=capped,
        rotary_by_window=rotary_by_window,
        norm="rms_in_fp32",
        causal=not config.flag("use_bidirectional_attention"),
        activation=activation,
    )


def _is_capped(config: Config, what: str = "attn") -> bool:
    """Whether attention scores, or the "final" logits, are capped; null disables it."""
    key = f"{what}_logit_softcapping"
    if config.is_null(key):
        return False
    cap = config.read(key, Annotated[float, Meta(ge=1e-3, le=1e6)], config.default(key))
    return bool(cap is not None)


def _decoder(config: Config, sizes: TransformerSizes, style: Style, types: list[str]) -> ModelSpec:
    window = config.optional_size("sliding_window", MAX_POSITIONS)
    found = decoder(config, sizes, style, windows_by_type(config, types, window=window))
    return replace(found, caps_logits=_is_capped(config, "final"))


def gemma(config: Config) -> ModelSpec:
    """Gemma (arXiv:2403.08295)."""
    return decoder(config, read_sizes(config), _style(config, PRE_NORMS, "hidden_act"))


def gemma2(config: Config) -> ModelSpec:
    """Gemma 2 (arXiv:2408.00118): a window in every other layer."""
    sizes = read_sizes(config)
    types = [FULL if i % 2 else SLIDING for i in range(sizes.num_layers)]
    style = _style(config, FOUR_NORMS, "hidden_activation", capped=_is_capped(config))
    return _decoder(config, sizes, style, types)


def gemma3_text(config: Config) -> ModelSpec:
    """Gemma 3 (arXiv:2503.19786): five layers with a window for one without; norms of q and k."""
    sizes = read_sizes(config)
    every = config.read("sliding_window_pattern", whole(1, MAX_LAYERS), 6)
    types = [SLIDING if (i + 1) % every else FULL for i in range(sizes.num_layers)]
    style = _style(
        config,
        FOUR_NORMS,
        "hidden_activation",
        "head",
        rotary_by_window=True,
        capped=_is_capped(config),
    )
    return _decoder(config, sizes, style, types)


def gemma3(config: Config) -> ModelSpec:
    """Gemma 3 with vision: the text model only, as ``gemma3_text``."""
    return text_model(config, "gemma3_text", GEMMA3, gemma3_text)
