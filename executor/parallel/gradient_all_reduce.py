"""Plain data parallelism (ZeRO 0) in one precision: gradients are added up where they lie.

FSDP2 over one shard would copy every weight. Here the gradients of a block (a layer, the embedding,
norm and head) lie in one buffer, which stays from step to step: the first gradient of a step is
copied there as it comes, later ones are added to it. When the last backward pass of a step has
completed a block, one all_reduce of its buffer starts, and runs behind the blocks that are still to
come (Li et al., arXiv:2006.15704, sec. 3.2.2 and 3.2.3). All ranks start them in one order, that of
the blocks, whatever order their gradients came in: collectives have to match.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from executor.ops.deferred_weight_gradients import Store, by_parameter, compute


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Parameters whose gradients are added up together, by the ranks of one group."""

    parameters: tuple[Tensor, ...]
    group: dist.ProcessGroup


class GradientSums:
    """The blocks of one stage, in the order in which a backward pass completes them."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self._block_of = {id(p): block for block in self.blocks for p in block.parameters}
        self._buffers: dict[Block, Tensor] = {}
        self._places: dict[int, Tensor] = {}  # of a parameter's gradient in its block's buffer
        self._watches = False
        self._started = len(self.blocks)  # blocks that are added up, or on their way
        self._missing: dict[Block, set[int]] = {}
        self._under_way: list[Any] = []
        for block in self.blocks:
            sizes = [parameter.numel() for parameter in block.parameters]
            self._buffers[block] = block.parameters[0].new_empty(sum(sizes))
            places = self._buffers[block].split(sizes)
            for parameter, place in zip(block.parameters, places, strict=True):
                self._places[id(parameter)] = place.view_as(parameter)
                parameter.register_post_accumulate_grad_hook(self._arrived)

    def buffers(self) -> Iterator[Tensor]:
        """Yield what holds gradients all the time."""
        yield from self._buffers.values()

    def expect(self, *, last: bool, complete: bool) -> None:
        """Say what comes: a step's ``last`` backward pass, which leaves ``complete`` gradients."""
        self._watches = last and complete
        if last:
            self._started = 0
            self._missing = {block: set(map(id, block.parameters)) for block in self.blocks}

    def complete(self, due: Store, *, last: bool) -> None:
        """Compute the weight gradients that are due; of the last ones each block starts at once."""
        self.expect(last=last, complete=False)
        waiting = by_parameter(due)
        for block in self.blocks:
            for parameter in block.parameters:
                compute(waiting.pop(id(parameter), []))
            if last:
                self._start(block)
        for alone in waiting.values():  # of weights that no other rank holds
            compute(alone)

    def finish(self) -> None:
        """Start what the last backward pass left: a gradient that it did not reach is zero."""
        for block in self.blocks[self._started :]:
            self._start(block)
        self._watches = False

    def wait(self) -> None:
        """Wait for the sums."""
        for work in self._under_way:
            work.wait()
        self._under_way.clear()

    def _arrived(self, parameter: Tensor) -> None:
        gradient, place = parameter.grad, self._places[id(parameter)]
        if gradient is not None and gradient is not place:  # none: it is computed later
            parameter.grad = place.copy_(gradient)
        if not self._watches:
            return
        self._missing[self._block_of[id(parameter)]].discard(id(parameter))
        for block in self.blocks[self._started :]:
            if self._missing[block]:
                return
            self._start(block)

    def _start(self, block: Block) -> None:
        self._started += 1
        for parameter in block.parameters:
            if parameter.grad is None:
                parameter.grad = self._places[id(parameter)].zero_()
        buffer = self._buffers[block]
        self._under_way.append(dist.all_reduce(buffer, group=block.group, async_op=True))
