"""Llama-like decoders: rotary positions and a gated MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from executor.model.families.description import Family, ResidualBlock
from executor.model.families.mlp import fused_gated, gated, ungated
from executor.model.families.self_attention import (
    SelfAttention,
    fused,
    norm_all_heads,
    norm_each_head,
    rotate_pairs,
    rotate_pairs_in_fp32,
    separate,
)

ATTENTION: Final = SelfAttention(separate("q_proj", "k_proj", "v_proj"), "o_proj")
LLAMA: Final = Family(
    tokens="model.embed_tokens",
    layers="model.layers",
    norm="model.norm",
    attention=ATTENTION,
    feed_forward=gated("gate_proj", "up_proj", "down_proj"),
    rotary="model.rotary_emb",
)
QWEN3: Final = replace(LLAMA, attention=replace(ATTENTION, norm_heads=norm_each_head()))
OLMO2: Final = replace(
    LLAMA,
    attention=replace(ATTENTION, norm_heads=norm_all_heads),
    attention_block=ResidualBlock("self_attn", None, "post_attention_layernorm"),
    feed_forward_block=ResidualBlock("mlp", None, "post_feedforward_layernorm"),
)
PHI: Final = replace(
    LLAMA,
    norm="model.final_layernorm",
    attention=SelfAttention(
        separate("q_proj", "k_proj", "v_proj"),
        "dense",
        norm_each_head("q_layernorm", "k_layernorm"),
    ),
    feed_forward=ungated("fc1", "fc2", "activation_fn"),
    feed_forward_block=ResidualBlock("mlp", None),
)
PHI3: Final = replace(
    LLAMA,
    attention=SelfAttention(fused("qkv_proj"), "o_proj"),
    feed_forward=fused_gated,
)
STARCODER2: Final = replace(LLAMA, feed_forward=ungated("c_fc", "c_proj"))


GRANITE: Final = replace(
    LLAMA,
    embedding_multiplier=lambda config: float(config.embedding_multiplier),
    logits_multiplier=lambda config: 1.0 / float(config.logits_scaling),
)
GLM4: Final = replace(
    LLAMA,
    attention=replace(ATTENTION, rotate=rotate_pairs),
    feed_forward=fused_gated,
    attention_block=ResidualBlock("self_attn", "input_layernorm", "post_self_attn_layernorm"),
    feed_forward_block=ResidualBlock("mlp", "post_attention_layernorm", "post_mlp_layernorm"),
)
SMOLLM3: Final = replace(LLAMA, rotary_table=lambda layer: "" if layer.self_attn.use_rope else None)
COHERE: Final = replace(
    LLAMA,
    attention=replace(ATTENTION, norm_heads=norm_each_head(), rotate=rotate_pairs_in_fp32),
    feed_forward_block=ResidualBlock("mlp", None),
    logits_multiplier=lambda config: float(config.logit_scale),
)
