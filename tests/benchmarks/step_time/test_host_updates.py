"""The clock of updates on the host, on tensors so small that its figures say little."""

import pytest

pytest.importorskip("torch")

from benchmarks.step_time.host_updates import measure, threads_at_work, update_work


def test_every_update_is_clocked_in_both_precisions() -> None:
    found = measure(2**16)
    assert set(found) == {
        (precision, work)
        for precision in ("float32", "bfloat16")
        for work in ("kernel", "operators", "norm")
    }
    assert all(min(seconds) >= 0.0 for seconds in found.values())


def test_a_norm_runs_on_one_core_and_an_update_on_all() -> None:
    work = update_work("float32", 2**23)
    assert threads_at_work(work["norm"]) == pytest.approx(1.0, abs=0.2)
    # on busy cores the caller waits, spinning, for the other thread
    assert any(threads_at_work(work["kernel"]) > 1.5 for _ in range(5))
