"""The attention core: scores, mask, softmax, values. Everything around it is in ``families``."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.attention.blockwise import Kernel
from executor.attention.ring import blockwise_attention
from executor.attention.ulysses import ulysses
from executor.ops.offload_activations import SHARED_MASKS
from executor.ops.recompute import recomputed
from executor.ops.soft_cap import capped_attention
from executor.parallel.context_parallel import ONE_RANK, ContextAxis, Sight
from executor.parallel.tensor_parallel import TensorAxis, rank_randomness


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
    causal: bool = True  # else every token sees every other (BERT)
    cap: float | None = None  # scores stay within it (Gemma 2)
    context: ContextAxis = ONE_RANK
    documents: Documents | None = None  # of the micro-batch at hand; None: one a sequence
    # a recomputed layer does not run it again: what it draws must not be missed later on
    draws_apart: bool = False

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend causally; (B, S, heads, head_dim) in, (B, S, heads x value_head_dim) out.

        ``sinks`` (heads,): scores that take a share of each softmax and give no value. With context
        parallelism S are this rank's tokens.
        """
        # the layout of the kernels: (B, heads, S, head_dim)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if self.recompute:
            output = recomputed(self._attend, query, key, value, sinks, random=self.dropout > 0)
        else:
            output = self._attend(query, key, value, sinks)
        return output.transpose(1, 2).flatten(2)

    def with_added(self, query: Tensor, key: Tensor, value: Tensor, added: Tensor) -> Tensor:
        """Attend where ``added`` to the scores, (B or 1, heads or 1, S or 1, S), hides and weighs.

        Of key and value every query head has its own. Shapes as in calling it.
        """
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        attend = _eager_added if self.kernel == "eager" else _fused_added
        if self.recompute:
            random = self.dropout > 0
            output = recomputed(attend, self, query, key, value, added, random=random)
        else:
            output = attend(self, query, key, value, added)
        return output.transpose(1, 2).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        if self.context.size == 1:
            return self._attend_to_all(query, key, value, sinks)
        if self.context.method == "ulysses":
            return ulysses(self.context, self._attend_to_all, query, key, value, sinks)
        assert not self.dropout  # legality: a rank would have to draw what another one draws
        window = self.window
        if window is not None and window >= query.size(-2) * self.context.size:
            window = None
        starts = None if self.documents is None else self.documents.starts
        kernel = Kernel(self.kernel != "eager", self.scaling, self.cap)
        sight = Sight(self.context, window, starts)
        return blockwise_attention(sight, kernel, query, key, value, sinks)

    def _attend_to_all(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        attend = _eager if self.kernel == "eager" else _fused if self.cap is None else _capped
        if not self.dropout:
            return attend(self, query, key, value, sinks)
        with rank_randomness(self.axis, apart=self.draws_apart):
            return attend(self, query, key, value, sinks)

    def narrower(self, length: int) -> int | None:
        """Return the window, or None where it hides nothing."""
        return None if self.window is None or self.window >= length else self.window

    def mask(self, length: int, device: torch.device, rows: slice = slice(None)) -> Tensor:
        """Return whom some queries may see, (B or 1, 1, queries, S)."""
        places = torch.arange(length, device=device)
        starts = None if self.documents is None else self.documents.starts
        seen = visible(places, self.narrower(length), starts, rows, self.causal)
        return seen[None, None] if starts is None else seen[:, None]


class Documents:
    """Where the documents of a micro-batch begin; all layers with the same window share a mask.

    ``starts``: (B, S), see ``data.batch.Batch``. No dataclass: FSDP2 hands each layer a copy of
    those, and with it a mask of its own.
    """

    def __init__(self, starts: Tensor, causal: bool = True) -> None:
        self.starts, self.causal = starts, causal
        self.masks: dict[Any, Tensor] = {}

    @property
    def positions(self) -> Tensor:
        """Positions within the documents, (B, S)."""
        return torch.arange(self.starts.size(1), device=self.starts.device) - self.starts

    def visible(self, window: int | None) -> Tensor:
        """Return who may see whom, (B, 1, S, S)."""
        index = torch.arange(self.starts.size(1), device=self.starts.device)
        return visible(index, window, self.starts, causal=self.causal)[:, None]

    def added(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores, (B, 1, S, S): torch would make it for every layer."""
        if (window, dtype) not in self.masks:
            hidden = ~self.visible(window)
            added = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self.masks[window, dtype] = _shared(added)
        return self.masks[window, dtype]


def visible(
    index: Tensor,
    window: int | None,
    starts: Tensor | None = None,
    rows: slice = slice(None),
    causal: bool = True,
) -> Tensor:
    """Return whether a query (rows) may see a key (columns), (S, S).

    ``index``: places of the tokens in their sequence, (S,); ``starts``: where their documents
    begin, (B, S), which puts B in front of the result; ``rows``: of some queries only.
    """
    seen = index[rows, None] >= index[None, :]
    if not causal:
        seen = torch.ones_like(seen)
    if window is not None:
        seen &= index[rows, None] - window < index[None, :]
    return seen if starts is None else seen & (starts[:, rows, None] == starts[:, None, :])


@lru_cache(maxsize=4)
def _window(
    seq_len: int, window: int | None, dtype: torch.dtype, device: torch.device, sinks: bool
) -> Tensor:
    """Return what is added to the scores, (S, S): one for all layers, micro-batches and steps.

    ``sinks``: of one key more, which all see.
    """
    seen = visible(torch.arange(seq_len, device=device), window)
    added = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))
    return _shared(F.pad(added, (0, 1)) if sinks else added)


@lru_cache(maxsize=4)
def _hidden(seq_len: int, window: int | None, device: torch.device) -> Tensor:
    """Return whether a key is hidden, (S, S): one for all layers, micro-batches and steps."""
    return _shared(~visible(torch.arange(seq_len, device=device), window))


def _shared(mask: Tensor) -> Tensor:
    SHARED_MASKS[mask.untyped_storage()._cdata] = mask
    return mask


def _fused(
    core: Core, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
) -> Tensor:
    window, mask = core.narrower(query.size(-2)), None
    if core.documents is not None:
        mask = core.documents.added(window, query.dtype)
        mask = mask if sinks is None else F.pad(mask, (0, 1))
    elif window is not None or sinks is not None:
        mask = _window(query.size(-2), window, query.dtype, query.device, sinks is not None)
    width = value.size(-1)
    if sinks is not None:
        key, value = _repeated(query, key), _repeated(query, value)
        query, key, value = _with_sinks(query, key, value, sinks / core.scaling)
    # the kernels want values as wide as keys: latent attention's are narrower
    if width < key.size(-1):  # a copy
        value = F.pad(value, (0, key.size(-1) - width))
    grouped = key.size(1) != query.size(1)
    # kernels that take a mask do not know grouped queries, nor does a GPU's kernel for fp32: torch
    # would fall back to whole scores
    if grouped and (mask is not None or (query.is_cuda and query.dtype == torch.float32)):
        key, value = _repeated(query, key), _repeated(query, value)
        grouped = False
    output: Tensor = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=core.dropout,
        is_causal=mask is None and core.causal,
        scale=core.scaling,
        enable_gqa=grouped,
    )
    return output[..., :width]


def _fused_added(core: Core, query: Tensor, key: Tensor, value: Tensor, added: Tensor) -> Tensor:
    with rank_randomness(core.axis) if core.dropout else nullcontext():
        output: Tensor = F.scaled_dot_product_attention(
            query, key, value, attn_mask=added, dropout_p=core.dropout, scale=core.scaling
        )
    return output


def _eager_added(core: Core, query: Tensor, key: Tensor, value: Tensor, added: Tensor) -> Tensor:
    scores = query @ key.transpose(2, 3)
    if core.scaling != 1.0:
        scores = scores * core.scaling
    weights = (scores + added).softmax(-1)
    if core.dropout:
        with rank_randomness(core.axis):
            weights = F.dropout(weights, core.dropout)
    return weights @ value


def _capped(
    core: Core, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
) -> Tensor:
    assert core.cap is not None
    assert sinks is None

    length, device = query.size(-2), query.device  # to keep the query itself is not its part

    def seen(rows: slice) -> Tensor:
        return core.mask(length, device, rows)

    return capped_attention(query, key, value, seen, core.scaling, core.cap)


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a key that all see, whose product with every query is its head's sink, and a zero value.

    Features are added eight at a time, as the kernels want it: one holds 1 in the queries and the
    sink in that key, all else is zero.
    """
    batch, heads, tokens, width = query.shape
    ones = query.new_ones(batch, heads, tokens, 1)
    query = F.pad(torch.cat([query, ones], -1), (0, 7))
    sink = F.pad(sinks[:, None].to(key.dtype), (width, 7)).expand(batch, -1, -1).unsqueeze(2)
    key = torch.cat([F.pad(key, (0, 8)), sink], 2)
    return query, key, F.pad(value, (0, 0, 0, 1))


def _eager(
    core: Core, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
) -> Tensor:
    key, value = _repeated(query, key), _repeated(query, value)
    documents, hidden = core.documents, None
    window = core.narrower(query.size(-2))
    if documents is not None:
        hidden = ~documents.visible(window)
    elif core.causal:
        hidden = _hidden(query.size(-2), window, query.device)
    elif window is not None:
        hidden = ~core.mask(query.size(-2), query.device)
    scores = (query @ key.transpose(2, 3)) * core.scaling
    if core.cap is not None:
        scores = (scores / core.cap).tanh() * core.cap
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    dtype = torch.float32 if core.softmax_in_fp32 else scores.dtype
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1, dtype=dtype).to(query.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return F.dropout(weights, core.dropout) @ value


def _repeated(query: Tensor, x: Tensor) -> Tensor:
    """Repeat key or value heads so that every query head has its own."""
    return x.repeat_interleave(query.size(1) // x.size(1), dim=1)
