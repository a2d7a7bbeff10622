"""Seconds of one pipeline rank, and of a step by purpose (``step_time``).

Units: seconds, columns of a plan table.
"""

from __future__ import annotations

from functools import cached_property, reduce
from operator import add
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple, replace

from cost_models.arrays import Flag, Real

# names of the parts of a step in every answer
TIME_WORDS: Final = {
    "compute": "computation",
    "recompute": "recomputation",
    "host": "waiting for the host",
    "tensor_communication": "tensor-parallel communication",
    "expert_communication": "expert-parallel communication",
    "context_communication": "exposed context-parallel communication",
    "pipeline_communication": "pipeline sends",
    "bubble": "pipeline bubble",
    "data_communication": "exposed data-parallel communication",
    "optimizer": "the optimizer",
}
MICROBATCH_PARTS: Final = (
    "compute",
    "recompute",
    "host",
    "tensor_communication",
    "expert_communication",
    "context_communication",
    "pipeline_communication",
)


class TimeParts(Struct, frozen=True):
    """Seconds of one step by purpose; they add up to the step."""

    compute: Real
    recompute: Real
    host: Real
    tensor_communication: Real
    expert_communication: Real
    context_communication: Real
    pipeline_communication: Real
    bubble: Real
    data_communication: Real
    optimizer: Real

    @property
    def step(self) -> Real:
        """The whole step."""
        return sum(astuple(self), start=np.asarray(0.0))

    @property
    def communication(self) -> Real:
        """The seconds that links add to the step."""
        inside = self.tensor_communication + self.expert_communication + self.context_communication
        return inside + self.pipeline_communication + self.data_communication


class RankSeconds(Struct, frozen=True, dict=True):
    """Seconds of one pipeline rank: of a micro-batch, and once a step."""

    compute: Real
    recompute: Real
    host: Real
    tensor_communication: Real
    pipeline_communication: Real
    backward: Real  # of ``compute``, ``recompute`` and ``host``, the backward half
    weights: Real  # of ``backward``, the weight gradients that a split backward pass defers
    data_communication: Real  # per step, before any overlap
    optimizer: Real  # per step
    expert_communication: Real = 0.0  # of a micro-batch: tokens sent to experts and back
    context_communication: Real = 0.0  # not hidden by attention
    gathered_forward: Real = 0.0  # of data_communication: before forward passes
    first_gathers: Real = 0.0  # of data_communication: before a first layer can run
    last_reductions: Real = 0.0  # of data_communication: after the last gradient
    replica_communication: Real = 0.0  # as data_communication, between copies of the shards (HSDP)
    replicas_use_other_links: Flag = False  # over other links than data_communication
    tensor_surplus: Real = 0.0  # of ``tensor_communication``, backward less forward
    context_surplus: Real = 0.0  # of ``context_communication``, backward less forward
    hidden_forward: Real = 0.0  # collectives inside layers that a forward pass hides
    hidden_backward: Real = 0.0
    host_backward: Real = 0.0  # of ``host``, in the backward pass
    launches_forward: Real = 0.0  # of operators, which passes may hide
    launches_backward: Real = 0.0

    def times(self, factor: Real) -> RankSeconds:
        """Return the seconds times a factor."""
        others = self.replicas_use_other_links
        longer = RankSeconds(*(part * factor for part in astuple(self)))
        return replace(longer, replicas_use_other_links=others)

    @cached_property
    def microbatch(self) -> Real:
        """One micro-batch, forward and backward."""
        found: Real = reduce(add, (getattr(self, name) for name in MICROBATCH_PARTS))
        return found

    @cached_property
    def backward_pass(self) -> Real:
        """The backward half of a micro-batch, with its share of the communication."""
        passes = self.compute + self.recompute + self.host
        surplus = self.tensor_surplus + self.context_surplus
        return self.backward + 0.5 * (self.microbatch - passes + surplus)

    @cached_property
    def forward_pass(self) -> Real:
        """The forward half."""
        return self.microbatch - self.backward_pass

    @property
    def launches(self) -> tuple[Real, Real]:
        """Seconds of launches of a forward and of a backward pass."""
        return self.launches_forward, self.launches_backward

    @property
    def queued(self) -> tuple[Real, Real]:
        """Seconds of what is launched: a forward and a backward pass, with their collectives."""
        inside = self.tensor_communication + self.context_communication
        surplus = self.tensor_surplus + self.context_surplus
        backward = self.backward - self.host_backward
        forward = self.compute + self.recompute - backward
        return forward + 0.5 * (inside - surplus), backward + 0.5 * (inside + surplus)
