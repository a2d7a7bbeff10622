"""Gemma 1 to 3: norms that multiply with 1 + w, a scaled embedding, capped scores and logits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from executor.model.families.description import ResidualBlock
from executor.model.families.llama_like import ATTENTION, LLAMA
from executor.model.families.self_attention import norm_each_head

GEMMA: Final = replace(
    LLAMA, embedding_multiplier=lambda config: math.sqrt(config.hidden_size), initial_norm=0.0
)
GEMMA2: Final = replace(
    GEMMA,
    attention_block=ResidualBlock("self_attn", "input_layernorm", "post_attention_layernorm"),
    feed_forward_block=ResidualBlock(
        "mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
)


def _table(layer: Any) -> str:
    """Return the rotary table: layers with a window use other frequencies."""
    return "full_attention" if layer.self_attn.sliding_window is None else "sliding_attention"


GEMMA3: Final = replace(
    GEMMA2, attention=replace(ATTENTION, norm_heads=norm_each_head()), rotary_table=_table
)
