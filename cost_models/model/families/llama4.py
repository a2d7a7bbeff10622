"""Llama 4: attention in chunks, layers without rotary positions, mixtures between dense layers.

Three of four layers rotate positions and attend within chunks; the fourth sees the whole sequence
without positions. One shared expert is added to the routed ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from cost_models.model.families.blocks import (
    TransformerSizes,
    Weights,
    check_rotary,
    ffn_size,
    ordinary_attention,
    read_sizes,
    stack,
    text_model,
)
from cost_models.model.families.llama_like import (
    FULL,
    PRE_NORMS,
    attention_weights,
    causal_lm,
    gated_mlp,
    rms_norms,
)
from cost_models.model.families.moe import read_experts, routed_experts, router, shared_expert
from cost_models.model.families.reader import (
    MAX_FFN,
    MAX_LAYERS,
    MAX_POSITIONS,
    Config,
    decoder_defaults,
    whole,
)
from cost_models.model.spec import FeedForward, LayerKind, ModelSpec

CHUNKED: Final = "chunked_attention"
LLAMA4 = decoder_defaults(
    (202048, 5120, 8192, 48, 40, 8, 131072),
    synonyms={"num_local_experts": ("num_experts",)},
    intermediate_size_mlp=16384,
    head_dim=128,
    attention_bias=False,
    num_experts_per_tok=1,
    num_local_experts=16,
    use_qk_norm=True,
    attention_chunk_size=8192,
)
_ASSUMED: Final = (
    "routed experts are priced for the tokens that are sent to them; transformers' own module "
    "computes every expert for every token"
)


def llama4_text(config: Config) -> ModelSpec:
    """Llama 4 Scout and Maverick (ai.meta.com/blog/llama-4-multimodal-intelligence), text model."""
    sizes = read_sizes(config)
    check_rotary(config, sizes.head_dim)
    sparse = read_experts(config, "num_local_experts", ffn_size(config))
    sparse = replace(sparse, shared_ffn_hidden_size=sparse.ffn_hidden_size)
    dense = FeedForward(
        config.size("intermediate_size_mlp", MAX_FFN), gated=True, activation=sparse.activation
    )
    chunk = config.optional_size("attention_chunk_size", MAX_POSITIONS)
    bias, normed = config.flag("attention_bias"), config.flag("use_qk_norm")

    def build(key: tuple[bool, bool, bool]) -> LayerKind:
        is_sparse, rotates, in_chunks = key
        attention = ordinary_attention(
            sizes,
            window=chunk if in_chunks else None,
            chunked=in_chunks and chunk is not None,
            rotary=rotates,
            qk_norm="head" if normed and rotates else "",  # without a weight
        )
        return LayerKind(
            name=f"{'moe' if is_sparse else 'dense'}_{'chunked' if in_chunks else 'full'}",
            attention=attention,
            feed_forward=sparse if is_sparse else dense,
            norm="rms",
            num_norms=2,
            weights=(
                *attention_weights(sizes.hidden_size, attention, bias=bias, output_bias=bias),
                *_feed_forward(sizes, sparse if is_sparse else dense),
                *rms_norms(sizes.hidden_size, *PRE_NORMS),
            ),
        )

    kinds, pattern = stack(_layers(config, sizes.num_layers), build)
    return causal_lm(config, sizes, kinds, pattern, assumptions=(_ASSUMED,))


def _layers(config: Config, num_layers: int) -> list[tuple[bool, bool, bool]]:
    """Return of each layer whether it is a mixture, rotates positions, and attends in chunks."""
    step = config.read("interleave_moe_layer_step", whole(1, MAX_LAYERS), 1)
    listed = config.has("moe_layers")
    sparse = config.whole_numbers("moe_layers", MAX_LAYERS) if listed else ()
    every = config.read("no_rope_layer_interval", whole(1, MAX_LAYERS), 4)
    rotates = config.whole_numbers("no_rope_layers", 1) or [
        int((layer + 1) % every != 0) for layer in range(num_layers)
    ]
    if len(rotates) != num_layers:
        raise config.wrong("no_rope_layers", rotates, f"{num_layers:,} of 0 and 1, one a layer")
    types = config.layer_types(num_layers, (FULL, CHUNKED))
    return [
        (
            layer in sparse if listed else (layer + 1) % step == 0,
            bool(rotates[layer]),
            types[layer] == CHUNKED if types else bool(rotates[layer]),
        )
        for layer in range(num_layers)
    ]


def _feed_forward(sizes: TransformerSizes, feed_forward: FeedForward) -> Weights:
    """Return the tensors of a dense MLP, or of router, routed experts and shared expert."""
    hidden_size, width = sizes.hidden_size, feed_forward.ffn_hidden_size
    if not feed_forward.num_experts:
        return gated_mlp(hidden_size, width, name="feed_forward")
    experts = routed_experts(hidden_size, feed_forward, transposed=True)
    return (
        *(_renamed(weight, width) for weight in experts),
        *router("feed_forward.router", hidden_size, feed_forward.num_experts),
        *shared_expert(hidden_size, width, "feed_forward.shared_expert"),
    )


def _renamed(weight: Any, width: int) -> Any:
    """Return a tensor of the experts under Llama 4's name; gate and up are concatenated."""
    name = weight.name.replace("mlp.", "feed_forward.", 1)
    parts = (width, width) if "gate_up" in name else weight.parts
    return replace(weight, name=name, parts=parts)


def llama4(config: Config) -> ModelSpec:
    """Llama 4 with vision: the text model only, as ``llama4_text``."""
    return text_model(config, "llama4_text", LLAMA4, llama4_text)
