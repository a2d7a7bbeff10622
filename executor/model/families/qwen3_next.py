"""Qwen3-Next: linear attention by the gated delta rule, and attention with a gated output.

The rule is that of transformers, written out in torch; a rank of tensor parallelism has some of the
key heads with their value heads, whose rows are neighbours in every matrix.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.compat import causal_convolution, gated_delta_rule
from executor.model.families.description import Layer, ResidualBlock, RotaryTables
from executor.model.families.linears import column_parallel, row_parallel
from executor.model.families.moe import QWEN2_MOE
from executor.model.families.self_attention import rotate_halves
from executor.ops.recompute import checkpointed


def attention(module: Any, layer: Layer, x: Tensor, rotary: RotaryTables | None) -> Tensor:
    """Attention of a layer of either kind; ``module``: the layer. (B, s, H) in and out."""
    if layer.kind.attention.delta_rule is not None:
        return _delta_net(module.linear_attn, layer, x)
    return _gated_attention(module.self_attn, layer, x, rotary)


def _gated_attention(module: Any, layer: Layer, x: Tensor, rotary: RotaryTables | None) -> Tensor:
    """Attention whose output is multiplied by the sigmoid of a gate, projected with the queries."""
    width = layer.kind.attention.head_dim
    both, key, value = column_parallel(layer.axis, x, module.q_proj, module.k_proj, module.v_proj)
    query, gate = both.unflatten(-1, (-1, 2 * width)).chunk(2, -1)
    query = module.q_norm(query)
    key = module.k_norm(key.unflatten(-1, (-1, width)))
    if rotary is not None:
        query, key = rotate_halves(query, key, rotary)
    output = layer.core(query, key, value.unflatten(-1, (-1, width)))
    return row_parallel(layer.axis, output * torch.sigmoid(gate.flatten(2)), module.o_proj)


def _delta_net(module: Any, layer: Layer, x: Tensor) -> Tensor:
    """Gated delta net (Yang et al., arXiv:2412.06464): projections, rule, norm and gate, output."""
    sizes = layer.kind.attention
    key_heads = sizes.num_kv_heads // layer.axis.size
    key = sizes.head_dim
    values = sizes.num_heads // sizes.num_kv_heads * sizes.value_head_dim  # of one key head
    mixed, rates = column_parallel(layer.axis, x, module.in_proj_qkvz, module.in_proj_ba)
    *heads, gate = mixed.unflatten(-1, (key_heads, -1)).split([key, key, values, values], -1)
    learning, decay = (
        part.flatten(2) for part in rates.unflatten(-1, (key_heads, -1)).chunk(2, -1)
    )
    joined = torch.cat([part.flatten(2) for part in heads], -1).transpose(1, 2)
    decay = -module.A_log.float().exp() * F.softplus(decay.float() + module.dt_bias)
    rule = partial(_convolve_and_apply, layer)
    if layer.core.recompute:
        rule = partial(checkpointed, rule, random=False)
    output = rule(module, joined, decay, learning.sigmoid())
    value = sizes.value_head_dim
    output = module.norm(output.reshape(-1, value), gate.reshape(-1, value))
    return row_parallel(layer.axis, output.view(*joined.shape[::2], -1), module.out_proj)


def _convolve_and_apply(
    layer: Layer, module: Any, joined: Tensor, decay: Tensor, learning: Tensor
) -> Tensor:
    """Convolve queries, keys and values (B, channels, S); return the rule's output (B, S, a, e)."""
    sizes = layer.kind.attention
    keys = sizes.num_kv_heads * sizes.head_dim // layer.axis.size
    values = sizes.num_heads * sizes.value_head_dim // layer.axis.size
    weight = module.conv1d.weight.squeeze(1)
    convolved = causal_convolution(joined, weight, None, activation=module.activation)
    query, key, value = convolved.transpose(1, 2).split([keys, keys, values], -1)
    output: Tensor = gated_delta_rule(
        query.unflatten(-1, (-1, sizes.head_dim)),
        key.unflatten(-1, (-1, sizes.head_dim)),
        value.unflatten(-1, (-1, sizes.value_head_dim)),
        g=decay,
        beta=learning,
        use_qk_l2norm_in_kernel=True,
    )[0]
    return output


QWEN3_NEXT: Final = replace(
    QWEN2_MOE,
    attention=attention,
    attention_block=ResidualBlock("", "input_layernorm"),
    rotary_table=lambda layer: "" if hasattr(layer, "self_attn") else None,
    initial_norm=0.0,
    initial_constants={"linear_attn.norm.weight": 1.0, "linear_attn.dt_bias": 1.0},
    log_uniform={"linear_attn.A_log": (0.01, 16.0)},
)
