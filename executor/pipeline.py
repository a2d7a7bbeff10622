"""Pipeline parallelism: the order of forward and backward passes, and the messages between stages.

Stage s lives on pipeline rank s mod p. Messages of one direction (activations or gradients, to the
neighbour or around between the last rank and the first) share a channel, used by both ends in the
same order. Sends never block: a rank waits only for the input of its next pass, so an order without
circular needs cannot deadlock. A received activation lives until its backward pass, an output only
until it has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from cost_models.plan import Plan
from executor.breadcrumbs import TRAIL
from executor.data.batch import Batch
from executor.data_parallel import before_backward
from executor.mesh import Grid
from executor.models import Stage


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Literal["forward", "backward"]
    stage: int
    microbatch: int


def actions(plan: Plan, pipeline_rank: int) -> list[Action]:
    """Return what one pipeline rank does in a step, in order.

    gpipe             all forward passes, then all backward passes (Huang et al., arXiv:1811.06965)
    1f1b              p - r - 1 forward passes, then one of each in turn (Narayanan et al.,
                      arXiv:2104.04473, sec. 2.2.1)
    interleaved_1f1b  the same over v stages a rank (sec. 2.2.2), micro-batches in rounds as in
                      torch.distributed.pipelining

    Without a pipeline each micro-batch goes forward and backward at once, whatever the schedule.
    """
    p, v, m = plan.pipeline_parallel, plan.virtual_stages, plan.num_microbatches
    rounds = max(1, m // p)
    per_round = m // rounds if v > 1 else m
    total = v * m
    warm_up = (v - 1) * per_round + (2 if v > 1 else 1) * (p - 1 - pipeline_rank)
    if plan.pipeline_schedule == "gpipe" and p > 1:
        warm_up = total
    warm_up = min(warm_up, total)
    seen: dict[tuple[str, int], int] = {}

    def action(kind: Literal["forward", "backward"], step: int) -> Action:
        chunk = (step // per_round) % v
        chunk = chunk if kind == "forward" else v - 1 - chunk
        stage = chunk * p + pipeline_rank
        microbatch = seen.get((kind, stage), 0)
        seen[kind, stage] = microbatch + 1
        return Action(kind, stage, microbatch)

    order = [action("forward", step) for step in range(warm_up)]
    for step in range(warm_up, total):
        order += [action("forward", step), action("backward", step - warm_up)]
    return order + [action("backward", step) for step in range(total - warm_up, total)]


class Channels:
    """Messages between neighbouring stages."""

    def __init__(self, grid: Grid, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.grid, self.shape, self.dtype = grid, shape, dtype
        plan = grid.plan
        names = ["forward", "backward"]
        if plan.virtual_stages > 1:
            names += ["forward around", "backward around"]
        self.groups: dict[str, dist.ProcessGroup] = {names[0]: grid.group("pipeline")}
        for name in names[1:]:
            for line in grid.pipeline_lines():
                group = dist.new_group(line)
                if dist.get_rank() in line:
                    self.groups[name] = group
        self.sent: list[tuple[Any, Tensor]] = []
        self._open()

    def _open(self) -> None:
        """Send one number through every channel.

        nccl connects a pair of ranks at its first message and blocks both meanwhile; here all ranks
        do that in the same order, so that none waits in a circle.
        """
        size, own = self.grid.plan.pipeline_parallel, self.grid.rank("pipeline")
        number = torch.zeros(1, device=self.grid.device)
        for name, group in self.groups.items():
            pairs = [(size - 1, 0)] if name.endswith("around") else list(pairwise(range(size)))
            for pair in pairs:
                source, target = pair if name.startswith("forward") else pair[::-1]
                if own == source:
                    dist.send(number, self.grid.pipeline_peer(target), group=group)
                elif own == target:
                    dist.recv(number, self.grid.pipeline_peer(source), group=group)

    def _route(self, kind: str, source: int, target: int) -> tuple[int, int, dist.ProcessGroup]:
        size = self.grid.plan.pipeline_parallel
        around = abs(source % size - target % size) != 1 or (source % size > target % size) != (
            kind == "backward"
        )
        name = f"{kind} around" if around else kind
        peer = self.grid.pipeline_peer
        return peer(source % size), peer(target % size), self.groups[name]

    def send(self, kind: str, source: int, target: int, message: Tensor) -> None:
        """Start to send; the message is kept until it has left."""
        _, to, group = self._route(kind, source, target)
        self.sent = [(work, kept) for work, kept in self.sent if not work.is_completed()]
        message = message.contiguous()
        self.sent.append((dist.isend(message, to, group=group), message))

    def receive(self, kind: str, source: int, target: int) -> Callable[[], Tensor]:
        """Start to receive; the result waits for the message."""
        origin, _, group = self._route(kind, source, target)
        message = torch.empty(self.shape, dtype=self.dtype, device=self.grid.device)
        work = dist.irecv(message, origin, group=group)

        def wait() -> Tensor:
            work.wait()
            return message

        return wait

    def flush(self) -> None:
        """Wait until every message has left."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()


class Pipeline:
    """Runs the stages of this rank over the micro-batches of one step."""

    def __init__(
        self, stages: Sequence[Stage], grid: Grid, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.plan = grid.plan
        self.order = actions(grid.plan, grid.rank("pipeline"))
        self.last_stage = grid.plan.num_stages - 1
        parallel = grid.plan.pipeline_parallel > 1
        self.channels = Channels(grid, shape, dtype) if parallel else None
        self.device = grid.device

    def run(self, batches: Sequence[Batch], scale: float = 1.0) -> Tensor:
        """Accumulate the gradients of all micro-batches; return the loss that this rank computed.

        The summed loss is divided by the tokens that count in the whole global batch; the gradients
        are those of ``scale`` times that.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        waiting: dict[Action, Callable[[], Tensor]] = {}
        inputs_of: dict[tuple[int, int], Tensor] = {}
        outputs_of: dict[tuple[int, int], Any] = {}
        for position, action in enumerate(self.order):
            TRAIL.action = action
            for coming in self.order[position : position + 2]:  # the next message travels meanwhile
                self._expect(coming, waiting)
            stage, key = self.stages[action.stage], (action.stage, action.microbatch)
            received = waiting.pop(action)() if action in waiting else None
            if action.kind == "forward":
                if received is not None:
                    inputs_of[key] = received.requires_grad_()
                output = stage(batches[action.microbatch], inputs_of.get(key))
                if stage.last:
                    output = output / (max(1, batches[action.microbatch].tokens) / scale)
                    total += output.detach()
                else:
                    self._send("forward", action, action.stage + 1, output.detach())
                outputs_of[key] = get_gradient_edge(output)  # the output itself may go
                del output
            else:
                final = action.microbatch == self.plan.num_microbatches - 1
                before_backward(stage, self.plan.zero_stage, last=final)
                torch.autograd.backward(outputs_of.pop(key), received)
                if not stage.first:
                    gradient = inputs_of.pop(key).grad
                    assert gradient is not None
                    self._send("backward", action, action.stage - 1, gradient)
            del received
        if self.channels is not None:
            self.channels.flush()
        return total / scale

    def _expect(self, action: Action, waiting: dict[Action, Callable[[], Tensor]]) -> None:
        """Start to receive what a pass needs from another rank, once."""
        if action in waiting or self.channels is None:
            return
        if action.kind == "forward" and action.stage > 0:
            waiting[action] = self.channels.receive("forward", action.stage - 1, action.stage)
        if action.kind == "backward" and action.stage < self.last_stage:
            waiting[action] = self.channels.receive("backward", action.stage + 1, action.stage)

    def _send(self, kind: str, action: Action, target: int, message: Tensor) -> None:
        assert self.channels is not None
        self.channels.send(kind, action.stage, target, message)
