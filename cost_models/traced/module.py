"""A module of unknown layers, as a trace on fake tensors describes it (``executor.trace.trace``).

Its parameters are known tensor by tensor and block by block. Of its passes it is known which block
is at work when, the most that lives in each stretch (lines in the rows of a micro-batch), and what
every operator computes and moves. What happens inside a block is not known: nothing is cut there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.partition.tensor_sharding import ceil_share
from hardware_profiles.errors import InputError

SCHEMA_VERSION: Final = 1
OUTSIDE: Final = -1  # of all blocks: position of what lies around them
FORWARD: Final = "forward"
BACKWARD: Final = "backward"


@dataclass(frozen=True, slots=True)
class Lines:
    """Bytes (or FLOP) by rows: the largest of some lines, constant + per_row x rows."""

    constant: tuple[float, ...]
    per_row: tuple[float, ...]

    def at(self, rows: Count) -> Real:
        """Return the largest line at so many rows.

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
    """Operators of a pass, equal ones counted: arrays of one element a kind."""

    count: tuple[float, ...]
    flops: Lines  # one line a kind
    bytes: Lines


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a pass in which one block is at work; bytes."""

    phase: str
    block: int  # position in the blocks, or OUTSIDE
    block_gradients: float  # of parameters of blocks, made before
    outside_gradients: float  # of parameters outside of blocks, made before
    kept: Lines  # live, with the gradients of parameters made in this stretch
    freed: Lines  # live, where they are added to others' and freed at once
    end: Lines  # live at its end, as kept
    operators: Operators
    parameters: tuple[tuple[int, int, bool], ...]  # that it reads: number, elements, trained


@dataclass(frozen=True, slots=True)
class Handed:
    """A tensor that one stretch of the forward pass makes and later ones read."""

    maker: int  # positions in the segments
    readers: tuple[int, ...]
    size: Lines  # bytes
    has_gradient: bool  # one as large comes back


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward and a backward pass under one kind of recomputation."""

    segments: tuple[Segment, ...]
    forward: Operators
    backward: Operators
    handed: tuple[Handed, ...] = ()


@dataclass(frozen=True, slots=True)
class Tensors:
    """Parameters: rows (which data ranks share out), elements of a row, and how many alike."""

    rows: tuple[int, ...]
    width: tuple[int, ...]
    count: tuple[int, ...]
    trainable: tuple[bool, ...]

    def elements(self, shard_ranks: Count = 1, *, trainable: bool = False) -> Real:
        """Elements that the fullest of so many ranks holds: ceil(rows / ranks) whole rows each.

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
        """Elements of the largest trained tensor, or of its largest share."""
        sizes = [
            1.0 * width * ceil_share(rows, shard_ranks)
            for rows, width, trained in zip(self.rows, self.width, self.trainable, strict=True)
            if trained
        ]
        nothing: Real = np.zeros(np.shape(shard_ranks))
        return np.max(np.stack(sizes), axis=0) if sizes else nothing


@dataclass(frozen=True)
class TracedModule:
    """What a trace says of a module."""

    name: str  # module:package.path:factory
    kind: str  # name of its class
    precision: str
    device: str  # whose operators were followed: cpu or cuda
    block_names: tuple[str, ...]
    blocks: tuple[Tensors, ...]
    outside: Tensors
    buffer_bytes: float
    tied_parameters: int
    passes: Mapping[str, Pass]  # by recompute: none, and full where there are blocks
    inputs: Mapping[str, Any]
    output_bytes_per_row: float
    notes: tuple[str, ...] = ()

    @cached_property
    def tensors(self) -> Tensors:
        """All parameters."""
        parts = (*self.blocks, self.outside)
        names = ("rows", "width", "count", "trainable")
        return Tensors(*(tuple(x for p in parts for x in getattr(p, n)) for n in names))

    @property
    def num_parameters(self) -> int:
        """Every parameter once."""
        return round(float(self.tensors.elements()))

    @property
    def num_trainable_parameters(self) -> int:
        """Parameters that the optimizer updates."""
        return round(float(self.tensors.elements(trainable=True)))


def traced_module(document: Mapping[str, Any]) -> TracedModule:
    """Read what ``python -m executor trace`` prints."""
    if document.get("schema_version") != SCHEMA_VERSION:
        raise InputError(
            f"trace: schema_version = {document.get('schema_version')!r} (must be {SCHEMA_VERSION})"
        )
    names = tuple(block["name"] for block in document["blocks"])
    return TracedModule(
        name=document["name"],
        kind=document["class"],
        precision=document["precision"],
        device=document["device"],
        block_names=names,
        blocks=tuple(_tensors(block["tensors"]) for block in document["blocks"]),
        outside=_tensors(document["outside"]["tensors"]),
        buffer_bytes=float(document["buffer_bytes"]),
        tied_parameters=document["tied_parameters"],
        passes={key: _pass(value, names) for key, value in document["passes"].items()},
        inputs=document["inputs"],
        output_bytes_per_row=float(document["output_bytes_per_row"]),
        notes=tuple(document["notes"]),
    )


def _tensors(values: list[list[Any]]) -> Tensors:
    return Tensors(*(tuple(row[i] for row in values) for i in range(4)))


def _pass(values: Mapping[str, Any], names: tuple[str, ...]) -> Pass:
    place = {name: position for position, name in enumerate(names)}
    segments = tuple(
        Segment(
            phase=segment["phase"],
            block=OUTSIDE if segment["block"] is None else place[segment["block"]],
            block_gradients=segment["block_gradient_bytes"],
            outside_gradients=segment["outside_gradient_bytes"],
            kept=_lines(segment["kept"]),
            freed=_lines(segment["freed"]),
            end=_lines([segment["end"]]),
            operators=_operators(segment.get("operators", [])),
            parameters=tuple((n, size, bool(t)) for n, size, t in segment.get("parameters", [])),
        )
        for segment in values["segments"]
    )
    operators = values["operators"]
    handed = tuple(
        Handed(maker, tuple(readers), _lines([[constant, per_row]]), bool(floating))
        for maker, readers, constant, per_row, floating in values.get("tensors", [])
    )
    return Pass(segments, _operators(operators[FORWARD]), _operators(operators[BACKWARD]), handed)


def _lines(values: list[list[float]]) -> Lines:
    return Lines(tuple(a for a, _ in values), tuple(b for _, b in values))


def _operators(values: list[list[float]]) -> Operators:
    return Operators(
        tuple(row[0] for row in values),
        _lines([row[1:3] for row in values]),
        _lines([row[3:5] for row in values]),
    )
