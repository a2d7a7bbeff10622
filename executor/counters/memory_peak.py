"""Peak memory from the lifetimes of storages: its time, and the live categories.

The category of a storage follows from its whole lifetime: a tensor of the forward pass that
outlives the start of a backward pass is a saved activation, one of the backward pass that outlives
it is a gradient, and so on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

FORWARD, BACKWARD, OPTIMIZER = range(3)
PHASES: Final = ("forward", "backward", "optimizer")
# weights, gradients, optimizer: persistent between steps. activations: saved by the forward pass
# for the backward pass. buffers: gathered weights (storages that are freed and refilled), and
# inputs and outputs of a collective within one phase. temporary: anything else created and freed
# within one phase (recomputed activations too). other: existed before and has no name. logits: only
# where the tracker is given them.
CATEGORIES: Final = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "temporary",
    "other",
)


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Bytes of live tensors on one rank at the peak of a step."""

    peak_bytes: int
    phase: str  # phase of the peak
    parts: dict[str, int]  # category -> bytes at the peak; they add up to peak_bytes
    phase_peaks: dict[str, int]  # phase -> its own peak
    end_bytes: int  # alive after the step
    allocated_bytes: int | None = None  # torch.cuda.max_memory_allocated; None on a CPU
    reserved_bytes: int | None = None  # torch.cuda.max_memory_reserved; None on a CPU
    place: str = ""  # part of the model, if set
    gathered_bytes: int = 0  # of ``buffers``: storages that are freed and refilled

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


@dataclass(slots=True)
class StorageLifetime:
    """One storage at one size; alive from the end of operator ``created`` to that of ``freed``."""

    bytes: int
    created: int
    phase: int
    category: str | None  # None: derived from its lifetime
    hint: str | None = None  # category unless the lifetime makes it a weight or a gradient
    freed: int | None = None
    communicated: bool = False
    storage: Any = None  # weak reference
    stream: int = 0  # on which it was requested


def peak_of(
    lives: Iterable[StorageLifetime], phases: list[int], places: Sequence[str] | None = None
) -> MemoryPeak:
    """Return the peak over lifetimes of storages; ``phases`` and ``places`` are per tick."""
    lives = list(lives)
    phase = _assign_phases(phases)
    change = np.zeros(len(phase) + 1, dtype=np.int64)
    for life in lives:
        change[life.created] += life.bytes
        if life.freed is not None:
            change[life.freed + 1] -= life.bytes
    total = np.cumsum(change)[:-1]
    at = int(total.argmax())
    parts: Counter[str] = Counter()
    gathered = 0
    for life in lives:
        if life.bytes and life.created <= at and (life.freed is None or at <= life.freed):
            parts[_category(life, phase)] += life.bytes
            gathered += life.bytes if life.category == "buffers" else 0
    return MemoryPeak(
        peak_bytes=int(total[at]),
        phase=PHASES[phase[at]],
        parts={name: parts[name] for name in CATEGORIES if parts[name]},
        phase_peaks={
            name: int(total[phase == index].max())
            for index, name in enumerate(PHASES)
            if (phase == index).any()
        },
        end_bytes=sum(life.bytes for life in lives if life.freed is None),
        place=places[at] if places else "",
        gathered_bytes=gathered,
    )


def _assign_phases(phases: list[int]) -> np.ndarray:
    """Assign ticks between a backward pass and the optimizer (gradient norm) to the optimizer."""
    phase = np.array(phases)
    if BACKWARD not in phases or OPTIMIZER not in phases:
        return phase
    following = OPTIMIZER
    for tick in range(len(phase) - 1, phases.index(BACKWARD), -1):
        if phase[tick] == FORWARD and following == OPTIMIZER:
            phase[tick] = OPTIMIZER
        following = phase[tick]
    return phase


def _category(life: StorageLifetime, phase: np.ndarray) -> str:
    """Return the category of a storage, from its name or from the phases of its lifetime."""
    if life.category is not None:
        return life.category
    later = phase[life.created + 1 : None if life.freed is None else life.freed + 1]
    if life.hint is None and life.phase == FORWARD and (later == BACKWARD).any():
        return "activations"
    if life.phase == BACKWARD and (later != BACKWARD).any():
        return "gradients"
    if life.hint is not None:
        return life.hint
    return "buffers" if life.communicated else "temporary"
