"""Qwen's mixtures of experts: dense layers between sparse ones, a shared expert in Qwen2."""

from __future__ import annotations

from cost_models.model.families.blocks import (
    TransformerSizes,
    Weights,
    check_rotary,
    ffn_size,
    linear,
    part,
    read_sizes,
    stack,
)
from cost_models.model.families.llama_like import (
    FULL,
    SLIDING,
    Style,
    causal_lm,
    dense_layer,
    switched_window,
    windows_by_type,
)
from cost_models.model.families.moe import (
    moe_layer,
    read_experts,
    router_and_experts,
    shared_expert,
)
from cost_models.model.families.reader import MAX_FFN, MAX_LAYERS, Config, decoder_defaults
from cost_models.model.spec import FeedForward, LayerKind, ModelSpec

QWEN2_MOE = decoder_defaults(
    (151936, 2048, 5632, 24, 16, 16, 32768),
    use_sliding_window=False,
    sliding_window=4096,
    max_window_layers=28,
    decoder_sparse_step=1,
    moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632,
    num_experts_per_tok=4,
    num_experts=60,
    mlp_only_layers=(),
    qkv_bias=True,
)
QWEN3_MOE = decoder_defaults(
    (151936, 2048, 6144, 24, 32, 4, 32768),
    synonyms={"num_experts": ("num_local_experts",)},
    attention_bias=False,
    use_sliding_window=False,
    sliding_window=4096,
    decoder_sparse_step=1,
    moe_intermediate_size=768,
    num_experts_per_tok=8,
    num_experts=128,
    mlp_only_layers=(),
)


def read_shared_mixture(config: Config) -> FeedForward:
    """Read the sizes of routed experts and of the shared one."""
    shared = config.size("shared_expert_intermediate_size", MAX_FFN)
    return read_experts(
        config,
        "num_experts",
        config.size("moe_intermediate_size", MAX_FFN),
        shared_ffn_hidden_size=shared,
        low=0,
    )


def qwen2_moe(config: Config) -> ModelSpec:
    """Qwen1.5-MoE and Qwen2-57B-A14B (arXiv:2407.10671): a gated shared expert in each mixture."""
    sizes = read_sizes(config)
    feed_forward = read_shared_mixture(config)
    hidden_size = sizes.hidden_size
    mlp = gated_shared_mixture(hidden_size, feed_forward)
    first_full = config.index("max_window_layers", MAX_LAYERS)
    types = [FULL if i % 2 or i >= first_full else SLIDING for i in range(sizes.num_layers)]
    windows = windows_by_type(config, types, window=switched_window(config))
    return _mixed(config, sizes, feed_forward, mlp, Style(bias=config.flag("qkv_bias")), windows)


def qwen3_moe(config: Config) -> ModelSpec:
    """Qwen3-30B-A3B and Qwen3-235B-A22B (arXiv:2505.09388)."""
    sizes = read_sizes(config)
    feed_forward = read_experts(
        config, "num_experts", config.size("moe_intermediate_size", MAX_FFN), low=0
    )
    mlp = router_and_experts(sizes.hidden_size, feed_forward)
    bias = config.flag("attention_bias")
    style = Style(bias=bias, output_bias=bias, qk_norm="head")
    windows = [switched_window(config)] * sizes.num_layers
    return _mixed(config, sizes, feed_forward, mlp, style, windows)


def gated_shared_mixture(hidden_size: int, feed_forward: FeedForward) -> Weights:
    """Return router, routed experts, and a shared expert with a gate of one feature."""
    return (
        *router_and_experts(hidden_size, feed_forward),
        *shared_expert(hidden_size, feed_forward.shared_ffn_hidden_size, "mlp.shared_expert"),
        *part("shared_experts", *linear("mlp.shared_expert_gate", hidden_size, 1, "replicate")),
    )


def _mixed(
    config: Config,
    sizes: TransformerSizes,
    feed_forward: FeedForward,
    mlp: Weights,
    style: Style,
    windows: list[int | None],
) -> ModelSpec:
    """Build a decoder with a mixture in every n-th layer and dense MLPs elsewhere."""
    check_rotary(config, sizes.head_dim)
    dense = FeedForward(ffn_size(config), gated=True, activation=feed_forward.activation)
    sparse = sparse_layers(config, sizes.num_layers, feed_forward.num_experts)

    def build(key: tuple[bool, int | None]) -> LayerKind:
        is_sparse, window = key
        if is_sparse:
            return moe_layer(sizes, feed_forward, mlp, style, window)
        return dense_layer(sizes, dense, style, window)

    keys = [(i in sparse, window) for i, window in enumerate(windows)]
    return causal_lm(config, sizes, *stack(keys, build))


def sparse_layers(config: Config, num_layers: int, num_experts: int) -> set[int]:
    """Return the layers with experts: every ``decoder_sparse_step``-th except the listed ones."""
    step = config.size("decoder_sparse_step", MAX_LAYERS)
    excepted = config.whole_numbers("mlp_only_layers", MAX_LAYERS)
    if not num_experts:
        return set()
    return {i for i in range(num_layers) if (i + 1) % step == 0} - set(excepted)
