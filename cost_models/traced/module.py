"""A module of unknown layers, described by a trace on fake tensors (``executor.trace.trace``).

The trace lists parameters by tensor and block, and for each pass: which block runs when, the
maximum live bytes of each stretch (linear in the rows of a micro-batch), and the FLOP and bytes of
every operator. The inside of a block is unknown, so blocks are not split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
from msgspec import Struct, field

from cost_models.arrays import Count, Real
from cost_models.partition.tensor_sharding import ceil_share
from cost_models.plan.workload import MASTER_BYTES
from hardware_profiles.fields import convert

OUTSIDE: Final = -1  # block position of parameters and segments outside of all blocks
BACKWARD: Final = "backward"


@dataclass(frozen=True, slots=True)
class Lines:
    """Bytes (or FLOP) by rows: the maximum of lines, constant + per_row x rows."""

    constant: tuple[float, ...]
    per_row: tuple[float, ...]

    def at(self, rows: Count) -> Real:
        """Return the maximum of the lines at ``rows`` rows.

        >>> float(Lines((10.0, 0.0), (1.0, 3.0)).at(4))
        14.0
        >>> float(Lines((10.0, 0.0), (1.0, 3.0)).at(8))
        24.0
        """
        count = np.multiply(1.0, rows)
        values = [a + b * count for a, b in zip(self.constant, self.per_row, strict=True)]
        found: Real = np.max(np.stack(values), axis=0)
        return found


@dataclass(frozen=True, slots=True)
class Operators:
    """Operators of a pass, grouped with counts: arrays of one element a kind."""

    count: tuple[float, ...]
    flops: Lines  # one line a kind
    bytes: Lines


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a pass in which one block runs; bytes."""

    phase: str
    block: int  # position in the blocks, or OUTSIDE
    block_gradients: float  # of parameters of blocks, computed before
    outside_gradients: float  # of parameters outside of blocks, computed before
    kept: Lines  # live, including the parameter gradients of this stretch
    freed: Lines  # live, if these are accumulated into others and freed at once
    end: Lines  # live at its end, as kept
    operators: Operators
    parameters: tuple[
        tuple[int, int, bool], ...
    ]  # parameters that it reads: number, elements, trained


@dataclass(frozen=True, slots=True)
class Handed:
    """A tensor that one stretch of the forward pass makes and later ones read."""

    maker: int  # positions in the segments
    readers: tuple[int, ...]
    size: Lines  # bytes
    has_gradient: bool  # a gradient of equal size is sent back


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward and a backward pass under one kind of recomputation."""

    segments: tuple[Segment, ...]
    forward: Operators
    backward: Operators
    handed: tuple[Handed, ...] = ()


@dataclass(frozen=True, slots=True)
class Tensors:
    """Parameters: rows (sharded over data ranks), elements of a row, number of equal tensors."""

    rows: tuple[int, ...]
    width: tuple[int, ...]
    count: tuple[int, ...]
    trainable: tuple[bool, ...]

    def elements(self, shard_ranks: Count = 1, *, trainable: bool = False) -> Real:
        """Elements on the rank with the largest shard: ceil(rows / ranks) whole rows each.

        Source: torch.distributed.fsdp.fully_shard (torch 2.13), Shard(0) with padding at the end.
        """
        total: Real = np.zeros(np.shape(shard_ranks))
        for rows, width, count, trained in zip(
            self.rows, self.width, self.count, self.trainable, strict=True
        ):
            if trained or not trainable:
                total = total + 1.0 * count * width * ceil_share(rows, shard_ranks)
        return total

    def largest(self, shard_ranks: Count = 1) -> Real:
        """Elements of the largest trained tensor, or of its largest shard."""
        sizes = [
            1.0 * width * ceil_share(rows, shard_ranks)
            for rows, width, trained in zip(self.rows, self.width, self.trainable, strict=True)
            if trained
        ]
        nothing: Real = np.zeros(np.shape(shard_ranks))
        return np.max(np.stack(sizes), axis=0) if sizes else nothing


@dataclass(frozen=True)
class TracedModule:
    """A traced module: parameters, passes, inputs."""

    name: str  # module:package.path:factory
    kind: str  # name of its class
    precision: str
    device: str  # device of the traced operators: cpu or cuda
    block_names: tuple[str, ...]
    blocks: tuple[Tensors, ...]
    outside: Tensors
    buffer_bytes: float
    tied_parameters: int
    passes: Mapping[str, Pass]  # by recompute: none, and full if the module has blocks
    inputs: Mapping[str, Any]
    output_bytes_per_row: float
    notes: tuple[str, ...] = ()
    weight_bytes: float = 4.0  # of an element of weights, gradients and optimizer states

    @cached_property
    def tensors(self) -> Tensors:
        """All parameters."""
        parts = (*self.blocks, self.outside)
        names = ("rows", "width", "count", "trainable")
        return Tensors(*(tuple(x for p in parts for x in getattr(p, n)) for n in names))

    @property
    def num_parameters(self) -> int:
        """Number of parameters; shared tensors count once."""
        return round(float(self.tensors.elements()))

    @property
    def num_trainable_parameters(self) -> int:
        """Parameters that the optimizer updates."""
        return round(float(self.tensors.elements(trainable=True)))


_Line = tuple[float, float]  # constant, per row
_Kind = tuple[float, float, float, float, float]  # count; FLOP and bytes, each constant, per row
_Flag = bool | Literal[0, 1]


class _Parameters(Struct, frozen=True):
    tensors: tuple[tuple[int, int, int, bool], ...]  # rows, width, count, trainable
    name: str = ""


class _Segment(Struct, frozen=True):
    phase: Literal["forward", "backward"]
    block: str | None
    block_gradient_bytes: float
    outside_gradient_bytes: float
    kept: tuple[_Line, ...]
    freed: tuple[_Line, ...]
    end: _Line
    operators: tuple[_Kind, ...] = ()
    parameters: tuple[tuple[int, int, _Flag], ...] = ()


class _Operators(Struct, frozen=True):
    forward: tuple[_Kind, ...]
    backward: tuple[_Kind, ...]


class _Pass(Struct, frozen=True):
    segments: tuple[_Segment, ...]
    operators: _Operators
    tensors: tuple[tuple[int, tuple[int, ...], float, float, _Flag], ...] = ()


class _Document(Struct, frozen=True):
    """The output of ``python -m executor trace-module``."""

    schema_version: Literal[1]
    name: str
    kind: str = field(name="class")
    precision: str
    device: str
    blocks: tuple[_Parameters, ...]
    outside: _Parameters
    buffer_bytes: float
    tied_parameters: int
    passes: dict[str, _Pass]
    inputs: dict[str, Any]
    output_bytes_per_row: float
    notes: tuple[str, ...]
    weight_bytes: float | None = None  # None: as the precision keeps them


def traced_module(document: Mapping[str, Any]) -> TracedModule:
    """Read the output of ``python -m executor trace-module``."""
    found = convert(document, _Document, "trace")
    names = tuple(block.name for block in found.blocks)
    return TracedModule(
        name=found.name,
        kind=found.kind,
        precision=found.precision,
        device=found.device,
        block_names=names,
        blocks=tuple(_tensors(block) for block in found.blocks),
        outside=_tensors(found.outside),
        buffer_bytes=found.buffer_bytes,
        tied_parameters=found.tied_parameters,
        passes={key: _pass(value, names) for key, value in found.passes.items()},
        inputs=found.inputs,
        output_bytes_per_row=found.output_bytes_per_row,
        notes=found.notes,
        weight_bytes=found.weight_bytes or MASTER_BYTES[found.precision],
    )


def _tensors(parameters: _Parameters) -> Tensors:
    rows = parameters.tensors
    return Tensors(
        rows=tuple(row[0] for row in rows),
        width=tuple(row[1] for row in rows),
        count=tuple(row[2] for row in rows),
        trainable=tuple(row[3] for row in rows),
    )


def _pass(found: _Pass, names: tuple[str, ...]) -> Pass:
    place = {name: position for position, name in enumerate(names)}
    segments = tuple(
        Segment(
            phase=segment.phase,
            block=OUTSIDE if segment.block is None else place[segment.block],
            block_gradients=segment.block_gradient_bytes,
            outside_gradients=segment.outside_gradient_bytes,
            kept=_lines(segment.kept),
            freed=_lines(segment.freed),
            end=_lines([segment.end]),
            operators=_operators(segment.operators),
            parameters=tuple((n, size, bool(t)) for n, size, t in segment.parameters),
        )
        for segment in found.segments
    )
    handed = tuple(
        Handed(maker, readers, _lines([(constant, per_row)]), bool(floating))
        for maker, readers, constant, per_row, floating in found.tensors
    )
    operators = found.operators
    return Pass(segments, _operators(operators.forward), _operators(operators.backward), handed)


def _lines(values: Sequence[_Line]) -> Lines:
    return Lines(tuple(a for a, _ in values), tuple(b for _, b in values))


def _operators(kinds: Sequence[_Kind]) -> Operators:
    return Operators(
        tuple(kind[0] for kind in kinds),
        _lines([kind[1:3] for kind in kinds]),
        _lines([kind[3:5] for kind in kinds]),
    )


@dataclass(frozen=True, slots=True)
class Stretch:
    """One segment and the state before it; blocks by position, OUTSIDE for none."""

    segment: Segment
    gathered: tuple[
        int, ...
    ]  # blocks whose forward pass has run and whose backward passes have not
    last_gathered: int
    gathers: tuple[Segment, int] | None  # before its block: the previous segment and block
    coming: int | None  # the block of the next backward pass, if any
    done: tuple[int, ...]  # blocks whose backward passes have ended
    last_reduced: int | None
    reduces: bool  # the gradients of its block are complete at its end

    @property
    def backward(self) -> bool:
        """Whether it belongs to the backward pass."""
        return self.segment.phase == BACKWARD


def stretches(one: Pass) -> tuple[Stretch, ...]:
    """Return the stretches of a pass in order."""
    segments = one.segments
    last: dict[int, int] = {}  # block -> its last backward segment
    for position, segment in enumerate(segments):
        if segment.phase == BACKWARD and segment.block != OUTSIDE:
            last[segment.block] = position
    if segments:
        last[OUTSIDE] = len(segments) - 1
    found: list[Stretch] = []
    started: list[int] = []
    done: list[int] = []
    for position, segment in enumerate(segments):
        block, backward = segment.block, segment.phase == BACKWARD
        gathers = None
        if not backward and block != OUTSIDE and block not in started:
            if position:
                gathers = (segments[position - 1], started[-1] if started else OUTSIDE)
            started.append(block)
        following = (s.block for s in segments[position + 1 :] if s.block not in (OUTSIDE, block))
        ends = backward and last.get(block) == position
        found.append(
            Stretch(
                segment=segment,
                gathered=tuple(b for b in started if b not in done),
                last_gathered=started[-1] if started else OUTSIDE,
                gathers=gathers,
                coming=next(following, None) if backward else None,
                done=tuple(done),
                last_reduced=done[-1] if done else None,
                reduces=ends,
            )
        )
        if ends and block != OUTSIDE:
            done.append(block)
    return tuple(found)
