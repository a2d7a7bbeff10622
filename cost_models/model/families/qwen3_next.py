"""Qwen3-Next and Qwen3.5: gated delta rule, and gated attention in every fourth layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cost_models.model.families.blocks import (
    TransformerSizes,
    Weights,
    ffn_size,
    linear,
    norm,
    ordinary_attention,
    part,
    read_feed_forward,
    read_sizes,
    rotary_dim,
    stack,
    text_model,
)
from cost_models.model.families.llama_like import (
    FULL,
    PRE_NORMS,
    attention_weights,
    causal_lm,
    gated_mlp,
    qk_norms,
    rms_norms,
)
from cost_models.model.families.qwen_moe import (
    gated_shared_mixture,
    read_shared_mixture,
    sparse_layers,
)
from cost_models.model.families.reader import (
    MAX_HEADS,
    MAX_LAYERS,
    Config,
    Defaults,
    decoder_defaults,
    whole,
)
from cost_models.model.spec import Attention, DeltaRule, FeedForward, LayerKind, ModelSpec, Weight

LINEAR: Final = "linear_attention"
MAX_CONV: Final = 1_000  # tokens of the convolution
ROTATED: Final = 0.25  # share of a head, where the config does not give it
QWEN3_NEXT = decoder_defaults(
    (151936, 2048, 5632, 48, 16, 2, 32768),
    head_dim=256,
    attention_bias=False,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    decoder_sparse_step=1,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    num_experts_per_tok=10,
    num_experts=512,
    mlp_only_layers=(),
)
_QWEN3_5 = {
    **QWEN3_NEXT.values,
    "vocab_size": 248320,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "hidden_size": 4096,
    "intermediate_size": 12288,
}
_EXPERTS: Final = (
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts_per_tok",
    "num_experts",
)
_SPARSITY: Final = ("decoder_sparse_step", "mlp_only_layers")
QWEN3_5 = Defaults({k: v for k, v in _QWEN3_5.items() if k not in (*_EXPERTS, *_SPARSITY)})
QWEN3_5_MOE = Defaults(
    {
        **{k: v for k, v in _QWEN3_5.items() if k not in ("intermediate_size", *_SPARSITY)},
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "hidden_size": 2048,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    }
)
_WITHOUT_PREDICTION: Final = "multi-token prediction layers are left out, as in transformers"


def qwen3_next(config: Config) -> ModelSpec:
    """Qwen3-Next (qwen.ai/blog, September 2025): Gated DeltaNet (arXiv:2412.06464) and mixtures."""
    sparse = read_shared_mixture(config)
    with_experts = sparse_layers(config, read_sizes(config).num_layers, sparse.num_experts)
    dense = FeedForward(ffn_size(config), gated=True, activation=sparse.activation)
    return _hybrid(config, dense, sparse, with_experts, _fused_projections)


def qwen3_5_text(config: Config) -> ModelSpec:
    """Qwen3.5 0.8B to 27B (transformers: modeling_qwen3_5.py): dense, projections of their own."""
    dense = read_feed_forward(config, gated=True)
    return _hybrid(config, dense, dense, set(), _separate_projections)


def qwen3_5_moe_text(config: Config) -> ModelSpec:
    """Qwen3.5-35B-A3B to 397B-A17B (modeling_qwen3_5_moe.py): a mixture in every layer."""
    sparse = read_shared_mixture(config)
    with_experts = set(range(read_sizes(config).num_layers)) if sparse.num_experts else set()
    return _hybrid(config, sparse, sparse, with_experts, _separate_projections)


def qwen3_5(config: Config) -> ModelSpec:
    """Qwen3.5 with vision: the text model only, as ``qwen3_5_text``."""
    return text_model(config, "qwen3_5_text", QWEN3_5, qwen3_5_text)


def qwen3_5_moe(config: Config) -> ModelSpec:
    """Qwen3.5's mixtures with vision: the text model only, as ``qwen3_5_moe_text``."""
    return text_model(config, "qwen3_5_moe_text", QWEN3_5_MOE, qwen3_5_moe_text)


def _hybrid(
    config: Config,
    dense: FeedForward,
    sparse: FeedForward,
    with_experts: set[int],
    projections: Callable[[int, Attention], Weights],
) -> ModelSpec:
    """Build a decoder of linear and full attention; ``projections``: the inputs of the former."""
    sizes = read_sizes(config)
    rotated = rotary_dim(config, sizes.head_dim, ROTATED)
    linear_attention = _linear_attention(config)
    full = ordinary_attention(sizes, qk_norm="head", rotary_dim=rotated, gated=True)
    bias, hidden_size = config.flag("attention_bias"), sizes.hidden_size

    def build(key: tuple[bool, bool]) -> LayerKind:
        is_sparse, is_linear = key
        mixer = (
            _delta_net_weights(hidden_size, linear_attention, projections)
            if is_linear
            else _gated_attention_weights(hidden_size, full, bias=bias)
        )
        mlp = (
            gated_shared_mixture(hidden_size, sparse)
            if is_sparse
            else gated_mlp(hidden_size, dense.ffn_hidden_size)
        )
        return LayerKind(
            name=f"{'moe' if is_sparse else 'dense'}_{'linear' if is_linear else 'full'}",
            attention=linear_attention if is_linear else full,
            feed_forward=sparse if is_sparse else dense,
            norm="rms_in_fp32",
            num_norms=2,
            weights=(*mixer, *mlp, *rms_norms(hidden_size, *PRE_NORMS)),
        )

    keys = [(i in with_experts, kind == LINEAR) for i, kind in enumerate(_types(config, sizes))]
    kinds, pattern = stack(keys, build)
    return causal_lm(config, sizes, kinds, pattern, assumptions=(_WITHOUT_PREDICTION,))


def _types(config: Config, sizes: TransformerSizes) -> list[str]:
    """Return the kind of attention of each layer: full in every n-th, linear elsewhere."""
    every = config.read("full_attention_interval", whole(1, MAX_LAYERS), 4)
    given = config.layer_types(sizes.num_layers, (FULL, LINEAR))
    return given or [FULL if (i + 1) % every == 0 else LINEAR for i in range(sizes.num_layers)]


def _linear_attention(config: Config) -> Attention:
    """Read the sizes of linear attention."""
    values = config.size("linear_num_value_heads", MAX_HEADS)
    keys = config.size("linear_num_key_heads", MAX_HEADS)
    config.must_divide("linear_num_key_heads", keys, "linear_num_value_heads", values)
    return Attention(
        num_heads=values,
        num_kv_heads=keys,
        head_dim=config.size("linear_key_head_dim"),
        value_head_dim=config.size("linear_value_head_dim"),
        rotary=False,
        delta_rule=DeltaRule(config.size("linear_conv_kernel_dim", MAX_CONV)),
    )


def _gated_attention_weights(hidden_size: int, attention: Attention, *, bias: bool) -> Weights:
    """Return q, k, v and o projections and norms; q also computes a gate for every output."""
    query = 2 * attention.num_heads * attention.head_dim
    ordinary = attention_weights(hidden_size, attention, bias=bias, output_bias=bias)
    return (
        *part("attention", *linear("self_attn.q_proj", hidden_size, query, "column", bias=bias)),
        *(weight for weight in ordinary if ".q_proj." not in weight.name),
        *qk_norms(attention, "head"),
    )


def _channels(attention: Attention) -> tuple[int, int]:
    """Return the channels of all keys (as many as of all queries), and of all values."""
    return (
        attention.num_kv_heads * attention.head_dim,
        attention.num_heads * attention.value_head_dim,
    )


def _fused_projections(hidden_size: int, attention: Attention) -> Weights:
    """Return one matrix of queries, keys, values and gates, one of learning rates and decays.

    The rows of one key head are neighbours.
    """
    keys, values = _channels(attention)
    return (
        *linear("linear_attn.in_proj_qkvz", hidden_size, 2 * keys + 2 * values, "column"),
        *linear("linear_attn.in_proj_ba", hidden_size, 2 * attention.num_heads, "column"),
    )


def _separate_projections(hidden_size: int, attention: Attention) -> Weights:
    """Return the matrices of queries, keys and values, of gates, learning rates and decays."""
    keys, values = _channels(attention)
    return (
        *linear("linear_attn.in_proj_qkv", hidden_size, 2 * keys + values, "column"),
        *linear("linear_attn.in_proj_z", hidden_size, values, "column"),
        *linear("linear_attn.in_proj_b", hidden_size, attention.num_heads, "column"),
        *linear("linear_attn.in_proj_a", hidden_size, attention.num_heads, "column"),
    )


def _delta_net_weights(
    hidden_size: int, attention: Attention, projections: Callable[[int, Attention], Weights]
) -> Weights:
    """Return the tensors of linear attention."""
    keys, values = _channels(attention)
    kernel = attention.delta_rule.conv_kernel if attention.delta_rule else 0
    name = "linear_attn"
    return part(
        "attention",
        Weight(f"{name}.dt_bias", (attention.num_heads,), "vector", "column"),
        Weight(f"{name}.A_log", (attention.num_heads,), "vector", "heads"),
        Weight(
            f"{name}.conv1d.weight",
            (attention.conv_channels, 1, kernel),
            "vector",
            "heads",
            parts=(keys, keys, values),
        ),
        *projections(hidden_size, attention),
        *norm(f"{name}.norm", attention.value_head_dim),
        *linear(f"{name}.out_proj", values, hidden_size, "row"),
    )
