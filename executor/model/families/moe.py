"""Decoders with mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from executor.model.families.experts import (
    clamped_experts,
    dense_or_mixture,
    gated_experts,
    mixture_of_experts,
)
from executor.model.families.latent_attention import latent_attention
from executor.model.families.llama_like import ATTENTION, LLAMA, QWEN3
from executor.model.families.self_attention import norm_all_heads, rotate_with_half_tables

MIXTRAL: Final = replace(LLAMA, feed_forward=mixture_of_experts(), experts=gated_experts)
QWEN2_MOE: Final = replace(
    LLAMA,
    feed_forward=dense_or_mixture(
        LLAMA.feed_forward,
        mixture_of_experts(shared="shared_expert", shared_gate="shared_expert_gate"),
    ),
    experts=gated_experts,
)
QWEN3_MOE: Final = replace(
    QWEN3,
    feed_forward=dense_or_mixture(LLAMA.feed_forward, mixture_of_experts()),
    experts=gated_experts,
)
OLMOE: Final = replace(MIXTRAL, attention=replace(ATTENTION, norm_heads=norm_all_heads))
GPT_OSS: Final = replace(
    LLAMA,
    attention=replace(ATTENTION, rotate=rotate_with_half_tables, sinks="sinks"),
    feed_forward=mixture_of_experts("router"),
    experts=clamped_experts,
    softmax_in_fp32=False,
)
DEEPSEEK: Final = replace(
    LLAMA,
    attention=latent_attention,
    feed_forward=dense_or_mixture(LLAMA.feed_forward, mixture_of_experts(shared="shared_experts")),
    experts=gated_experts,
    expert_buffer="mlp.gate.e_score_correction_bias",
)
