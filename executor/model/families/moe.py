"""Decoders with mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from executor.model.families.experts import by_kind, clamped_experts, gated_experts, sparse
from executor.model.families.latent_attention import latent_attention
from executor.model.families.llama_like import ATTENTION, LLAMA, QWEN3
from executor.model.families.self_attention import norm_all_heads, turn_half_tables

MIXTRAL: Final = replace(LLAMA, feed_forward=sparse(), experts=gated_experts)
QWEN2_MOE: Final = replace(
    LLAMA,
    feed_forward=by_kind(
        LLAMA.feed_forward, sparse(shared="shared_expert", shared_gate="shared_expert_gate")
    ),
    experts=gated_experts,
)
QWEN3_MOE: Final = replace(
    QWEN3, feed_forward=by_kind(LLAMA.feed_forward, sparse()), experts=gated_experts
)
OLMOE: Final = replace(MIXTRAL, attention=replace(ATTENTION, norm_heads=norm_all_heads))
GPT_OSS: Final = replace(
    LLAMA,
    attention=replace(ATTENTION, rotate=turn_half_tables, sinks="sinks"),
    feed_forward=sparse("router"),
    experts=clamped_experts,
    softmax_in_fp32=False,
)
DEEPSEEK: Final = replace(
    LLAMA,
    attention=latent_attention,
    feed_forward=by_kind(LLAMA.feed_forward, sparse(shared="shared_experts")),
    experts=gated_experts,
    expert_buffer="mlp.gate.e_score_correction_bias",
)
