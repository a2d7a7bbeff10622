"""Batches come in order from a thread; what goes wrong there is raised here."""

import threading
import time
from typing import Any

import pytest
import torch

from executor.data import MarkovCorpus
from executor.data.prefetch import AHEAD, prefetched
from hardware_profiles.errors import InputError


class _Watched(MarkovCorpus):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__(16, 4, 0)
        self.read: list[int] = []
        self.fails_at = fails_at

    def batch(self, step: int, global_batch_size: int, rows: range | None = None) -> Any:
        if step == self.fails_at:
            raise InputError("a.jsonl, line 7: not JSON")
        self.read.append(step)
        return super().batch(step, global_batch_size, rows)


def _threads() -> int:
    return sum(thread.name == "batches" for thread in threading.enumerate())


def test_batches_come_in_order_and_only_some_ahead():
    corpus = _Watched()
    with prefetched(corpus, 4, range(1, 3), range(5, 50)) as batches:
        first = next(batches)
        assert torch.equal(first.inputs, MarkovCorpus(16, 4, 0).batch(5, 4, range(1, 3)).inputs)
        time.sleep(0.1)
        assert len(corpus.read) <= 1 + AHEAD + 1
        for step in range(6, 50):
            expected = MarkovCorpus(16, 4, 0).batch(step, 4, range(1, 3))
            assert torch.equal(next(batches).inputs, expected.inputs)
        with pytest.raises(StopIteration):
            next(batches)
    assert _threads() == 0


def test_an_error_is_raised_where_its_batch_is_taken():
    with prefetched(_Watched(fails_at=2), 4, range(4), range(9)) as batches:
        next(batches)
        next(batches)
        with pytest.raises(InputError, match="line 7"):
            next(batches)
    assert _threads() == 0


def test_the_thread_ends_when_the_block_is_left_early():
    def leave_early() -> None:
        with prefetched(_Watched(), 4, range(4), range(10**9)) as batches:
            next(batches)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave_early()
    assert _threads() == 0
