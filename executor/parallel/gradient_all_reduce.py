"""Gradient all-reduce of plain data parallelism (ZeRO 0) in one precision, without FSDP2.

FSDP2 over one shard would copy every weight. Here the gradients of a bucket (a layer, the
embedding, norm and head) lie in one persistent buffer: the first gradient of a step is copied into
it, later ones are added. When the last backward pass of a step has completed a bucket, one
all_reduce of its buffer starts and overlaps the remaining backward pass (Li et al.,
arXiv:2006.15704, sec. 3.2.2 and 3.2.3). All ranks start the buckets in the same order, whatever
order their gradients are produced in: collectives have to match.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from executor.ops.deferred_weight_gradients import (
    DeferredGradients,
    compute_deferred,
    group_by_parameter,
)


@dataclass(frozen=True, slots=True, eq=False)
class GradientBucket:
    """Parameters whose gradients are reduced together by the ranks of one group."""

    parameters: tuple[Tensor, ...]
    group: dist.ProcessGroup


class GradientReducer:
    """The gradient buckets of one stage, in the order in which a backward pass completes them."""

    def __init__(self, buckets: Sequence[GradientBucket]) -> None:
        self.buckets = buckets
        self._bucket_of = {id(p): bucket for bucket in self.buckets for p in bucket.parameters}
        self._buffers: dict[GradientBucket, Tensor] = {}
        self._views: dict[int, Tensor] = {}  # view of a parameter's gradient in its bucket's buffer
        self._overlaps = False
        self._started = len(self.buckets)  # buckets reduced or in flight
        self._missing: dict[GradientBucket, set[int]] = {}
        self._in_flight: list[Any] = []
        for bucket in self.buckets:
            sizes = [parameter.numel() for parameter in bucket.parameters]
            self._buffers[bucket] = bucket.parameters[0].new_empty(sum(sizes))
            views = self._buffers[bucket].split(sizes)
            for parameter, view in zip(bucket.parameters, views, strict=True):
                self._views[id(parameter)] = view.view_as(parameter)
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    def buffers(self) -> Iterator[Tensor]:
        """Yield the persistent gradient buffers."""
        yield from self._buffers.values()

    def expect(self, *, last: bool, complete: bool) -> None:
        """Announce a backward pass: ``last`` of the step; ``complete``: with weight gradients."""
        self._overlaps = last and complete
        if last:
            self._started = 0
            self._missing = {bucket: set(map(id, bucket.parameters)) for bucket in self.buckets}

    def complete(self, deferred: DeferredGradients, *, last: bool) -> None:
        """Compute deferred weight gradients; ``last``: start the reduction of each bucket."""
        self.expect(last=last, complete=False)
        waiting = group_by_parameter(deferred)
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                compute_deferred(waiting.pop(id(parameter), []))
            if last:
                self._start(bucket)
        for alone in waiting.values():  # weights that no other rank holds
            compute_deferred(alone)

    def finish(self) -> None:
        """Start the remaining reductions; a gradient that no backward pass reached is zero."""
        for bucket in self.buckets[self._started :]:
            self._start(bucket)
        self._overlaps = False

    def wait(self) -> None:
        """Wait for all reductions in flight."""
        for work in self._in_flight:
            work.wait()
        self._in_flight.clear()

    def _accumulated(self, parameter: Tensor) -> None:
        gradient, view = parameter.grad, self._views[id(parameter)]
        if gradient is not None and gradient is not view:  # None: computed later
            parameter.grad = view.copy_(gradient)
        if not self._overlaps:
            return
        self._missing[self._bucket_of[id(parameter)]].discard(id(parameter))
        for bucket in self.buckets[self._started :]:
            if self._missing[bucket]:
                return
            self._start(bucket)

    def _start(self, bucket: GradientBucket) -> None:
        self._started += 1
        for parameter in bucket.parameters:
            if parameter.grad is None:
                parameter.grad = self._views[id(parameter)].zero_()
        buffer = self._buffers[bucket]
        self._in_flight.append(dist.all_reduce(buffer, group=bucket.group, async_op=True))
