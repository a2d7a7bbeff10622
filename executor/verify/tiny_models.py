"""Tiny models for verification, one of every family."""

from __future__ import annotations

from typing import Any, Final, cast

from cost_models.model.families import model_spec
from cost_models.model.lora import adapted
from cost_models.plan.plan import Plan, split_layers
from cost_models.plan.workload import Workload
from cost_models.plan_file import PlanFile
from hardware_profiles.cluster.parse import parse_cluster

SEQ_LEN: Final = 16
_LLAMA: Final = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "llama": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "mistral": {**_LLAMA, "sliding_window": 5},
    "qwen2": {**_LLAMA, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    "qwen3": {**_LLAMA, "head_dim": 16},
    "phi": {**_LLAMA, "qk_layernorm": True},
    "phi3": {**_LLAMA, "pad_token_id": 0, "sliding_window": 6},
    "olmo2": {**_LLAMA},
    "granite": {
        **_LLAMA,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.125,
    },
    "glm4": {**_LLAMA, "head_dim": 16, "pad_token_id": 0},
    "gpt_neox": {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"},
    "starcoder2": {**_LLAMA, "sliding_window": 6},
    "smollm3": {**_LLAMA, "pad_token_id": 0, "no_rope_layer_interval": 2},
    "gemma": {**_LLAMA, "head_dim": 16},
    "gemma2": {**_LLAMA, "head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 0.5},
    "gemma3_text": {**_LLAMA, "head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 2},
    "cohere": {**_LLAMA, "use_qk_norm": True},
    "mixtral": {**_LLAMA, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 5},
    "qwen2_moe": {
        **_LLAMA,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 2,
    },
    "qwen3_moe": {
        **_LLAMA,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "qwen3_next": {
        **_LLAMA,
        "head_dim": 16,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "full_attention_interval": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "mlp_only_layers": [0],
    },
    "olmoe": {**_LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48},
    "gpt_oss": {
        **_LLAMA,
        "head_dim": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
    },
    "deepseek_v3": {
        **_LLAMA,
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "bert": {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"},
    "opt": {
        "vocab_size": 128,
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 96,
        "num_attention_heads": 8,
        "max_position_embeddings": 64,
    },
    "gpt2": {"vocab_size": 128, "n_embd": 64, "n_head": 8, "n_positions": 32},
    "t5": {
        "vocab_size": 128,
        "d_model": 64,
        "d_kv": 8,
        "d_ff": 96,
        "num_heads": 8,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
        "decoder_start_token_id": 0,
    },
}
KERNELS: Final = {"qwen3_next": "eager"}  # of families that are trained with no other
_LAYERS: Final = {"gpt2": "n_layer", "t5": "num_layers"}  # T5: of the encoder and of the decoder
_TIED: Final = ("bert", "t5")  # which are trained no other way


def tiny(
    plan: Plan,
    family: str = "llama",
    *,
    tied: bool = False,
    num_layers: int = 4,
    layer_ranges: tuple[tuple[int, int], ...] | None = None,
    stage_recompute_layers: tuple[int, ...] | None = None,
    precision: str = "fp64",
    optimizer: str = "sgd",
    attention_kernel: str = "",
    lora: int = 0,
    qlora: int = 0,
    adapter_targets: str = "all",
    freeze: str = "",
    target_seq_len: int = 0,
    **config: Any,
) -> PlanFile:
    """Return a plan file for a tiny model."""
    layers = _LAYERS.get(family, "num_hidden_layers")
    tied = tied or family in _TIED
    values = {"model_type": family, **CONFIGS[family], "tie_word_embeddings": tied}
    values |= {layers: num_layers, **config}
    workload = Workload(
        seq_len=SEQ_LEN,
        global_batch_size=plan.global_batch_size,
        precision=cast(Any, precision),
        optimizer=cast(Any, optimizer),
        attention_kernel=cast(Any, attention_kernel or KERNELS.get(family, "flash")),
        adapter="lora" if lora else "qlora" if qlora else "none",
        adapter_rank=lora or qlora,
        adapter_alpha=2.0 * (lora or qlora),
        adapter_targets=cast(Any, adapter_targets),
        freeze=freeze,
        target_seq_len=target_seq_len,
    )
    model = adapted(model_spec(values, name=f"tiny {family}", where="test"), workload)
    return PlanFile(
        model=model,
        cluster=parse_cluster("8xA100-80GB"),  # any: the executor takes the machine as it is
        workload=workload,
        plan=plan,
        layer_ranges=layer_ranges or split_layers(model.num_layers, plan.num_stages),
        stage_recompute_layers=stage_recompute_layers,
    )
