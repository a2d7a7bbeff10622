"""Context parallelism: the ranks of an axis hold different tokens of the same sequences.

ring       keys and values travel around the ranks, the next block while the current one computes;
           in the backward pass their gradients follow them (Liu et al., arXiv:2310.01889)
allgather  all keys and values are gathered, in the backward pass once more (Llama 3,
           arXiv:2407.21783, sec. 3.3.2)
ulysses    an all_to_all turns a slice of the tokens of all heads into all tokens of a slice of the
           heads, and back (Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509)

Causal attention gives later tokens more work. For ring and allgather a sequence is therefore cut
into 2 size chunks, of which rank r holds the r-th and the r-th from the end (zigzag): every rank
has the same work with the keys of every other one. Ulysses needs slices in order.

Here is who holds which tokens and who sees whom; ``ring`` and ``ulysses`` attend.

Shapes   B sequences, S tokens of a sequence, s = S / size of this rank
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

EVERYTHING = slice(None)


@dataclass(frozen=True, slots=True)
class ContextAxis:
    """The ranks that share the tokens of a sequence."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0
    method: str = "ring"

    def places(self, seq_len: int, device: torch.device | None = None) -> Tensor:
        """Return where in the sequence the tokens of this rank are, (s,)."""
        return self.places_of(self.rank, seq_len, device)

    def places_of(self, rank: int, seq_len: int, device: torch.device | None = None) -> Tensor:
        """Return where in the sequence the tokens of a rank are."""
        chunks = (rank,) if self.method == "ulysses" else self.chunks(rank)
        length = seq_len // (self.size * len(chunks))
        starts = [chunk * length for chunk in chunks]
        return torch.cat([torch.arange(a, a + length, device=device) for a in starts])

    def chunks(self, rank: int) -> tuple[int, int]:
        """Return the two of the 2 size chunks of a sequence that a rank holds."""
        return rank, 2 * self.size - 1 - rank


ONE_RANK = ContextAxis()


class Block(NamedTuple):
    """Some queries of this rank and the keys of another rank that they see."""

    queries: slice
    keys: slice
    causal: bool = False  # the same tokens
    masked: bool = False  # a part of the keys is hidden


@dataclass(frozen=True, slots=True)
class Sight:
    """Who may see whom."""

    axis: ContextAxis
    window: int | None  # tokens that a query sees, itself included
    starts: Tensor | None  # (B, S): where the document of a token begins

    def blocks(self, rank: int, tokens: int) -> Iterator[Block]:
        """Yield what the queries of this rank see of the keys of ``rank`` (s tokens each)."""
        own, half = self.axis.rank, tokens // 2
        window = self.window
        if window is None and self.starts is None:
            if rank == own:
                yield Block(EVERYTHING, EVERYTHING, causal=True)
            elif rank < own:
                yield Block(EVERYTHING, slice(0, half))
            else:
                yield Block(slice(half, tokens), EVERYTHING)
            return
        halves = (slice(0, half), slice(half, tokens))
        for queries, mine in zip(halves, self.axis.chunks(own), strict=True):
            for keys, other in zip(halves, self.axis.chunks(rank), strict=True):
                apart = (mine - other) * half  # of the same places in the two chunks
                if other > mine or (window is not None and apart - half + 1 >= window):
                    continue
                cut = window is not None and apart + half - 1 >= window
                masked = cut or self.starts is not None
                yield Block(queries, keys, causal=mine == other and not masked, masked=masked)

    def mask(self, block: Block, rank: int, query: Tensor) -> Tensor | None:
        """Return what is added to the scores of a block, (1 or B, 1, q, n).

        Finite: a query that sees none of these keys gets a weight of zero when blocks are put
        together, where -inf would leave nothing to divide by.
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
