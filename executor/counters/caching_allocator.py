"""torch's caching allocator of GPU memory: which segments a sequence of requests reserves.

A request is rounded and takes the smallest free block of its stream and pool that is large enough;
the rest of the block is split off. Without such a block a new segment is reserved. Freed blocks
merge with free neighbours of their segment and stay reserved. At the device's limit all segments
without a live block are returned, and the request is tried once more.

Units: bytes. Source: c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of torch
2.13. Left out: CUDA graphs' private pools, ``record_stream``, ``garbage_collection_threshold``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Final

MIB: Final = 2**20
MIN_BLOCK: Final = 512  # kMinBlockSize
SMALL_REQUEST: Final = MIB  # kSmallSize: largest request of the small pool
SMALL_SEGMENT: Final = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT: Final = 20 * MIB  # large_segment_size: of requests below MIN_LARGE_REQUEST
MIN_LARGE_REQUEST: Final = 10 * MIB  # kMinLargeAlloc
LARGE_STEP: Final = 2 * MIB  # kRoundLarge: to which segments of larger requests are rounded
OVERSIZE_ROUNDING: Final = LARGE_SEGMENT  # max_non_split_rounding_size


class OutOfDeviceMemory(Exception):
    """A request does not fit, even after all unused segments were returned."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Settings of ``PYTORCH_CUDA_ALLOC_CONF``, and the device's limit; None: unlimited."""

    expandable_segments: bool = False
    roundup_power2_divisions: int = 0
    max_split_size: int | None = None
    limit: int | None = None


@dataclass(slots=True)
class AllocatorPool:
    """Free blocks of one stream: of small or of large requests."""

    small: bool
    free: list[tuple[int, int]] = field(default_factory=list)  # size and address, sorted
    unmapped: list[int] = field(default_factory=list)  # addresses without memory, sorted

    @property
    def page(self) -> int:
        """Bytes that an expandable segment maps at once."""
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT


@dataclass(slots=True, eq=False)
class AllocatorBlock:
    """A part of a segment; ``mapped``: whether it has memory (always, unless expandable)."""

    pool: AllocatorPool
    address: int
    size: int
    mapped: bool = True
    expandable: bool = False
    allocated: bool = False
    requested: int = 0
    before: AllocatorBlock | None = None
    after: AllocatorBlock | None = None


class CachingAllocator:
    """Blocks and segments of one device; ``allocated`` and ``reserved`` as torch counts them.

    ``allocated`` adds up the blocks in use, ``requested`` the bytes asked for in them.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(3 * MIB)
    >>> allocator.allocated // MIB, allocator.reserved // MIB
    (3, 20)
    """

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self.allocated = self.requested = self.reserved = 0
        self.retries = 0  # times that unused segments were returned at the limit
        self._pools: dict[tuple[int, bool], AllocatorPool] = {}
        self._blocks: dict[int, AllocatorBlock] = {}  # not allocated, by address
        self._end = 0  # of all address space in use

    def allocate(self, requested: int, stream: int = 0) -> AllocatorBlock:
        """Return a block for a request on a stream."""
        size = rounded(requested, self.settings.roundup_power2_divisions)
        small = size <= SMALL_REQUEST
        pool = self._pools.setdefault((stream, small), AllocatorPool(small))
        block = self._best_fit(pool, size) or self._reserve(pool, size)
        if block is None:
            self._return_unused()
            self.retries += 1
            block = self._reserve(pool, size)
        if block is None:
            raise OutOfDeviceMemory(f"{requested} bytes at {self.reserved} reserved bytes")
        if self._splits(block, size):
            self._split(block, size)
        block.allocated, block.requested = True, requested
        self.allocated += block.size
        self.requested += requested
        return block

    def free(self, block: AllocatorBlock) -> None:
        """Return a block to its pool, merged with free neighbours."""
        self.allocated -= block.size
        self.requested -= block.requested
        block.allocated = False
        self._add(self._merged(block))

    def _best_fit(self, pool: AllocatorPool, size: int) -> AllocatorBlock | None:
        """Take the smallest free block that is large enough, if any."""
        free, limit = pool.free, self.settings.max_split_size
        index = bisect_left(free, (size, -1))
        if index == len(free):
            return None
        if self.settings.expandable_segments:
            # a block counts with the unmapped part behind it, into which it can grow
            while index + 1 < len(free) and self._room(free[index + 1]) < self._room(free[index]):
                index += 1
        found = free[index][0]
        if limit is not None and (
            (size < limit <= found) or (size >= limit and found >= size + OVERSIZE_ROUNDING)
        ):
            return None
        return self._take(self._blocks[free[index][1]])

    def _room(self, key: tuple[int, int]) -> int:
        after = self._blocks[key[1]].after
        return key[0] + (after.size if after is not None and not after.mapped else 0)

    def _reserve(self, pool: AllocatorPool, size: int) -> AllocatorBlock | None:
        """Reserve a segment, or pages of one; None: beyond the limit."""
        if self.settings.expandable_segments:
            return self._expand(pool, size)
        segment = segment_bytes(size)
        if self._beyond_limit(segment) and not self._return_oversize(segment):
            return None
        self.reserved += segment
        return AllocatorBlock(pool, self._address_space(segment), segment)

    def _beyond_limit(self, more: int) -> bool:
        limit = self.settings.limit
        return limit is not None and self.reserved + more > limit

    def _address_space(self, size: int) -> int:
        start = self._end
        self._end += -(-size // LARGE_SEGMENT) * LARGE_SEGMENT
        return start

    def _splits(self, block: AllocatorBlock, size: int) -> bool:
        """Whether the rest of a block is worth splitting off."""
        rest, limit = block.size - size, self.settings.max_split_size
        if block.pool.small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK
        return (limit is None or size < limit) and rest > SMALL_REQUEST

    def _split(self, block: AllocatorBlock, size: int) -> None:
        """Shorten a block to ``size``; the rest is free."""
        rest = AllocatorBlock(block.pool, block.address + size, block.size - size)
        rest.expandable = block.expandable
        block.size = size
        _insert_after(block, rest)
        self._add(rest)

    def _merged(self, block: AllocatorBlock) -> AllocatorBlock:
        """Merge a block with neighbours that are free, and both mapped or both not."""
        for other in (block.before, block.after):
            if other is None or other.allocated or other.mapped != block.mapped:
                continue
            self._take(other)
            block.size += other.size
            block.address = min(block.address, other.address)
            if other is block.before:
                block.before = other.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after is not None:
                    block.after.before = block
        return block

    def _add(self, block: AllocatorBlock) -> None:
        self._blocks[block.address] = block
        if block.mapped:
            insort(block.pool.free, (block.size, block.address))
        else:
            insort(block.pool.unmapped, block.address)

    def _take(self, block: AllocatorBlock) -> AllocatorBlock:
        del self._blocks[block.address]
        if block.mapped:
            del block.pool.free[bisect_left(block.pool.free, (block.size, block.address))]
        else:
            del block.pool.unmapped[bisect_left(block.pool.unmapped, block.address)]
        return block

    # segments without expansion are returned whole, at the limit

    def _return_oversize(self, segment: int) -> bool:
        """With ``max_split_size``: return the smallest large segments that make enough room."""
        largest = self.settings.max_split_size
        if largest is None:
            return False
        unused = sorted(
            (block.size, block.address)
            for block in self._blocks.values()
            if block.size >= largest and _is_whole(block)
        )
        enough = [key for key in unused if key[0] >= segment]
        for key in enough[:1] or unused[::-1]:
            self._return(self._blocks[key[1]])
            if not self._beyond_limit(segment):
                return True
        return False

    def _return_unused(self) -> None:
        """Return segments without a live block, and unused pages of expandable ones."""
        for block in list(self._blocks.values()):
            if block.expandable:
                self._unmap(block)
            elif _is_whole(block):
                self._return(block)

    def _return(self, block: AllocatorBlock) -> None:
        self._take(block)
        self.reserved -= block.size

    # expandable segments

    def _expand(self, pool: AllocatorPool, size: int) -> AllocatorBlock | None:
        """Map pages at the lowest address that leaves room for ``size``; None: beyond the limit."""
        block = self._candidate(pool, size)
        if not block.mapped:
            grown = self._map(block, min(block.size, size))
            if grown is None:
                return None
            block = grown
        while block.size < size:
            assert block.after is not None  # the candidate has room behind it
            grown = self._map(block.after, min(block.after.size, size - block.size))
            if grown is None:
                return None
            block = grown
        return self._take(block)

    def _candidate(self, pool: AllocatorPool, size: int) -> AllocatorBlock:
        """Return a free or unmapped block, followed by such blocks until ``size`` is reached."""
        for address in pool.unmapped:
            block = self._blocks[address]
            if block.before is not None and not block.before.allocated:
                block = block.before
            room, following = 0, block
            while room < size and following is not None and not following.allocated:
                room, following = room + following.size, following.after  # type: ignore[assignment]
            if room >= size:
                return block
        space = 2**50  # torch reserves 9/8 of the device's memory as address space
        block = AllocatorBlock(pool, self._address_space(space), space, mapped=False)
        block.expandable = True
        self._add(block)
        return block

    def _map(self, block: AllocatorBlock, size: int) -> AllocatorBlock | None:
        """Map the first pages of an unmapped block; return them, merged with free neighbours."""
        mapped = min(block.size, -(-size // block.pool.page) * block.pool.page)
        if self._beyond_limit(mapped):
            return None
        self._take(block)
        if block.size > mapped:
            rest = AllocatorBlock(
                block.pool, block.address + mapped, block.size - mapped, mapped=False
            )
            rest.expandable = True
            _insert_after(block, rest)
            self._add(rest)
        block.size, block.mapped = mapped, True
        self.reserved += mapped
        self._add(self._merged(block))
        return block

    def _unmap(self, block: AllocatorBlock) -> None:
        """Return the whole pages inside a free block of an expandable segment."""
        page, end = block.pool.page, block.address + block.size
        first, last = -(-block.address // page) * page, end // page * page
        if not block.mapped or first >= last or self._blocks.get(block.address) is not block:
            return
        self._take(block)
        if first > block.address:
            unused = AllocatorBlock(block.pool, first, end - first, expandable=True)
            block.size = first - block.address
            _insert_after(block, unused)
            self._add(block)
            block = unused
        if last < end:
            rest = AllocatorBlock(block.pool, last, end - last, expandable=True)
            block.size = last - first
            _insert_after(block, rest)
            self._add(rest)
        block.mapped = False
        self.reserved -= block.size
        self._add(self._merged(block))


def rounded(requested: int, divisions: int = 0) -> int:
    """Return the bytes of a block for a request: multiples of 512, or parts of powers of two.

    ``divisions``: ``roundup_power2_divisions``, equal parts between two powers of two.

    >>> rounded(1), rounded(513), rounded(1200 * 1024, 4) // 1024
    (512, 1024, 1280)
    """
    if requested < MIN_BLOCK:
        return MIN_BLOCK
    if divisions > 1 and requested > MIN_BLOCK * divisions:
        power = 1 << (requested.bit_length() - 1)
        return -(-requested // (power // divisions)) * (power // divisions)
    return -(-requested // MIN_BLOCK) * MIN_BLOCK


def segment_bytes(size: int) -> int:
    """Return the bytes that a rounded request without a free block reserves.

    >>> [segment_bytes(n * MIB) // MIB for n in (1, 2, 10, 11)]
    [2, 20, 10, 12]
    """
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < MIN_LARGE_REQUEST:
        return LARGE_SEGMENT
    return -(-size // LARGE_STEP) * LARGE_STEP


def _is_whole(block: AllocatorBlock) -> bool:
    """Whether a free block is a whole segment."""
    return block.before is None and block.after is None


def _insert_after(block: AllocatorBlock, new: AllocatorBlock) -> None:
    new.before, new.after = block, block.after
    if block.after is not None:
        block.after.before = new
    block.after = new
