"""Assignment of parts to writing ranks: every distinct part is written once.

Determined from the parts that ranks hold, so that replicas (data parallel, whole tensors under
tensor parallelism, both copies of a tied embedding, experts) need no rules of their own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from executor.checkpoint.format.pieces import numel
from executor.training.optimizer import ParameterShard


@dataclass(frozen=True, slots=True)
class PartCopy:
    """One rank's copy of one part."""

    part: int  # hash of the tensor's name and the pieces
    tensor: int  # hash of the name
    numel: int  # of the part
    total: int  # of the whole tensor
    rank: int


def assigned_shards(shards: Sequence[ParameterShard], device: torch.device) -> list[ParameterShard]:
    """Return the shards that this rank writes; every rank calls this together."""
    own: dict[int, ParameterShard] = {}
    for h in shards:
        if numel(h.pieces):
            own.setdefault(_hash(f"{h.layout.name}{h.pieces}"), h)  # copies of a tied tensor: once
    chosen = assign_writers(_copies(own, device))
    rank = dist.get_rank()
    return [h for part, h in own.items() if chosen[part] == rank]


def assign_writers(copies: Sequence[PartCopy]) -> dict[int, int]:
    """Return the rank that writes each part, balanced by size.

    The largest parts come first, each to the least loaded of the ranks that hold it.
    """
    holders: dict[int, list[PartCopy]] = {}
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


def _check_cover(parts: Sequence[PartCopy]) -> None:
    """Check that the distinct parts of every tensor cover it."""
    missing: dict[int, int] = {}
    for part in parts:
        missing[part.tensor] = missing.get(part.tensor, part.total) - part.numel
    assert not any(missing.values()), "the ranks' parts do not make up the whole model"


def _copies(own: dict[int, ParameterShard], device: torch.device) -> list[PartCopy]:
    """Gather the parts that each rank holds."""
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
        PartCopy(part, tensor, size, total, rank)
        for rank, (table, n) in enumerate(zip(tables, counts, strict=True))
        for part, tensor, size, total in table[: int(n)].tolist()
    ]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
