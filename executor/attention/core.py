"""The attention core: scores, mask, softmax, values. Projections around it are in ``families``."""

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
from executor.attention.ulysses import ulysses_attention
from executor.ops.offload_activations import SHARED_MASKS
from executor.ops.recompute import checkpointed
from executor.ops.soft_cap import soft_capped_attention
from executor.parallel.context_parallel import SINGLE_RANK, AttentionPattern, ContextAxis
from executor.parallel.tensor_parallel import TensorAxis, rank_random_state


@dataclass(frozen=True, slots=True)
class AttentionCore:
    """Attention core of one layer."""

    axis: TensorAxis
    kernel: str  # flash (torch's fused kernels) or eager
    scaling: float
    window: int | None  # number of tokens that a query attends to, itself included
    dropout: float
    softmax_in_fp32: bool  # eager only: true for llama-like models, false for GPT-2
    recompute: bool  # Megatron's selective recomputation
    causal: bool = True  # False: every token attends to every other (BERT)
    cap: float | None = None  # soft cap of the scores (Gemma 2)
    context: ContextAxis = SINGLE_RANK
    documents: Documents | None = None  # of the current micro-batch; None: one per sequence
    # a recomputed layer does not run dropout again: its draws must not shift later ones
    isolated_dropout: bool = False

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend causally; (B, S, heads, head_dim) in, (B, S, heads x value_head_dim) out.

        ``sinks`` (heads,): scores included in each softmax without a value. With context
        parallelism S is the number of this rank's tokens.
        """
        # the layout of the kernels: (B, heads, S, head_dim)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if self.recompute:
            output = checkpointed(self._attend, query, key, value, sinks, random=self.dropout > 0)
        else:
            output = self._attend(query, key, value, sinks)
        return output.transpose(1, 2).flatten(2)

    def attend_with_bias(self, query: Tensor, key: Tensor, value: Tensor, added: Tensor) -> Tensor:
        """Attend with ``added`` to the scores, (B or 1, heads or 1, S or 1, S).

        Mask and position bias.

        Every query head has its own key and value head. Shapes as in ``__call__``.
        """
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        attend = _eager_added if self.kernel == "eager" else _fused_added
        if self.recompute:
            random = self.dropout > 0
            output = checkpointed(attend, self, query, key, value, added, random=random)
        else:
            output = attend(self, query, key, value, added)
        return output.transpose(1, 2).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        if self.context.size == 1:
            return self._attend_to_all(query, key, value, sinks)
        if self.context.method == "ulysses":
            return ulysses_attention(self.context, self._attend_to_all, query, key, value, sinks)
        assert not self.dropout  # refused by legality: ranks would have to share random numbers
        window = self.window
        if window is not None and window >= query.size(-2) * self.context.size:
            window = None
        starts = None if self.documents is None else self.documents.starts
        kernel = Kernel(self.kernel != "eager", self.scaling, self.cap)
        pattern = AttentionPattern(self.context, window, starts)
        return blockwise_attention(pattern, kernel, query, key, value, sinks)

    def _attend_to_all(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        attend = _eager if self.kernel == "eager" else _fused if self.cap is None else _capped
        if not self.dropout:
            return attend(self, query, key, value, sinks)
        with rank_random_state(self.axis, isolated=self.isolated_dropout):
            return attend(self, query, key, value, sinks)

    def effective_window(self, length: int) -> int | None:
        """Return the window, or None if it covers all keys."""
        return None if self.window is None or self.window >= length else self.window

    def mask(self, length: int, device: torch.device, rows: slice = slice(None)) -> Tensor:
        """Return the boolean mask of some queries, (B or 1, 1, queries, S); True: attends."""
        places = torch.arange(length, device=device)
        starts = None if self.documents is None else self.documents.starts
        seen = visible(places, self.effective_window(length), starts, rows, self.causal)
        return seen[None, None] if starts is None else seen[:, None]


class Documents:
    """Document boundaries of a micro-batch; all layers with the same window share a mask.

    ``starts``: (B, S), see ``data.batch.Batch``. Not a dataclass: FSDP2 copies those for each
    layer, and the mask with it.
    """

    def __init__(self, starts: Tensor, causal: bool = True) -> None:
        self.starts, self.causal = starts, causal
        self.masks: dict[Any, Tensor] = {}

    @property
    def positions(self) -> Tensor:
        """Positions within the documents, (B, S)."""
        return torch.arange(self.starts.size(1), device=self.starts.device) - self.starts

    def visible(self, window: int | None) -> Tensor:
        """Return the boolean mask (B, 1, S, S); True: attends."""
        index = torch.arange(self.starts.size(1), device=self.starts.device)
        return visible(index, window, self.starts, causal=self.causal)[:, None]

    def added(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask (B, 1, S, S), cached: torch would create it for every layer."""
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
    """Return whether a query (rows) attends to a key (columns), (S, S).

    ``index``: positions of the tokens in their sequence, (S,); ``starts``: first positions of their
    documents, (B, S), which prepends B to the result; ``rows``: for some queries only.
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
    """Return the additive mask (S, S), shared by all layers, micro-batches and steps.

    ``sinks``: with one more key, visible to all queries.
    """
    seen = visible(torch.arange(seq_len, device=device), window)
    added = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))
    return _shared(F.pad(added, (0, 1)) if sinks else added)


@lru_cache(maxsize=4)
def _hidden(seq_len: int, window: int | None, device: torch.device) -> Tensor:
    """Return the inverted mask (S, S), shared by all layers, micro-batches and steps."""
    return _shared(~visible(torch.arange(seq_len, device=device), window))


def _shared(mask: Tensor) -> Tensor:
    SHARED_MASKS[mask.untyped_storage()._cdata] = mask
    return mask


def _fused(
    core: AttentionCore, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
) -> Tensor:
    window, mask = core.effective_window(query.size(-2)), None
    if core.documents is not None:
        mask = core.documents.added(window, query.dtype)
        mask = mask if sinks is None else F.pad(mask, (0, 1))
    elif window is not None or sinks is not None:
        mask = _window(query.size(-2), window, query.dtype, query.device, sinks is not None)
    width = value.size(-1)
    if sinks is not None:
        key, value = _repeated(query, key), _repeated(query, value)
        query, key, value = _with_sinks(query, key, value, sinks / core.scaling)
    # the kernels require values as wide as keys; latent attention's are narrower
    if width < key.size(-1):  # a copy
        value = F.pad(value, (0, key.size(-1) - width))
    grouped = key.size(1) != query.size(1)
    # kernels with a mask do not support grouped queries, nor does a GPU's fp32 kernel: torch would
    # fall back to the full score matrix
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


def _fused_added(
    core: AttentionCore, query: Tensor, key: Tensor, value: Tensor, added: Tensor
) -> Tensor:
    with rank_random_state(core.axis) if core.dropout else nullcontext():
        output: Tensor = F.scaled_dot_product_attention(
            query, key, value, attn_mask=added, dropout_p=core.dropout, scale=core.scaling
        )
    return output


def _eager_added(
    core: AttentionCore, query: Tensor, key: Tensor, value: Tensor, added: Tensor
) -> Tensor:
    scores = query @ key.transpose(2, 3)
    if core.scaling != 1.0:
        scores = scores * core.scaling
    weights = (scores + added).softmax(-1)
    if core.dropout:
        with rank_random_state(core.axis):
            weights = F.dropout(weights, core.dropout)
    return weights @ value


def _capped(
    core: AttentionCore, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
) -> Tensor:
    assert core.cap is not None
    assert sinks is None

    length, device = query.size(-2), query.device  # the closure must not keep the query alive

    def seen(rows: slice) -> Tensor:
        return core.mask(length, device, rows)

    return soft_capped_attention(query, key, value, seen, core.scaling, core.cap)


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Append a key whose product with every query is its head's sink, and a zero value.

    Features are added eight at a time, as the kernels require: one is 1 in the queries and the sink
    in that key, the others are zero.
    """
    batch, heads, tokens, width = query.shape
    ones = query.new_ones(batch, heads, tokens, 1)
    query = F.pad(torch.cat([query, ones], -1), (0, 7))
    sink = F.pad(sinks[:, None].to(key.dtype), (width, 7)).expand(batch, -1, -1).unsqueeze(2)
    key = torch.cat([F.pad(key, (0, 8)), sink], 2)
    return query, key, F.pad(value, (0, 0, 0, 1))


def _eager(
    core: AttentionCore, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
) -> Tensor:
    key, value = _repeated(query, key), _repeated(query, value)
    documents, hidden = core.documents, None
    window = core.effective_window(query.size(-2))
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
