"""Requests of device memory of traced steps, and their replay."""

import pytest

from benchmarks.memory_truth.allocator import SETTINGS, ragged_lengths, row_of, transient_bytes
from benchmarks.memory_truth.cases import read
from executor.counters.allocator_replay import AllocatorEvent, replay
from executor.verify.rehearsal import allocator_events, rehearse


def events_of(line: str, lengths: list[int] | None = None) -> list[AllocatorEvent]:
    case = read(line)[0]
    return allocator_events(case.file, case.rank, lengths or ())


@pytest.mark.slow
def test_the_replay_has_the_live_peak_of_the_tracker() -> None:
    case = read("gpt2:2 s256 dp8 zero3")[0]
    found = replay(allocator_events(case.file, case.rank))
    assert found.peak_live == rehearse(case.file, case.rank).peak_bytes
    assert found.peak_live <= found.allocated.max() <= found.peak_reserved


@pytest.mark.slow
def test_fsdp_requests_on_side_streams() -> None:
    """torch's FSDP2 gathers and reduces on streams of its own; one rank alone does neither."""
    assert {event.stream for event in events_of("gpt2:2 s256 fp32")} == {0}
    assert len({event.stream for event in events_of("gpt2:2 s256 dp8 zero3")}) == 3


def test_persistent_tensors_are_not_transient() -> None:
    """Weights and two states of Adam in fp32 stay; gradients and activations do not."""
    case = read("gpt2:2 s256 fp32")[0]
    events = allocator_events(case.file, case.rank)
    peak = replay(events).peak_live
    states = 3 * 4 * case.file.model.num_parameters
    assert peak - transient_bytes(events, peak) == pytest.approx(states, rel=0.01)


def test_weights_hardly_reserve_more_than_they_are() -> None:
    """Where states dominate, a run needs a few percent more than its live memory."""
    row = row_of("gpt2:2 s64 fp32", ragged=False)
    assert row["transient"] < 0.5 * row["live"]
    assert all(row[f"{name}_needed_ratio"] < 1.1 for name in SETTINGS)


@pytest.mark.slow
def test_ragged_batches_reserve_more() -> None:
    lengths = ragged_lengths(512)
    assert lengths[-1] == 512
    assert len(set(lengths)) > 5
    line = "gpt2:4 s512 b8 fp32"
    assert replay(events_of(line, lengths)).peak_reserved > 1.02 * replay(events_of(line)).peak_live
