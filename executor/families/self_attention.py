"""Self-attention around the core: projections to heads, norms of heads, positions, output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from executor.compat import apply_rotary_pos_emb
from executor.families.description import Layer, Rotary
from executor.families.linears import columns, row

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys, values: (B, S, heads, head_dim)
# (module, layer, input (B, s, H)) -> queries, keys, values
Projection = Callable[[Any, Layer, Tensor], Heads]
# queries, keys -> the same with norms
HeadNorm = Callable[[Any, Layer, Tensor, Tensor], tuple[Tensor, Tensor]]
# queries, keys, positions -> the same, turned
Rotation = Callable[[Tensor, Tensor, Rotary], tuple[Tensor, Tensor]]


def turn_halves(query: Tensor, key: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Turn element i of a head with element i + head_dim / 2."""
    turned: tuple[Tensor, Tensor] = apply_rotary_pos_emb(query, key, *rotary, unsqueeze_dim=2)
    return turned


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """How a family attends."""

    project: Projection
    output: str
    norm_heads: HeadNorm | None = None
    rotate: Rotation = turn_halves

    def __call__(self, module: Any, layer: Layer, x: Tensor, rotary: Rotary | None) -> Tensor:
        """Attend; (B, s, H) in and out."""
        query, key, value = self.project(module, layer, x)
        if self.norm_heads is not None:
            query, key = self.norm_heads(module, layer, query, key)
        if rotary is not None:
            query, key = self.rotate(query, key, rotary)
        return row(layer.axis, layer.core(query, key, value), getattr(module, self.output))


def separate(query: str, key: str, value: str) -> Projection:
    """Project with three matrices."""

    def project(module: Any, layer: Layer, x: Tensor) -> Heads:
        linears = [getattr(module, name) for name in (query, key, value)]
        q, k, v = columns(layer.axis, x, *linears)
        width = layer.kind.attention.head_dim
        return _heads(q, width), _heads(k, width), _heads(v, width)

    return project


def fused(name: str) -> Projection:
    """Project with one matrix: all queries, all keys, all values."""

    def project(module: Any, layer: Layer, x: Tensor) -> Heads:
        attention = layer.kind.attention
        (qkv,) = columns(layer.axis, x, getattr(module, name))
        parts = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
        sizes = [n // layer.axis.size * attention.head_dim for n in parts]
        q, k, v = qkv.split(sizes, -1)
        width = attention.head_dim
        return _heads(q, width), _heads(k, width), _heads(v, width)

    return project


def norm_each_head(module: Any, layer: Layer, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Norm each head for itself, all with the same weights."""
    return module.q_norm(query), module.k_norm(key)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """Return (B, S, heads of this rank, head_dim)."""
    return x.unflatten(-1, (-1, head_dim))
