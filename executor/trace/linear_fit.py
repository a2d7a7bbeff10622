"""Fits the memory and work of traces at several numbers of rows as affine functions of the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np

from executor.trace.timeline import BACKWARD, FORWARD, Timeline
from hardware_profiles.errors import InputError

ROWS: Final = (2, 3, 4)  # traced; with 1 row some kernels skip a copy
NOT_AFFINE: Final = 1e-3  # of the peak: largest deviation of the middle size


def pass_lines(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Describe a forward and a backward pass, traced with each number of rows in ROWS.

    A single timeline gives constants: they are those of its number of rows only.
    """
    first = timelines[0]
    places = [(op.name, op.phase, op.block) for op in first.operators]
    for rows, other in zip(ROWS[1:], timelines[1:], strict=False):
        if [(op.name, op.phase, op.block) for op in other.operators] != places:
            raise InputError(
                f"its operators differ between {ROWS[0]} and {rows} rows: its memory at other "
                "micro-batch sizes is unknown"
            )
    kept = _lines([_live_bytes(t, accumulates=False) for t in timelines])
    freed = _lines([_live_bytes(t, accumulates=True) for t in timelines])
    in_blocks, outside = _gradients_before(first)
    flops, moved = _operator_lines(timelines)
    segment_of: list[int] = []
    segments: list[dict[str, Any]] = []
    start = 0
    for (phase, block), group in groupby(places, key=lambda place: place[1:]):
        stop = start + len(list(group))
        before = in_blocks[start] + outside[start]
        segments.append(
            {
                "phase": phase,
                "block": block or None,
                "block_gradient_bytes": float(in_blocks[start]),
                "outside_gradient_bytes": float(outside[start]),
                "kept": _envelope(kept[start:stop] - [before, 0.0]),
                "freed": _envelope(freed[start:stop]),
                "end": (kept[stop - 1] - [before, 0.0]).tolist(),
                "operators": _counted(np.concatenate([flops, moved], 1)[start:stop]),
                "parameters": _used(first, start, stop),
            }
        )
        segment_of += [len(segments) - 1] * (stop - start)
        start = stop
    lines = np.concatenate([flops, moved], 1)
    operators = {
        phase: _counted(lines[[place[1] == phase for place in places]])
        for phase in (FORWARD, BACKWARD)
    }
    tensors = _tensors_between(timelines, segment_of)
    return {"segments": segments, "operators": operators, "tensors": tensors}


def _live_bytes(timeline: Timeline, *, accumulates: bool) -> np.ndarray:
    """Return the live bytes after every operator.

    ``accumulates``: gradients are added to existing ones and freed at once; otherwise they stay.
    """
    change = np.zeros(len(timeline.operators) + 1)
    for entry in timeline.storages:
        freed = entry.freed
        if entry.gradient_of is not None:
            freed = entry.created if accumulates else None
        change[entry.created] += entry.bytes
        if freed is not None:
            change[freed + 1] -= entry.bytes
    return np.cumsum(change)[:-1]


def _gradients_before(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of parameter gradients before each operator: (in blocks, outside)."""
    in_blocks, outside = (np.zeros(len(timeline.operators) + 1) for _ in range(2))
    for entry in timeline.storages:
        if entry.gradient_of is not None:
            (in_blocks if entry.gradient_of else outside)[entry.created + 1] += entry.bytes
    return np.cumsum(in_blocks), np.cumsum(outside)


def _lines(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return (constant, slope per row) of every operator from its values for ROWS.

    One column: its values, with slopes of 0.
    """
    if len(columns) == 1:
        only = np.asarray(columns[0])
        return np.stack([only, np.zeros_like(only)], axis=1)
    low, middle, high = (np.asarray(column) for column in columns)
    slope = (high - low) / (ROWS[2] - ROWS[0])
    constant = low - ROWS[0] * slope
    off = np.abs(constant + ROWS[1] * slope - middle).max(initial=0.0)
    if off > NOT_AFFINE * high.max(initial=1.0):
        raise InputError(
            f"its memory is not affine in the rows: {off:,.0f} bytes off at {ROWS[1]} rows"
        )
    return np.stack([constant, slope], axis=1)


def _envelope(lines: np.ndarray) -> list[list[float]]:
    """Return the upper envelope of the lines over 1 and more rows."""
    order = np.lexsort((lines[:, 0], lines[:, 1]))  # by slope, then by constant
    kept: list[tuple[float, float]] = []
    for constant, slope in lines[order].tolist():
        while kept and _covered(kept, constant, slope):
            kept.pop()
        kept.append((constant, slope))
    while len(kept) > 1 and sum(kept[0]) <= sum(kept[1]):  # the next is larger from 1 row on
        kept.pop(0)
    return [list(line) for line in kept]


def _covered(kept: list[tuple[float, float]], constant: float, slope: float) -> bool:
    """Whether the last line is nowhere above both its predecessor and a steeper line."""
    last = kept[-1]
    if slope == last[1] or constant >= last[0]:
        return True
    if len(kept) == 1:
        return False
    before = kept[-2]
    crossing = (before[0] - constant) / (slope - before[1])
    return last[0] + last[1] * crossing <= before[0] + before[1] * crossing


def _operator_lines(timelines: Sequence[Timeline]) -> tuple[np.ndarray, np.ndarray]:
    """Return the FLOP and the bytes moved of every operator as lines."""
    flops = [np.array([float(op.flops) for op in t.operators]) for t in timelines]
    moved = [np.array([float(op.bytes) for op in t.operators]) for t in timelines]
    return _lines(flops), _lines(moved)


def _counted(lines: np.ndarray) -> list[list[float]]:
    """Group equal operators: [count, FLOP, FLOP per row, bytes, bytes per row]."""
    kinds = Counter(tuple(line) for line in lines.tolist() if any(line))
    return [[float(n), *line] for line, n in sorted(kinds.items())]


def _used(timeline: Timeline, start: int, stop: int) -> list[list[int]]:
    """Return the parameters that a segment of the forward pass reads.

    Number, elements, trainable.
    """
    numbers = {parameter: n for n, parameter in enumerate(timeline.parameters)}
    found = dict.fromkeys(p for tick, p in timeline.uses if start <= tick < stop)
    return [[numbers[p], p.numel(), int(p.requires_grad)] for p in found]


def _tensors_between(timelines: Sequence[Timeline], segment_of: list[int]) -> list[list[Any]]:
    """Return the tensors that one segment of the forward pass writes and later segments read.

    [segment, [segments that read it], bytes, bytes per row, whether it has a gradient]
    """
    first = timelines[0]
    if any(len(other.storages) != len(first.storages) for other in timelines[1:]):
        raise InputError("its tensors differ between numbers of rows")
    sizes = _lines([np.array([float(entry.bytes) for entry in t.storages]) for t in timelines])
    written = {entry.number: [entry.created] for entry in first.storages if not entry.is_input}
    for tick, number in first.writes:
        written.setdefault(number, []).append(tick)
    readers: dict[tuple[int, int], set[int]] = {}
    for tick, number in first.reads:
        before = [at for at in written.get(number, []) if at < tick]
        if before and segment_of[before[-1]] != segment_of[tick]:
            readers.setdefault((number, segment_of[before[-1]]), set()).add(segment_of[tick])
    return [
        [maker, sorted(who), *sizes[number].tolist(), first.storages[number].floating]
        for (number, maker), who in readers.items()
    ]
