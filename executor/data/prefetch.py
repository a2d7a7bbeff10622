"""Batches that a thread reads ahead, so that a step does not wait for its data."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from executor.data.corpus import Corpus

if TYPE_CHECKING:
    from executor.data.batch import Batch

AHEAD: Final = 2  # batches in the queue, at most
LOOK_SECONDS: Final = 0.2  # interval at which a full queue checks for the end


@contextmanager
def prefetched(
    corpus: Corpus, global_batch_size: int, rows: range, steps: range
) -> Iterator[Iterator[Batch]]:
    """Yield the batches of steps in order; the thread ends with the context.

    An error in the thread is raised where its batch would have been returned.
    """
    waiting: queue.Queue[Batch | BaseException] = queue.Queue(AHEAD)
    stopped = threading.Event()

    def put(item: Batch | BaseException) -> bool:
        """Wait for a free slot; return False if the consumer has ended."""
        while not stopped.is_set():
            try:
                waiting.put(item, timeout=LOOK_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def read() -> None:
        try:
            for step in steps:
                if not put(corpus.batch(step, global_batch_size, rows)):
                    return
        except BaseException as error:
            put(error)

    def batches() -> Iterator[Batch]:
        for _ in steps:
            item = waiting.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    thread = threading.Thread(target=read, name="batches", daemon=True)
    thread.start()
    try:
        yield batches()
    finally:
        stopped.set()
        thread.join()
