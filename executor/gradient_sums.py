"""Plain data parallelism (ZeRO 0) in one precision: gradients are added up where they lie.

FSDP2 over one shard would copy every weight and every gradient; here nothing is copied. When the
last backward pass of a step has completed a block (a layer, the embedding, norm and head), an
all_reduce of each of its matrices' gradients starts, and runs behind the blocks that are still to
come (Li et al., arXiv:2006.15704, sec. 3.2.3). Of vectors (norms, biases) a message's latency would
outweigh its bytes: they are copied together, and added up in one message after the last block. All
ranks start them in one order, that of the blocks, whatever order their gradients came in:
collectives have to match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.weight_gradients import Store, by_parameter, compute


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Parameters whose gradients are added up together, by the ranks of one group."""

    parameters: tuple[Tensor, ...]
    group: dist.ProcessGroup
    together: bool = False  # in one message: a copy of all of them


class GradientSums:
    """The blocks of one stage, in the order in which a backward pass completes them."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self._block_of = {id(p): block for block in self.blocks for p in block.parameters}
        self._watches = False
        self._started = len(self.blocks)  # blocks that are added up, or on their way
        self._missing: dict[Block, set[int]] = {}
        self._under_way: list[Any] = []
        self._copies: list[tuple[Block, Tensor]] = []  # of gradients that are added up together
        for block in self.blocks:
            for parameter in block.parameters:
                parameter.register_post_accumulate_grad_hook(self._arrived)

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
        for block, total in self._copies:
            parts = total.split([parameter.numel() for parameter in block.parameters])
            for parameter, part in zip(block.parameters, parts, strict=True):
                parameter.grad.copy_(part.view_as(parameter))
        self._copies.clear()

    def _arrived(self, parameter: Tensor) -> None:
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
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in block.parameters]
        if block.together and len(gradients) > 1:
            gradients = [torch.cat([gradient.flatten() for gradient in gradients])]
            self._copies.append((block, gradients[0]))
        for gradient in gradients:
            self._under_way.append(dist.all_reduce(gradient, group=block.group, async_op=True))
