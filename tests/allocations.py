"""What a torch step allocates, counted by torch's own profiler."""

from collections.abc import Callable
from itertools import accumulate

import torch


def peak_allocated(step: Callable[[], None], *trained: torch.Tensor) -> float:
    """Bytes at the peak of what a step's second run allocates; a dispatch mode makes autograd copy.

    Gradients of the first run go before the profiler starts: the free of a block from outside is
    counted only where an earlier profile has left an entry for its address, that is, by chance.
    """
    step()
    for tensor in trained:
        tensor.grad = None
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    records = [event for event in results.events() if event.name() == "[memory]"]
    records.sort(key=lambda event: event.start_ns())
    return float(max(accumulate(event.nbytes() for event in records)))
