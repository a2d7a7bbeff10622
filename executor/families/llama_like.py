"""Decoders with rotary positions and a gated MLP: llama and its kin."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from executor.families.description import Family
from executor.families.mlp import gated
from executor.families.self_attention import SelfAttention, norm_each_head, separate

ATTENTION: Final = SelfAttention(separate("q_proj", "k_proj", "v_proj"), "o_proj")
LLAMA: Final = Family(
    tokens="model.embed_tokens",
    layers="model.layers",
    norm="model.norm",
    attention=ATTENTION,
    feed_forward=gated("gate_proj", "up_proj", "down_proj"),
    rotary="model.rotary_emb",
)
QWEN3: Final = replace(LLAMA, attention=replace(ATTENTION, norm_heads=norm_each_head))
