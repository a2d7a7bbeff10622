"""Context parallelism: the ranks of an axis hold different tokens of the same sequences.

ring       keys and values circulate among the ranks; the next block travels while the current
           one computes. The backward pass circulates their gradients as well (Liu et al.,
           arXiv:2310.01889)
allgather  all keys and values are gathered, in the backward pass once more (Llama 3,
           arXiv:2407.21783, sec. 3.3.2)
ulysses    an all_to_all exchanges a slice of the tokens of all heads for all tokens of a slice of
           the heads, and a second one reverses it (Jacobs et al., DeepSpeed-Ulysses,
           arXiv:2309.14509)

Causal attention gives later tokens more work. For ring and allgather a sequence is therefore cut
into 2 size chunks, and rank r holds the r-th chunk and the r-th from the end (zigzag): every rank
has the same work with the keys of every other rank. Ulysses needs contiguous slices.

This module defines the token positions of each rank and the causal, window and document masks;
``executor.attention`` implements the three methods.

Shapes   B sequences, S tokens of a sequence, s = S / size of this rank
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

ALL = slice(None)


@dataclass(frozen=True, slots=True)
class ContextAxis:
    """The ranks that share the tokens of a sequence."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0
    method: str = "ring"

    def places(self, seq_len: int, device: torch.device | None = None) -> Tensor:
        """Return the positions of this rank's tokens in the sequence, (s,)."""
        return self.places_of(self.rank, seq_len, device)

    def places_of(self, rank: int, seq_len: int, device: torch.device | None = None) -> Tensor:
        """Return the positions of a rank's tokens in the sequence, (s,)."""
        chunks = (rank,) if self.method == "ulysses" else self.chunks(rank)
        length = seq_len // (self.size * len(chunks))
        starts = [chunk * length for chunk in chunks]
        return torch.cat([torch.arange(a, a + length, device=device) for a in starts])

    def chunks(self, rank: int) -> tuple[int, int]:
        """Return the two zigzag chunks (of 2 size) that a rank holds."""
        return rank, 2 * self.size - 1 - rank


SINGLE_RANK = ContextAxis()


class AttentionBlock(NamedTuple):
    """A block of this rank's queries and the block of another rank's keys that they attend to."""

    queries: slice
    keys: slice
    causal: bool = False  # queries and keys are the same tokens
    masked: bool = False  # some of the keys are masked out


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """Keys that each query attends to: causal, optionally within a window and a document."""

    axis: ContextAxis
    window: int | None  # number of tokens that a query attends to, itself included
    starts: Tensor | None  # (B, S): position where the document of each token begins

    def blocks(self, rank: int, tokens: int) -> Iterator[AttentionBlock]:
        """Yield the blocks of queries and keys to compute for the keys of ``rank`` (s tokens)."""
        own, half = self.axis.rank, tokens // 2
        window = self.window
        if window is None and self.starts is None:
            if rank == own:
                yield AttentionBlock(ALL, ALL, causal=True)
            elif rank < own:
                yield AttentionBlock(ALL, slice(0, half))
            else:
                yield AttentionBlock(slice(half, tokens), ALL)
            return
        halves = (slice(0, half), slice(half, tokens))
        for queries, mine in zip(halves, self.axis.chunks(own), strict=True):
            for keys, other in zip(halves, self.axis.chunks(rank), strict=True):
                offset = (mine - other) * half  # between equal positions of the two chunks
                if other > mine or (window is not None and offset - half + 1 >= window):
                    continue
                cut = window is not None and offset + half - 1 >= window
                masked = cut or self.starts is not None
                yield AttentionBlock(
                    queries, keys, causal=mine == other and not masked, masked=masked
                )

    def mask(self, block: AttentionBlock, rank: int, query: Tensor) -> Tensor | None:
        """Return the additive mask of a block's scores, (1 or B, 1, q, n), or None.

        Masked scores are finite: a query without any key in this block gets weight zero when blocks
        are merged, where -inf would divide by zero.
        """
        if not block.masked:
            return None
        seq_len, device = query.size(2) * self.axis.size, query.device
        queries = self.axis.places(seq_len, device)[block.queries]
        keys = self.axis.places_of(rank, seq_len, device)[block.keys]
        distance = queries[:, None] - keys[None, :]
        seen = distance >= 0
        if self.window is not None:
            seen &= distance < self.window
        seen = seen[None]
        if self.starts is not None:
            seen = seen & (self.starts[:, queries, None] == self.starts[:, None, keys])
        low = torch.finfo(query.dtype).min / 2
        return torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, low)[:, None]
