"""GPT-like decoders: layer norms, biases and an MLP without gate."""

from __future__ import annotations

from typing import Final

from executor.model.families.description import Family, ResidualBlock
from executor.model.families.mlp import ungated
from executor.model.families.self_attention import SelfAttention, fused, fused_by_head, separate

GPT2: Final = Family(
    tokens="transformer.wte",
    layers="transformer.h",
    norm="transformer.ln_f",
    attention=SelfAttention(fused("c_attn"), "c_proj"),
    feed_forward=ungated("c_fc", "c_proj"),
    attention_block=ResidualBlock("attn", "ln_1"),
    feed_forward_block=ResidualBlock("mlp", "ln_2"),
    positions="transformer.wpe",
    softmax_in_fp32=False,
    scaled_down_weights=("c_proj.weight",),  # GPT-2 paper, sec. 2.3
)
GPT_NEOX: Final = Family(
    tokens="gpt_neox.embed_in",
    layers="gpt_neox.layers",
    norm="gpt_neox.final_layer_norm",
    attention=SelfAttention(fused_by_head("query_key_value"), "dense"),
    feed_forward=ungated("dense_h_to_4h", "dense_4h_to_h"),
    attention_block=ResidualBlock("attention", "input_layernorm"),
    rotary="gpt_neox.rotary_emb",
)
OPT: Final = Family(
    tokens="model.decoder.embed_tokens",
    layers="model.decoder.layers",
    norm="model.decoder.final_layer_norm",
    attention=SelfAttention(separate("q_proj", "k_proj", "v_proj"), "out_proj"),
    feed_forward=ungated("fc1", "fc2", "activation_fn"),
    attention_block=ResidualBlock("self_attn", "self_attn_layer_norm"),
    feed_forward_block=ResidualBlock("", "final_layer_norm"),
    positions="model.decoder.embed_positions",
    position_offset=2,
)
