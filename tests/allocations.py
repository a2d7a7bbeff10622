"""What a torch step allocates: by torch's own profiler, and operator by operator."""

import weakref
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from executor.counters.collectives_and_flops import OperatorMode


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


class LiveBytes(OperatorMode):
    """Bytes of the storages that operators have made and nobody has freed, and their maximum.

    ``existing``: tensors whose storages, and so views of them, do not count.
    """

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in existing}
        self.live = self.peak = 0

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self.known:
            return
        self.known.add(address)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.free, address, size)

    def free(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.live -= size
