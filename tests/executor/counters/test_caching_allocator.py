"""The caching allocator: sequences worked by hand from torch's constants, and properties."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.counters.allocator_replay import AllocatorEvent, least_limit, replay
from executor.counters.caching_allocator import (
    MIB,
    AllocatorSettings,
    CachingAllocator,
    OutOfDeviceMemory,
    rounded,
    segment_bytes,
)

EXPANDABLE = AllocatorSettings(expandable_segments=True)


@pytest.mark.parametrize(
    ("requested", "size"),
    [(0, 512), (1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)],
)
def test_requests_are_rounded_to_512_bytes(requested: int, size: int) -> None:
    assert rounded(requested) == size


@pytest.mark.parametrize(
    ("requested", "size"), [(1200, 1280), (1024, 1024), (1025, 1280), (1793, 2048), (1000, 1024)]
)
def test_divisions_of_powers_of_two(requested: int, size: int) -> None:
    """The example of torch's documentation: 1200 with four divisions becomes 1280."""
    assert rounded(requested * 1024, 4) == size * 1024


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (25 * MIB, 26 * MIB),
    ],
)
def test_segments(size: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.reserved == segment_bytes(size) == segment


def test_small_requests_share_a_segment() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(MIB // 2)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(1)
    assert allocator.reserved == 4 * MIB


def test_a_small_block_never_serves_a_large_request() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(1))
    allocator.allocate(MIB + 1)
    assert allocator.reserved == 22 * MIB


def test_remainder_of_a_large_block_is_split_off_above_one_mib() -> None:
    """A segment of 12 MiB serves 10.5 MiB whole, since exactly 1 MiB or less is not split off."""
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB))
    block = allocator.allocate(11 * MIB)
    assert block.size == 12 * MIB
    assert allocator.allocated == 12 * MIB
    assert allocator.requested == 11 * MIB
    allocator.free(block)
    assert allocator.allocate(10 * MIB).size == 10 * MIB
    allocator.allocate(2 * MIB)  # the remainder
    assert allocator.reserved == 12 * MIB


def test_the_smallest_sufficient_block_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 20, 30)]
    places = {block.size: block.address for block in blocks}
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(18 * MIB).address == places[20 * MIB]
    assert allocator.allocate(21 * MIB).address == places[30 * MIB]


def test_freed_neighbours_merge() -> None:
    allocator = CachingAllocator()
    parts = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for index in (0, 2, 1, 3):
        allocator.free(parts[index])
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 20 * MIB


def test_separated_free_blocks_do_not_serve_a_larger_request() -> None:
    allocator = CachingAllocator()
    parts = [allocator.allocate(5 * MIB) for _ in range(4)]
    allocator.free(parts[0])
    allocator.free(parts[2])
    allocator.allocate(10 * MIB)
    assert allocator.reserved == 30 * MIB


def test_streams_have_their_own_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB, stream=1))
    allocator.allocate(20 * MIB, stream=2)
    assert allocator.reserved == 40 * MIB
    allocator.allocate(20 * MIB, stream=1)
    assert allocator.reserved == 40 * MIB


def test_unused_segments_are_returned_at_the_limit() -> None:
    """Two free segments make room for a larger one; a live block keeps its whole segment."""
    allocator = CachingAllocator(AllocatorSettings(limit=60 * MIB))
    blocks = [allocator.allocate(20 * MIB) for _ in range(3)]
    allocator.free(blocks[0])
    allocator.free(blocks[1])
    allocator.allocate(40 * MIB)
    assert (allocator.reserved, allocator.retries) == (60 * MIB, 1)
    full = CachingAllocator(AllocatorSettings(limit=40 * MIB))
    parts = [full.allocate(5 * MIB) for _ in range(4)]
    for block in parts[1:]:
        full.free(block)
    with pytest.raises(OutOfDeviceMemory):
        full.allocate(21 * MIB)


def test_oversize_blocks_are_not_split() -> None:
    """Above ``max_split_size`` a block serves only requests of nearly its size."""
    allocator = CachingAllocator(AllocatorSettings(max_split_size=50 * MIB))
    allocator.free(allocator.allocate(100 * MIB))
    allocator.allocate(30 * MIB)
    assert allocator.reserved == 130 * MIB
    assert allocator.allocate(90 * MIB).size == 100 * MIB
    assert allocator.reserved == 130 * MIB


def test_oversize_blocks_are_returned_one_by_one() -> None:
    allocator = CachingAllocator(AllocatorSettings(max_split_size=50 * MIB, limit=180 * MIB))
    blocks = [allocator.allocate(size * MIB) for size in (60, 100)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(75 * MIB)  # nearly the size of the block of 100 MiB only beyond 80
    assert allocator.reserved == 135 * MIB + MIB  # 60, and a segment of 76
    assert allocator.retries == 0


def test_expandable_segments_grow_by_pages() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    allocator.allocate(25 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.allocate(15 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.allocate(1)
    assert allocator.reserved == 42 * MIB


def test_expandable_segments_extend_their_free_end() -> None:
    """25 MiB are taken from 10 free MiB at the end of the segment and two new pages."""
    allocator = CachingAllocator(EXPANDABLE)
    allocator.allocate(30 * MIB)
    block = allocator.allocate(25 * MIB)
    assert (block.address, allocator.reserved) == (30 * MIB, 60 * MIB)


def test_expandable_segments_return_whole_pages_between_live_blocks() -> None:
    """Of 50 free MiB from 10 on, the pages from 20 to 60 MiB go to another stream."""
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True, limit=80 * MIB))
    first, hole, last = (allocator.allocate(size * MIB) for size in (10, 50, 20))
    allocator.free(hole)
    allocator.allocate(40 * MIB, stream=1)
    assert (allocator.reserved, allocator.retries) == (80 * MIB, 1)
    assert allocator.allocate(10 * MIB).address == 10 * MIB
    for block in (first, last):
        allocator.free(block)
    assert allocator.requested == 50 * MIB


def test_growing_batches_reserve_less_in_expandable_segments() -> None:
    """Note [Expandable Segments]: slices of old segments are too small for the next batch."""
    events, tensor = [], 0
    for step in range(8):
        count = 20
        sizes = [(40 + 4 * step) * MIB if i % 2 else (11 + step) * MIB for i in range(count)]
        events += [AllocatorEvent(tensor + i, size) for i, size in enumerate(sizes)]
        events += [AllocatorEvent(tensor + i) for i in range(count)]
        tensor += count
    default, expandable = replay(events), replay(events, EXPANDABLE)
    assert expandable.peak_reserved < 1.05 * expandable.peak_live
    assert default.peak_reserved > 1.3 * default.peak_live


def test_least_limit_is_sufficient_and_below_what_is_reserved() -> None:
    sizes = (60, 20, 61)
    events = [
        event
        for tensor, size in enumerate(sizes)
        for event in (AllocatorEvent(tensor, size * MIB), AllocatorEvent(tensor))
    ]
    assert replay(events).peak_reserved == (60 + 62) * MIB
    limit = least_limit(events, AllocatorSettings())
    assert 62 * MIB <= limit <= 62.1 * MIB


@st.composite
def sequences(draw: st.DrawFn) -> list[AllocatorEvent]:
    """Requests of many sizes on three streams, released in any order."""
    sizes = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(8 * MIB, 90 * MIB))
    events: list[AllocatorEvent] = []
    live: list[int] = []
    for tensor in range(draw(st.integers(1, 40))):
        events.append(AllocatorEvent(tensor, draw(sizes), draw(st.integers(0, 2))))
        live.append(tensor)
        while live and draw(st.booleans()):
            events.append(AllocatorEvent(live.pop(draw(st.integers(0, len(live) - 1)))))
    return events


CASES = st.sampled_from(
    [
        AllocatorSettings(),
        EXPANDABLE,
        AllocatorSettings(roundup_power2_divisions=4),
        AllocatorSettings(max_split_size=40 * MIB),
    ]
)


@settings(max_examples=150, deadline=None)
@given(sequences(), CASES, st.sampled_from([None, 200 * MIB, 600 * MIB]))
def test_properties(
    events: list[AllocatorEvent], case: AllocatorSettings, limit: int | None
) -> None:
    """Blocks never overlap, live <= allocated <= reserved <= limit, and replays repeat."""
    setting = AllocatorSettings(
        case.expandable_segments, case.roundup_power2_divisions, case.max_split_size, limit
    )
    allocator, blocks = CachingAllocator(setting), {}
    for event in events:
        try:
            if event.size is None:
                allocator.free(blocks.pop(event.tensor))
            else:
                blocks[event.tensor] = allocator.allocate(event.size, event.stream)
        except OutOfDeviceMemory:
            return
        places = sorted((b.address, b.address + b.size) for b in blocks.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
        assert allocator.requested <= allocator.allocated <= allocator.reserved
        assert allocator.allocated == sum(block.size for block in blocks.values())
        assert limit is None or allocator.reserved <= limit
    for block in blocks.values():
        allocator.free(block)
    assert allocator.allocated == allocator.requested == 0
    allocator._return_unused()
    assert allocator.reserved == 0  # everything merged back into whole segments
    again = replay(events, setting)
    assert again.reserved.tolist() == replay(events, setting).reserved.tolist()
