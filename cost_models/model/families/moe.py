"""Decoders with mixtures of experts: Mixtral, OLMoE, gpt-oss; shared parts of other families."""

from __future__ import annotations

from dataclasses import replace

from cost_models.model.families.blocks import (
    TransformerSizes,
    Weights,
    check_rotary,
    ffn_size,
    linear,
    ordinary_attention,
    part,
    read_sizes,
    stack,
)
from cost_models.model.families.llama_like import (
    FULL,
    PRE_NORMS,
    SLIDING,
    Style,
    attention_weights,
    causal_lm,
    gated_mlp,
    qk_norms,
    rms_norms,
    windows_by_type,
)
from cost_models.model.families.reader import MAX_EXPERTS, MAX_POSITIONS, Config, decoder_defaults
from cost_models.model.spec import FeedForward, LayerKind, ModelSpec, Weight

MIXTRAL = decoder_defaults(
    (32000, 4096, 14336, 32, 32, 8, 131072),
    synonyms={"num_local_experts": ("num_experts",)},
    head_dim=None,
    sliding_window=None,
    num_experts_per_tok=2,
    num_local_experts=8,
)
GPT_OSS = decoder_defaults(
    (201088, 2880, 2880, 36, 64, 8, 131072),
    synonyms={"num_local_experts": ("num_experts",)},
    num_local_experts=128,
    head_dim=64,
    sliding_window=128,
    num_experts_per_tok=4,
    attention_bias=True,
)


OLMOE = decoder_defaults(
    (50304, 2048, 2048, 16, 16, None, 4096),
    synonyms={"num_experts": ("num_local_experts",)},
    attention_bias=False,
    num_experts_per_tok=8,
    num_experts=64,
)


def read_experts(
    config: Config,
    experts: str,
    ffn_hidden_size: int,
    *,
    shared_ffn_hidden_size: int = 0,
    low: int = 1,
    weighted_in_fp32: bool = False,
    router_in_fp32: bool = False,
) -> FeedForward:
    """Read a mixture of experts; experts per token are at most the number of experts."""
    num_experts = config.size(experts, MAX_EXPERTS, low=low)
    per_token = config.size("num_experts_per_tok", MAX_EXPERTS)
    if num_experts and per_token > num_experts:
        raise config.wrong("num_experts_per_tok", per_token, f"at most {experts} = {num_experts:,}")
    return FeedForward(
        ffn_hidden_size,
        gated=True,
        activation=config.activation("hidden_act"),
        num_experts=num_experts,
        experts_per_token=per_token,
        shared_ffn_hidden_size=shared_ffn_hidden_size,
        weighted_in_fp32=weighted_in_fp32,
        router_in_fp32=router_in_fp32,
    )


def router(name: str, hidden_size: int, num_experts: int, *, bias: bool = False) -> Weights:
    """Return the router, replicated on every rank."""
    return part("router", *linear(name, hidden_size, num_experts, "replicate", bias=bias))


def routed_experts(
    hidden_size: int, feed_forward: FeedForward, *, transposed: bool = False, bias: bool = False
) -> Weights:
    """Return the gate-and-up and down projections of all experts, as three-dimensional tensors.

    transformers stores them as (experts, out, in), gpt-oss (``transposed``) as (experts, in, out).
    """
    experts, ffn = feed_forward.num_experts, feed_forward.ffn_hidden_size
    up, down = (2 * ffn, hidden_size), (hidden_size, ffn)
    # gate and up projection: concatenated, or (gpt-oss) interleaved
    parts = () if transposed else (ffn, ffn)
    if transposed:
        up, down = up[::-1], down[::-1]
    weights: Weights = (
        Weight(
            "mlp.experts.gate_up_proj",
            (experts, *up),
            "expert",
            "column",
            transposed=transposed,
            parts=parts,
        ),
        Weight("mlp.experts.down_proj", (experts, *down), "expert", "row", transposed=transposed),
    )
    if bias:
        weights += (
            Weight("mlp.experts.gate_up_proj_bias", (experts, 2 * ffn), "vector", "column"),
            Weight("mlp.experts.down_proj_bias", (experts, hidden_size), "vector", "replicate"),
        )
    return part("experts", *weights)


def router_and_experts(hidden_size: int, feed_forward: FeedForward) -> Weights:
    """Return the router and the routed experts under the names of most families."""
    return (
        *router("mlp.gate", hidden_size, feed_forward.num_experts),
        *routed_experts(hidden_size, feed_forward),
    )


def shared_expert(
    hidden_size: int, ffn_hidden_size: int, name: str, *, bias: bool = False
) -> Weights:
    """Return an expert that processes every token."""
    weights = gated_mlp(hidden_size, ffn_hidden_size, name=name, bias=bias)
    return tuple(replace(weight, part="shared_experts") for weight in weights)


def moe_layer(
    sizes: TransformerSizes,
    feed_forward: FeedForward,
    mlp: Weights,
    style: Style,
    window: int | None,
    sinks: bool = False,
) -> LayerKind:
    """Build one layer of ordinary attention and the tensors ``mlp`` of a mixture of experts."""
    attention = ordinary_attention(
        sizes,
        window=window,
        qk_norm=style.qk_norm,
        sinks=sinks,
        softmax_in_fp32=not sinks,  # gpt-oss
    )
    sink = Weight("self_attn.sinks", (sizes.num_heads,), "vector", "column")
    return LayerKind(
        name="moe" if window is None else f"moe_{SLIDING}",
        attention=attention,
        feed_forward=feed_forward,
        norm="rms_in_fp32" if sinks else "rms",  # gpt-oss
        num_norms=2,
        weights=(
            *attention_weights(
                sizes.hidden_size, attention, bias=style.bias, output_bias=style.output_bias
            ),
            *(qk_norms(attention, style.qk_norm) if style.qk_norm else ()),
            *(part("attention", sink) if sinks else ()),
            *mlp,
            *rms_norms(sizes.hidden_size, *PRE_NORMS),
        ),
    )


def mixtral(config: Config) -> ModelSpec:
    """Mixtral (Jiang et al., arXiv:2401.04088)."""
    sizes = read_sizes(config)
    check_rotary(config, sizes.head_dim)
    feed_forward = read_experts(
        config, "num_local_experts", ffn_size(config), weighted_in_fp32=True
    )
    mlp = router_and_experts(sizes.hidden_size, feed_forward)
    window = config.optional_size("sliding_window", MAX_POSITIONS)
    kind = moe_layer(sizes, feed_forward, mlp, Style(), window)
    return causal_lm(config, sizes, (kind,))


def olmoe(config: Config) -> ModelSpec:
    """OLMoE (Muennighoff et al., arXiv:2409.02060): norms of q and k over all heads."""
    sizes = read_sizes(config, head_dim=None)
    check_rotary(config, sizes.head_dim)
    feed_forward = read_experts(config, "num_experts", ffn_size(config))
    mlp = router_and_experts(sizes.hidden_size, feed_forward)
    bias = config.flag("attention_bias")
    style = Style(bias=bias, output_bias=bias, qk_norm="all")
    kind = moe_layer(sizes, feed_forward, mlp, style, None)
    return causal_lm(config, sizes, (kind,))


def gpt_oss(config: Config) -> ModelSpec:
    """gpt-oss (OpenAI, arXiv:2508.10925): biases everywhere, a learned sink per head."""
    sizes = read_sizes(config)
    check_rotary(config, sizes.head_dim)
    feed_forward = read_experts(config, "num_local_experts", ffn_size(config))
    bias = config.flag("attention_bias")
    mlp = (
        *router("mlp.router", sizes.hidden_size, feed_forward.num_experts, bias=True),
        *routed_experts(sizes.hidden_size, feed_forward, transposed=True, bias=True),
    )
    style = Style(bias=bias, output_bias=bias)
    types = [FULL if i % 2 else SLIDING for i in range(sizes.num_layers)]
    window = config.optional_size("sliding_window", MAX_POSITIONS)
    feed_forward = replace(feed_forward, activation="clamped_swiglu")
    kinds, pattern = stack(
        windows_by_type(config, types, window=window),
        lambda layer_window: moe_layer(sizes, feed_forward, mlp, style, layer_window, sinks=True),
    )
    return causal_lm(config, sizes, kinds, pattern)
