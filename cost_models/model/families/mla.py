"""Multi-head latent attention and shared experts: DeepSeek-V2 and V3."""

from __future__ import annotations

from dataclasses import replace

from cost_models.model.families.blocks import (
    TransformerSizes,
    Weights,
    ffn_size,
    linear,
    norm,
    part,
    read_sizes,
    stack,
)
from cost_models.model.families.llama_like import PRE_NORMS, causal_lm, gated_mlp, rms_norms
from cost_models.model.families.moe import read_experts, routed_experts, router, shared_expert
from cost_models.model.families.reader import (
    MAX_EXPERTS,
    MAX_FFN,
    MAX_LAYERS,
    Config,
    decoder_defaults,
    whole,
)
from cost_models.model.spec import Attention, FeedForward, LayerKind, ModelSpec

DEEPSEEK_V2 = decoder_defaults(
    (102400, 4096, 11008, 32, 32, None, 2048),
    synonyms={"n_routed_experts": ("num_experts",)},
    attention_bias=False,
    mlp_bias=False,
    first_k_dense_replace=0,
    kv_lora_rank=512,
    q_lora_rank=1536,
    n_routed_experts=64,
    n_shared_experts=2,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    moe_intermediate_size=1407,
)
DEEPSEEK_V3 = decoder_defaults(
    (129280, 7168, 18432, 61, 128, 128, 4096),
    synonyms={"n_routed_experts": ("num_local_experts",)},
    moe_intermediate_size=2048,
    n_shared_experts=1,
    n_routed_experts=256,
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_rope_head_dim=64,
    v_head_dim=128,
    qk_nope_head_dim=128,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    first_k_dense_replace=3,
    attention_bias=False,
)


def deepseek_v2(config: Config) -> ModelSpec:
    """DeepSeek-V2 and V2-Lite (arXiv:2405.04434)."""
    return _deepseek(config, mlp_bias=config.flag("mlp_bias"))


def deepseek_v3(config: Config) -> ModelSpec:
    """DeepSeek-V3 and R1 (arXiv:2412.19437), without the multi-token prediction layer."""
    groups = config.size("n_group", MAX_EXPERTS)
    chosen = config.size("topk_group", MAX_EXPERTS)
    if chosen > groups:
        raise config.wrong("topk_group", chosen, f"at most n_group = {groups:,}")
    found = _deepseek(config, mlp_bias=False, groups=(groups, chosen), by_bias=True)
    return replace(found, assumptions=without_prediction(config))


def without_prediction(config: Config) -> tuple[str, ...]:
    """Return the assumption that layers which predict further tokens are not trained, if any."""
    if config.read("num_nextn_predict_layers", whole(0, MAX_LAYERS), 0):
        return ("multi-token prediction layers are left out, as in transformers",)
    return ()


def read_sparse(config: Config) -> FeedForward:
    """Read routed and shared experts of one width, weighted and routed in fp32."""
    width = config.size("moe_intermediate_size", MAX_FFN)
    return read_experts(
        config,
        "n_routed_experts",
        width,
        shared_ffn_hidden_size=width * config.size("n_shared_experts", MAX_EXPERTS),
        weighted_in_fp32=True,
        router_in_fp32=True,
    )


def _deepseek(
    config: Config, *, mlp_bias: bool, groups: tuple[int, int] = (1, 1), by_bias: bool = False
) -> ModelSpec:
    sizes = read_sizes(config, head_dim="qk_rope_head_dim")
    attention = _latent_attention(config, sizes.num_heads)
    sparse = replace(
        read_sparse(config),
        expert_groups=groups[0],
        groups_per_token=groups[1],
        balanced_by_bias=by_bias,
    )
    _only_every_layer(config)
    weights = _attention_weights(sizes.hidden_size, attention, bias=config.flag("attention_bias"))
    layers = dense_then_sparse(config, sizes, attention, weights, sparse, mlp_bias=mlp_bias)
    return causal_lm(config, sizes, *layers)


def dense_then_sparse(
    config: Config,
    sizes: TransformerSizes,
    attention: Attention,
    attention_weights: Weights,
    sparse: FeedForward,
    *,
    mlp_bias: bool = False,
) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """Return the layers: dense MLPs below ``first_k_dense_replace``, mixtures from there on."""
    dense = FeedForward(ffn_size(config), gated=True, activation=sparse.activation)
    first_sparse = config.index("first_k_dense_replace", MAX_LAYERS)

    def build(is_sparse: bool) -> LayerKind:
        hidden_size = sizes.hidden_size
        mlp = (
            mixture(hidden_size, sparse, mlp_bias=mlp_bias)
            if is_sparse
            else gated_mlp(hidden_size, dense.ffn_hidden_size, bias=mlp_bias)
        )
        return LayerKind(
            name="moe" if is_sparse else "dense",
            attention=attention,
            feed_forward=sparse if is_sparse else dense,
            norm="rms",
            num_norms=2,
            weights=(*attention_weights, *mlp, *rms_norms(hidden_size, *PRE_NORMS)),
        )

    return stack([i >= first_sparse for i in range(sizes.num_layers)], build)


def mixture(hidden_size: int, feed_forward: FeedForward, *, mlp_bias: bool = False) -> Weights:
    """Return routed experts, their router and the shared experts under DeepSeek's names."""
    return (
        *routed_experts(hidden_size, feed_forward),
        *router("mlp.gate", hidden_size, feed_forward.num_experts),
        *shared_expert(
            hidden_size, feed_forward.shared_ffn_hidden_size, "mlp.shared_experts", bias=mlp_bias
        ),
    )


def _only_every_layer(config: Config) -> None:
    """Raise for ``moe_layer_freq`` other than 1, which transformers does not build."""
    step = config.read("moe_layer_freq", whole(0, MAX_LAYERS), 1)
    if step != 1:
        raise config.wrong("moe_layer_freq", step, "1, as transformers builds the model")


def _latent_attention(config: Config, num_heads: int) -> Attention:
    """Read the sizes of DeepSeek-V2's attention (arXiv:2405.04434, sec. 2.1)."""
    rope = config.size("qk_rope_head_dim")
    if rope % 2:
        raise config.wrong("qk_rope_head_dim", rope, "even: rotary positions rotate pairs")
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=config.size("qk_nope_head_dim") + rope,
        value_head_dim=config.size("v_head_dim"),
        q_lora_rank=config.optional_size("q_lora_rank") or 0,
        kv_lora_rank=config.size("kv_lora_rank"),
        rope_head_dim=rope,
    )


def _attention_weights(hidden_size: int, attention: Attention, *, bias: bool) -> Weights:
    """Return down-projections to the latents (replicated), their norms, and up-projections."""
    heads, latent = attention.num_heads, attention.kv_lora_rank
    no_rope = attention.head_dim - attention.rope_head_dim
    return (
        *_query_weights(hidden_size, attention, bias=bias),
        *part(
            "attention",
            *linear(
                "self_attn.kv_a_proj_with_mqa",
                hidden_size,
                latent + attention.rope_head_dim,
                "replicate",
                bias=bias,
            ),
            *norm("self_attn.kv_a_layernorm", latent),
            *linear(
                "self_attn.kv_b_proj",
                latent,
                heads * (no_rope + attention.value_head_dim),
                "column",
            ),
            *linear(
                "self_attn.o_proj", heads * attention.value_head_dim, hidden_size, "row", bias=bias
            ),
        ),
    )


def _query_weights(hidden_size: int, attention: Attention, *, bias: bool) -> Weights:
    query, rank = attention.num_heads * attention.head_dim, attention.q_lora_rank
    if not rank:
        return part("attention", *linear("self_attn.q_proj", hidden_size, query, "column"))
    return part(
        "attention",
        *linear("self_attn.q_a_proj", hidden_size, rank, "replicate", bias=bias),
        *norm("self_attn.q_a_layernorm", rank),
        *linear("self_attn.q_b_proj", rank, query, "column"),
    )
