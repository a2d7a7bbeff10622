"""Exposed communication: the time in which a step only waits for other ranks.

Every collective and message of the executor, of FSDP2 and of torch's own functions ends in
``Work.wait``, which is timed while a step is sampled. Communication that overlaps computation has
completed by then and adds nothing.

On a CPU ``wait`` blocks: the seconds inside it are counted. On a GPU it only makes the compute
stream wait: events before and after it on that stream measure the stall (``Stream.wait_event`` too,
with which FSDP2 waits for its streams).

A wait includes the delay of the other rank: in a pipeline the waits for messages (recv) contain its
bubble and its transfers, and ranks of unequal speed wait for each other.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from executor.compat import operation_of

STREAM = "stream"  # waits between GPU streams, whose operation is unknown


class ExposedCommunication:
    """Counts waiting seconds by operation inside the context; one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        # operation, begin and end of each wait: seconds of the clock, or events of the stream
        self.waits: list[tuple[str, Any, Any]] = []
        self._wait = dist.Work.wait
        self._wait_of_class = vars(dist.Work)["wait"]  # the descriptor, to restore
        self._wait_event = torch.cuda.Stream.wait_event

    def __enter__(self) -> ExposedCommunication:
        watch, wait, wait_event = self, self._wait, self._wait_event

        def timed_wait(work: Any, *arguments: Any, **options: Any) -> Any:
            if watch._on_gpu:
                with watch._stalled(operation_of(work), torch.cuda.current_stream()):
                    return wait(work, *arguments, **options)
            began = time.perf_counter()
            try:
                return wait(work, *arguments, **options)
            finally:
                watch.waits.append((operation_of(work), began, time.perf_counter()))

        dist.Work.wait = timed_wait
        if self._on_gpu:
            computation = torch.cuda.current_stream()

            def timed_wait_event(stream: Any, event: Any) -> Any:
                if stream != computation:
                    return wait_event(stream, event)
                with watch._stalled(STREAM, stream):
                    return wait_event(stream, event)

            torch.cuda.Stream.wait_event = timed_wait_event
        return self

    def __exit__(self, *error: Any) -> None:
        dist.Work.wait = self._wait_of_class
        torch.cuda.Stream.wait_event = self._wait_event

    def seconds(self) -> dict[str, float]:
        """Return the waiting seconds by operation; on a GPU after a synchronisation."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for operation, begin, end in self.waits:
            lasts = begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin
            seconds[operation] += lasts
        return dict(sorted(seconds.items()))

    def _stalled(self, operation: str, stream: Any) -> _Stalled:
        return _Stalled(self.waits, operation, stream)


class _Stalled:
    """Brackets a wait of a stream with events."""

    def __init__(self, events: list[tuple[str, Any, Any]], operation: str, stream: Any) -> None:
        self.events, self.operation, self.stream = events, operation, stream

    def __enter__(self) -> None:
        self.before = torch.cuda.Event(enable_timing=True)
        self.before.record(self.stream)

    def __exit__(self, *error: Any) -> None:
        after = torch.cuda.Event(enable_timing=True)
        after.record(self.stream)
        self.events.append((self.operation, self.before, after))
