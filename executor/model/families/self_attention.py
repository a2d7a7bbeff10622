"""Self-attention around the core: projections to heads, norms of heads, positions, output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor.compat import apply_rotary_pos_emb, rotate_adjacent, rotate_in_fp32
from executor.model.families.description import Layer, RotaryTables
from executor.model.families.linears import column_parallel, row_parallel
from executor.parallel.tensor_parallel import all_reduce_both_ways

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys, values: (B, S, heads, head_dim)
# (module, layer, input (B, s, H)) -> queries, keys, values
Projection = Callable[[Any, Layer, Tensor], Heads]
# queries, keys -> the same with norms
HeadNorm = Callable[[Any, Layer, Tensor, Tensor], tuple[Tensor, Tensor]]
# queries, keys, positions -> the same, rotated
Rotation = Callable[[Tensor, Tensor, RotaryTables], tuple[Tensor, Tensor]]


def rotate_halves(query: Tensor, key: Tensor, rotary: RotaryTables) -> tuple[Tensor, Tensor]:
    """Rotate element i with element i + n / 2 of the first n of a head (often of all)."""
    width = rotary[0].size(-1)
    if width < query.size(-1):
        turned = rotate_halves(query[..., :width], key[..., :width], rotary)
        query = torch.cat((turned[0], query[..., width:]), -1)
        return query, torch.cat((turned[1], key[..., width:]), -1)
    turned = apply_rotary_pos_emb(query, key, *rotary, unsqueeze_dim=2)
    # OLMo 2 keeps the tables in fp32
    return turned[0].to(query.dtype), turned[1].to(key.dtype)


def rotate_pairs(query: Tensor, key: Tensor, rotary: RotaryTables) -> tuple[Tensor, Tensor]:
    """Rotate neighbours among the first n elements of a head (GLM-4)."""
    turned: tuple[Tensor, Tensor] = rotate_adjacent(query, key, *rotary, unsqueeze_dim=2)
    return turned


def rotate_pairs_in_fp32(query: Tensor, key: Tensor, rotary: RotaryTables) -> tuple[Tensor, Tensor]:
    """Rotate neighbours of a head, in fp32 (Cohere)."""
    turned: tuple[Tensor, Tensor] = rotate_in_fp32(query, key, *rotary, unsqueeze_dim=2)
    return turned


def rotate_with_half_tables(
    query: Tensor, key: Tensor, rotary: RotaryTables
) -> tuple[Tensor, Tensor]:
    """Rotate halves with tables of half the width: both elements share their entry."""
    cos, sin = (table.unsqueeze(2) for table in rotary)

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    return turn(query), turn(key)


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Self-attention of a family."""

    project: Projection
    output: str
    norm_heads: HeadNorm | None = None
    rotate: Rotation = rotate_halves
    sinks: str | None = None  # name of the sinks: one score per head without a value

    def __call__(self, module: Any, layer: Layer, x: Tensor, rotary: RotaryTables | None) -> Tensor:
        """Attend; (B, s, H) in and out."""
        query, key, value = self.project(module, layer, x)
        if self.norm_heads is not None:
            query, key = self.norm_heads(module, layer, query, key)
        if rotary is not None:
            query, key = self.rotate(query, key, rotary)
            # a copy: frees the matrix shared with queries and keys
            value = value.contiguous()
        sinks = None if self.sinks is None else getattr(module, self.sinks)
        output = layer.core(query, key, value, sinks)
        return row_parallel(layer.axis, output, module.get_submodule(self.output))


def separate(query: str, key: str, value: str) -> Projection:
    """Project with three matrices."""

    def project(module: Any, layer: Layer, x: Tensor) -> Heads:
        linears = [module.get_submodule(name) for name in (query, key, value)]
        q, k, v = column_parallel(layer.axis, x, *linears)
        width = layer.kind.attention.head_dim
        return _heads(q, width), _heads(k, width), _heads(v, width)

    return project


def fused(name: str) -> Projection:
    """Project with one matrix: all queries, all keys, all values."""

    def project(module: Any, layer: Layer, x: Tensor) -> Heads:
        attention = layer.kind.attention
        (qkv,) = column_parallel(layer.axis, x, module.get_submodule(name))
        parts = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
        sizes = [n // layer.axis.size * attention.head_dim for n in parts]
        q, k, v = qkv.split(sizes, -1)
        width = attention.head_dim
        return _heads(q, width), _heads(k, width), _heads(v, width)

    return project


def fused_by_head(name: str) -> Projection:
    """Project with one matrix: query, key and value of each head in turn (GPT-NeoX)."""

    def project(module: Any, layer: Layer, x: Tensor) -> Heads:
        (qkv,) = column_parallel(layer.axis, x, module.get_submodule(name))
        q, k, v = _heads(qkv, 3 * layer.kind.attention.head_dim).chunk(3, -1)
        return q, k, v

    return project


def norm_each_head(query: str = "q_norm", key: str = "k_norm") -> HeadNorm:
    """Normalise each head separately, where the model has such norms."""

    def norms(module: Any, layer: Layer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if not layer.kind.attention.qk_norm:
            return q, k
        return module.get_submodule(query)(q), module.get_submodule(key)(k)

    return norms


def norm_all_heads(module: Any, layer: Layer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise all heads together (OLMo 2): the ranks sum their squares."""
    flat = (q.flatten(-2), k.flatten(-2))
    norms = (module.q_norm, module.k_norm)
    if layer.axis.size == 1:
        normed = [norm(x) for norm, x in zip(norms, flat, strict=True)]
    else:
        exact = torch.promote_types(q.dtype, torch.float32)
        wide = [x.to(exact) for x in flat]
        squares = torch.stack([x.pow(2).sum(-1) for x in wide], -1)
        totals = all_reduce_both_ways(layer.axis, squares).split(1, -1)
        normed = [
            _scaled(norm, x, total / (layer.axis.size * x.size(-1))).to(q.dtype)
            for norm, x, total in zip(norms, wide, totals, strict=True)
        ]
    return normed[0].view_as(q), normed[1].view_as(k)


def _scaled(norm: Any, x: Tensor, variance: Tensor) -> Tensor:
    scaled: Tensor = norm.weight * (x * torch.rsqrt(variance + norm.variance_epsilon))
    return scaled


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """Return (B, S, heads of this rank, head_dim)."""
    return x.unflatten(-1, (-1, head_dim))
