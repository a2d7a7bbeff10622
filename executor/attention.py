"""The attention core: scores, mask, softmax, values. Everything around it is in ``layers``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.recompute import recomputed
from executor.tensor_parallel import TensorAxis, rank_randomness


@dataclass(frozen=True, slots=True)
class Core:
    """How one layer attends."""

    axis: TensorAxis
    kernel: str  # flash (torch's fused kernels) or eager
    scaling: float
    window: int | None  # tokens that a query sees, itself included
    dropout: float
    softmax_in_fp32: bool  # eager only: llama's kin do, GPT-2 does not
    recompute: bool  # Megatron's selective recomputation

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend causally; (B, S, heads, head_dim) in, (B, S, heads x head_dim) out."""
        # the layout of the kernels: (B, heads, S, head_dim)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if self.recompute:
            output = recomputed(self._attend, query, key, value, random=self.dropout > 0)
        else:
            output = self._attend(query, key, value)
        return output.transpose(1, 2).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attend = _eager if self.kernel == "eager" else _fused
        if not self.dropout:
            return attend(self, query, key, value)
        with rank_randomness(self.axis):
            return attend(self, query, key, value)

    def mask(self, query: Tensor) -> Tensor | None:
        """Return who may see whom (S, S), or None where a plain causal mask says it all."""
        seq_len = query.size(-2)
        if self.window is None or self.window >= seq_len:
            return None
        position = torch.arange(seq_len, device=query.device)
        distance = position[:, None] - position[None, :]
        return (distance >= 0) & (distance < self.window)


def _fused(core: Core, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = core.mask(query)
    grouped = key.size(1) != query.size(1)
    # kernels that take a mask do not know grouped queries, nor does a GPU's kernel for fp32: torch
    # would fall back to whole scores
    if grouped and (mask is not None or (query.is_cuda and query.dtype == torch.float32)):
        key, value = _repeated(query, key), _repeated(query, value)
        grouped = False
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=core.dropout,
        is_causal=mask is None,
        scale=core.scaling,
        enable_gqa=grouped,
    )


def _eager(core: Core, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = _repeated(query, key), _repeated(query, value)
    mask = core.mask(query)
    if mask is None:
        seq_len = query.size(-2)
        mask = torch.ones(seq_len, seq_len, dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.transpose(2, 3)) * core.scaling
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    dtype = torch.float32 if core.softmax_in_fp32 else scores.dtype
    weights = scores.softmax(-1, dtype=dtype).to(query.dtype)
    return F.dropout(weights, core.dropout) @ value


def _repeated(query: Tensor, x: Tensor) -> Tensor:
    """Repeat key or value heads so that every query head has its own."""
    return x.repeat_interleave(query.size(1) // x.size(1), dim=1)
