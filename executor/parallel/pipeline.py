"""Pipeline parallelism: runs the passes of a schedule and sends messages between stages.

The order of passes and the placement of stages come from ``cost_models.partition.schedules``.
Messages of one kind (activations or gradients) in one direction (to a higher or a lower rank) share
a channel, used by both ends in the same order. Sends never block: a rank waits only for the input
of its next pass, so an order without circular dependencies cannot deadlock. A received activation
lives until its backward pass, an output until it is sent. Consecutive stages on one rank exchange
no message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from cost_models.partition.schedules import Action, actions, rank_of_stage
from executor.activity import ACTIVITY
from executor.data.batch import Batch
from executor.ops.deferred_weight_gradients import DeferredGradients, deferred
from executor.parallel.data_parallel import (
    compute_weight_gradients,
    configure_backward,
    defer_other_gradients,
    finish_backward,
    wait_for_gradients,
)
from executor.parallel.mesh import UNLIMITED, ProcessGrid
from executor.parallel.stage_interface import PipelineStage

Message = Callable[[], Tensor]  # waits for the tensor
_BACKWARD: Final = ("backward", "backward_input")
_WEIGHTS: Final = ("backward", "backward_weight")


def unobserved(action: Action | None) -> None:
    """Ignore the begin of a pass; None: the end of the last one."""


class Channels:
    """Point-to-point messages between stages on different ranks."""

    def __init__(
        self, grid: ProcessGrid, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        """Open the channels. ``shapes``: shape of each stage's output but the last's."""
        self.grid, self.shapes, self.dtype = grid, shapes, dtype
        plan = grid.plan
        self.rank_of = [rank_of_stage(plan, stage) for stage in range(plan.num_stages)]
        # the pairs of ranks that use a channel, in the order of the stages
        self.pairs: dict[str, dict[tuple[int, int], None]] = {}
        for stage in range(plan.num_stages - 1):
            for kind, ends in (("forward", (stage, stage + 1)), ("backward", (stage + 1, stage))):
                source, target = (self.rank_of[end] for end in ends)
                if source != target:
                    name = self._name(kind, source, target)
                    self.pairs.setdefault(name, {})[source, target] = None
        self.groups: dict[str, dist.ProcessGroup] = {}
        for name in self.pairs:
            if not self.groups:
                self.groups[name] = grid.group("pipeline")
                continue
            for line in grid.pipeline_lines():
                group = dist.new_group(line, timeout=UNLIMITED)
                if dist.get_rank() in line:
                    self.groups[name] = group
        self.sent: list[tuple[Any, Tensor]] = []
        self._open()

    @staticmethod
    def _name(kind: str, source: int, target: int) -> str:
        return f"{kind} {'up' if target > source else 'down'}"

    def _open(self) -> None:
        """Send one number through every channel.

        nccl connects a pair of ranks at its first message and blocks both meanwhile; here all ranks
        do that in the same order, which rules out a deadlock.
        """
        own = self.grid.rank("pipeline")
        number = torch.zeros(1, device=self.grid.device)
        for name, group in self.groups.items():
            for source, target in sorted(self.pairs[name]):
                if own == source:
                    dist.send(number, self.grid.pipeline_peer(target), group=group)
                elif own == target:
                    dist.recv(number, self.grid.pipeline_peer(source), group=group)

    def _route(self, kind: str, source: int, target: int) -> tuple[int, int, dist.ProcessGroup]:
        ranks = self.rank_of[source], self.rank_of[target]
        peers = [self.grid.pipeline_peer(rank) for rank in ranks]
        return peers[0], peers[1], self.groups[self._name(kind, *ranks)]

    def from_environment(self, stage: int) -> bool:
        """Return whether this rank owns a stage."""
        return self.rank_of[stage] == self.grid.rank("pipeline")

    def send(self, kind: str, source: int, target: int, message: Tensor) -> None:
        """Start a send; the message is kept alive until it is sent."""
        _, to, group = self._route(kind, source, target)
        self.sent = [(work, pending) for work, pending in self.sent if not work.is_completed()]
        message = message.contiguous()
        self.sent.append((dist.isend(message, to, group=group), message))

    def receive(self, kind: str, source: int, target: int) -> Message:
        """Start a receive; calling the result waits for the message."""
        origin, _, group = self._route(kind, source, target)
        shape = self.shapes[min(source, target)]
        message = torch.empty(shape, dtype=self.dtype, device=self.grid.device)
        work = dist.irecv(message, origin, group=group)

        def wait() -> Tensor:
            work.wait()
            return message

        return wait

    def flush(self) -> None:
        """Wait until every message is sent."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()


class Pipeline:
    """Runs the stages of this rank over the micro-batches of one step."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        grid: ProcessGrid,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
    ) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.plan = grid.plan
        self.order = actions(grid.plan, grid.rank("pipeline"))
        # the last actions of a stage that compute gradients of inputs, and of weights
        self.last_input = {a.stage: a for a in self.order if a.kind in _BACKWARD}
        self.last_weight = {a.stage: a for a in self.order if a.kind in _WEIGHTS}
        self.last_stage = grid.plan.num_stages - 1
        parallel = grid.plan.pipeline_parallel > 1
        self.channels = Channels(grid, shapes, dtype) if parallel else None
        self.device = grid.device
        self.observe: Callable[[Action | None], None] = unobserved  # called before every pass

    def run(self, batches: Sequence[Batch], scale: float = 1.0) -> Tensor:
        """Accumulate the gradients of all micro-batches; return the loss computed on this rank.

        The summed loss is divided by the number of loss tokens in the global batch; the gradients
        are those of ``scale`` times that.
        """
        step = _Step(batches, scale)
        step.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for position, action in enumerate(self.order):
            ACTIVITY.action = action
            self.observe(action)
            for upcoming in self.order[position : position + 2]:  # receives ahead, to overlap
                self._expect(upcoming, step.waiting)
            if action.kind == "forward":
                self._forward(action, step)
            elif action.kind == "backward_weight":
                key = (action.stage, action.microbatch)
                last = action == self.last_weight[action.stage]
                stage = self.stages[action.stage]
                compute_weight_gradients(stage, self.plan.zero_stage, step.due.pop(key), last=last)
            else:
                self._backward(action, step)
        self.observe(None)
        for stage in self.stages.values():
            wait_for_gradients(stage)
        if self.channels is not None:
            self.channels.flush()
        return step.loss / scale

    def _forward(self, action: Action, step: _Step) -> None:
        stage, key = self.stages[action.stage], (action.stage, action.microbatch)
        batch = step.batches[action.microbatch]
        if not stage.first:
            step.inputs_of[key] = step.waiting.pop(_arrival(action))().requires_grad_()
        output = stage(batch, step.inputs_of.get(key))
        if stage.last:
            output = output / (max(1, batch.tokens) / step.scale)
            step.loss += output.detach()
        else:
            self._hand_over("forward", action, action.stage + 1, output.detach(), step)
        step.outputs_of[key] = get_gradient_edge(output)  # frees the output itself

    def _backward(self, action: Action, step: _Step) -> None:
        """Run one backward pass, or its first half: gradients of the input."""
        stage, key = self.stages[action.stage], (action.stage, action.microbatch)
        received = None if stage.last else step.waiting.pop(_arrival(action))()
        output, zero = step.outputs_of.pop(key), self.plan.zero_stage
        if action.kind == "backward":
            last = action == self.last_weight[action.stage]
            configure_backward(stage, zero, last=last)
            torch.autograd.backward(output, received)
            if last:
                finish_backward(stage)
        else:
            last = action == self.last_input[action.stage]
            configure_backward(stage, zero, last=last, complete=False)
            with deferred() as step.due[key]:
                torch.autograd.backward(output, received)
            defer_other_gradients(stage, zero, step.due[key])
        if not stage.first:
            gradient = step.inputs_of.pop(key).grad
            assert gradient is not None
            self._hand_over("backward", action, action.stage - 1, gradient, step)

    def _expect(self, action: Action, waiting: dict[Arrival, Message]) -> None:
        """Start to receive a pass's input from another rank, once."""
        arrival = _arrival(action)
        kind, stage, _ = arrival
        source = stage - 1 if kind == "forward" else stage + 1
        if (
            self.channels is None
            or arrival in waiting
            or action.kind == "backward_weight"
            or not 0 <= source <= self.last_stage
            or self.channels.from_environment(source)
        ):
            return
        waiting[arrival] = self.channels.receive(kind, source, stage)

    def _hand_over(
        self, kind: str, action: Action, target: int, message: Tensor, step: _Step
    ) -> None:
        """Pass a tensor on to the stage that needs it next."""
        if self.channels is None or self.channels.from_environment(target):
            step.waiting[kind, target, action.microbatch] = lambda: message
        else:
            self.channels.send(kind, action.stage, target, message)


Arrival = tuple[str, int, int]  # kind, receiving stage, micro-batch


def _arrival(action: Action) -> Arrival:
    """Return the key of the message that an action waits for."""
    kind = "forward" if action.kind == "forward" else "backward"
    return kind, action.stage, action.microbatch


class _Step:
    """State of one step, by stage and micro-batch."""

    def __init__(self, batches: Sequence[Batch], scale: float) -> None:
        self.batches, self.scale = batches, scale
        self.waiting: dict[Arrival, Message] = {}
        self.inputs_of: dict[tuple[int, int], Tensor] = {}
        self.outputs_of: dict[tuple[int, int], Any] = {}
        self.due: dict[tuple[int, int], DeferredGradients] = {}  # deferred weight gradients
        self.loss: Tensor
