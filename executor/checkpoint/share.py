"""Which rank writes which part: every distinct part once, however many ranks hold a copy.

Decided from what the ranks really hold, so that replicas (data parallel, whole tensors under tensor
parallelism, both copies of a tied embedding, experts) need no rules of their own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from executor.checkpoint.pieces import numel
from executor.training.optimizer import Held


@dataclass(frozen=True, slots=True)
class Copy:
    """One rank's copy of one part."""

    part: int  # hash of the tensor's name and the pieces
    tensor: int  # hash of the name
    numel: int  # of the part
    total: int  # of the whole tensor
    rank: int


def own_share(held: Sequence[Held], device: torch.device) -> list[Held]:
    """Return the parts that this rank writes; every rank calls this together."""
    own: dict[int, Held] = {}
    for h in held:
        if numel(h.pieces):
            own.setdefault(_hash(f"{h.layout.name}{h.pieces}"), h)  # a tied tensor's copies: once
    chosen = writers(_copies(own, device))
    rank = dist.get_rank()
    return [h for part, h in own.items() if chosen[part] == rank]


def writers(copies: Sequence[Copy]) -> dict[int, int]:
    """Return the rank that writes each part, so that all write about as much.

    The largest parts come first, each to the rank among its holders that has the least so far.
    """
    holders: dict[int, list[Copy]] = {}
    for copy in copies:
        holders.setdefault(copy.part, []).append(copy)
    _check_cover([group[0] for group in holders.values()])
    load: dict[int, int] = dict.fromkeys((copy.rank for copy in copies), 0)
    chosen = {}
    for part, group in sorted(holders.items(), key=lambda item: (-item[1][0].numel, item[0])):
        rank = min((copy.rank for copy in group), key=lambda r: (load[r], r))
        load[rank] += group[0].numel
        chosen[part] = rank
    return chosen


def _check_cover(parts: Sequence[Copy]) -> None:
    """Check that the distinct parts of every tensor make up the whole of it."""
    missing: dict[int, int] = {}
    for part in parts:
        missing[part.tensor] = missing.get(part.tensor, part.total) - part.numel
    assert not any(missing.values()), "the ranks' parts do not make up the whole model"


def _copies(own: dict[int, Held], device: torch.device) -> list[Copy]:
    """Exchange what each rank holds."""
    rows = [
        (part, _hash(h.layout.name), numel(h.pieces), math.prod(h.layout.shape))
        for part, h in own.items()
    ]
    count = torch.tensor([len(rows)], device=device)
    counts = [torch.empty_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count)
    longest = max(int(n) for n in counts)
    padded = torch.zeros(longest, 4, dtype=torch.int64, device=device)
    padded[: len(rows)] = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 4)
    tables = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(tables, padded)
    return [
        Copy(part, tensor, size, total, rank)
        for rank, (table, n) in enumerate(zip(tables, counts, strict=True))
        for part, tensor, size, total in table[: int(n)].tolist()
    ]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
