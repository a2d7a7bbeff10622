"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, sec. 2.1).

Keys and values of all heads are projected up from one short latent per token, queries too in the
larger models; positions rotate a part of the features, whose keys all heads share. Latents are
computed from a rank's tokens; the up projections are sharded by heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from executor.model.families.description import Layer, RotaryTables
from executor.model.families.linears import column_parallel, replicated, row_parallel
from executor.model.families.self_attention import Rotation, rotate_halves
from executor.ops.discarded_results import Discarded
from executor.parallel.tensor_parallel import gather_tokens


def rotate_pairs_to_halves(
    query: Tensor, key: Tensor, rotary: RotaryTables
) -> tuple[Tensor, Tensor]:
    """Rotate neighbouring elements of a head; the result is in two halves."""
    cos, sin = (table[..., : table.size(-1) // 2].unsqueeze(2) for table in rotary)

    def turn(x: Tensor) -> Tensor:
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    return turn(query), turn(key)


def latent_attention(module: Any, layer: Layer, x: Tensor, rotary: RotaryTables | None) -> Tensor:
    """Attend; (B, s, H) in and out."""
    sizes, axis = layer.kind.attention, layer.axis
    latent = x if not sizes.q_lora_rank else module.q_a_layernorm(replicated(x, module.q_a_proj))
    compressed = replicated(x, module.kv_a_proj_with_mqa)
    compressed, turned = compressed.split([sizes.kv_lora_rank, sizes.rope_head_dim], -1)
    compressed = module.kv_a_layernorm(compressed)
    up = partial(_heads, module, layer, rotary)
    if not layer.repeats("mla_up_proj"):
        output = layer.core(*up(latent, compressed, turned))
    else:
        with Discarded(
            up, latent, compressed, turned.contiguous(), random=False
        ).readers() as heads:
            output = layer.core(*heads)
    return row_parallel(axis, output, module.o_proj)


def _heads(
    module: Any,
    layer: Layer,
    rotary: RotaryTables | None,
    latent: Tensor,
    compressed: Tensor,
    turned: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, from the latents of queries, and of keys and values."""
    sizes, axis = layer.kind.attention, layer.axis
    no_rope = sizes.head_dim - sizes.rope_head_dim
    (query,) = column_parallel(
        axis, latent, module.q_b_proj if sizes.q_lora_rank else module.q_proj
    )
    query = query.unflatten(-1, (-1, sizes.head_dim))
    (lifted,) = column_parallel(axis, compressed, module.kv_b_proj)
    lifted = lifted.unflatten(-1, (-1, no_rope + sizes.value_head_dim))
    key, value = lifted.split([no_rope, sizes.value_head_dim], -1)
    turned = gather_tokens(axis, turned).unsqueeze(2)
    own, positioned = query.split([no_rope, sizes.rope_head_dim], -1)
    if rotary is not None:
        positioned, turned = _rotation(module)(positioned, turned, rotary)
    query = torch.cat([own, positioned], -1)
    key = torch.cat([key, turned.expand(-1, -1, key.size(2), -1)], -1)
    return query, key, value


def _rotation(module: Any) -> Rotation:
    return (
        rotate_pairs_to_halves if getattr(module.config, "rope_interleave", True) else rotate_halves
    )
