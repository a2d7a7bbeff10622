"""Reserved memory of a step: its requests and releases, replayed through the caching allocator.

Units: bytes. ``live`` adds up the requests, ``allocated`` torch's blocks for them, ``reserved`` the
allocator's segments; the CUDA context and NCCL's buffers, which nvidia-smi adds, are not in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from executor.counters.caching_allocator import (
    AllocatorBlock,
    AllocatorSettings,
    CachingAllocator,
    OutOfDeviceMemory,
)
from executor.counters.memory_peak import StorageLifetime

SEARCH_SHARE: Final = 0.0005  # of live bytes, to which the smallest sufficient limit is found


class AllocatorEvent(NamedTuple):
    """A request of a tensor's bytes on a stream, or its release (``size`` None)."""

    tensor: int
    size: int | None = None
    stream: int = 0


def events_of(lives: Iterable[StorageLifetime]) -> list[AllocatorEvent]:
    """Return requests and releases in order; releases follow the requests of the same operator."""
    timed = []
    streams: dict[int, int] = {}
    for tensor, life in enumerate(life for life in lives if life.bytes):
        stream = streams.setdefault(life.stream, len(streams))
        timed.append((life.created, 0, AllocatorEvent(tensor, life.bytes, stream)))
        if life.freed is not None:
            timed.append((life.freed, 1, AllocatorEvent(tensor)))
    return [event for *_, event in sorted(timed, key=lambda entry: entry[:2])]


@dataclass(frozen=True, slots=True)
class AllocatorReplay:
    """Bytes after each event; the peaks of each are at different events."""

    live: NDArray[np.int64]
    allocated: NDArray[np.int64]
    reserved: NDArray[np.int64]
    retries: int  # times that unused segments were returned at the limit

    @property
    def peak_live(self) -> int:
        """Largest bytes of live tensors."""
        return int(self.live.max(initial=0))

    @property
    def peak_reserved(self) -> int:
        """Largest reserved bytes."""
        return int(self.reserved.max(initial=0))


def replay(
    events: Iterable[AllocatorEvent], settings: AllocatorSettings | None = None
) -> AllocatorReplay:
    """Replay events; an ``OutOfDeviceMemory`` means that they exceed the limit.

    >>> events = [AllocatorEvent(0, 2**20), AllocatorEvent(1, 2**21), AllocatorEvent(0)]
    >>> found = replay(events)
    >>> found.peak_live >> 20, found.peak_reserved >> 20
    (3, 22)
    """
    allocator, blocks = CachingAllocator(settings), dict[int, AllocatorBlock]()
    rows = []
    for event in events:
        if event.size is None:
            allocator.free(blocks.pop(event.tensor))
        else:
            blocks[event.tensor] = allocator.allocate(event.size, event.stream)
        rows.append((allocator.requested, allocator.allocated, allocator.reserved))
    live, allocated, reserved = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return AllocatorReplay(live, allocated, reserved, allocator.retries)


def least_limit(events: Sequence[AllocatorEvent], settings: AllocatorSettings) -> int:
    """Return the smallest limit under which the events succeed, by bisection.

    Below it a run is out of memory, although torch returns unused segments at the limit.
    """
    free = replay(events, replace(settings, limit=None))
    low, high = free.peak_live, free.peak_reserved
    while high - low > SEARCH_SHARE * free.peak_live:
        middle = (low + high) // 2
        try:
            replay(events, replace(settings, limit=middle))
        except OutOfDeviceMemory:
            low = middle
        else:
            high = middle
    return high
