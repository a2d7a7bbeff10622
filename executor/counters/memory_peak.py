"""Peak memory from the lifetimes of storages: its time, and the live categories.

The category of a storage follows from its whole lifetime: a tensor of the forward pass that
outlives the start of a backward pass is a saved activation, one of the backward pass that outlives
it is a gradient, and so on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hardware_profiles.fields import names_in
from hardware_profiles.record import Record

FORWARD, BACKWARD, OPTIMIZER = range(3)
PHASES: Final = ("forward", "backward", "optimizer")
# weights, gradients, optimizer: persistent between steps. activations: saved by the forward pass
# for the backward pass. buffers: gathered weights (storages that are freed and refilled), and
# inputs and outputs of a collective within one phase. temporary: anything else created and freed
# within one phase (recomputed activations too). other: existed before and has no name. logits: only
# where the tracker is given them.
CATEGORIES: Final = names_in("""
    weights gradients optimizer activations logits buffers temporary other
""")


class MemoryPeak(Record, frozen=True):
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


@dataclass(slots=True)
class StorageLifetime:
    """One storage at one size; alive from the end of operator ``created`` to that of ``freed``."""

    bytes: int
    created: int
    phase: int
    category: str | None  # None: derived from its lifetime
    hint: str | None = None  # category unless the lifetime makes it a weight or a gradient
    freed: int | None = None
    collective: str = ""  # the first collective or message that read or wrote it
    storage: Any = None  # weak reference
    stream: int = 0  # on which it was requested
    frozen: bool = False  # a weight that is not trained

    def is_live(self, tick: int) -> bool:
        """Whether the storage is alive at a tick."""
        return self.created <= tick and (self.freed is None or tick <= self.freed)


def peak_of(
    lives: Iterable[StorageLifetime], phases: list[int], places: Sequence[str] | None = None
) -> MemoryPeak:
    """Return the peak over lifetimes of storages; ``phases`` and ``places`` are per tick."""
    lives = list(lives)
    phase = assign_phases(phases)
    total = live_bytes(lives, len(phase))
    at = int(total.argmax())
    parts: Counter[str] = Counter()
    gathered = 0
    for life in lives:
        if life.bytes and life.is_live(at):
            parts[category_of(life, phase)] += life.bytes
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


def live_bytes(lives: Iterable[StorageLifetime], ticks: int) -> np.ndarray:
    """Return the live bytes at every tick."""
    change = np.zeros(ticks + 1, dtype=np.int64)
    for life in lives:
        change[life.created] += life.bytes
        if life.freed is not None:
            change[life.freed + 1] -= life.bytes
    return np.cumsum(change)[:-1]


def assign_phases(phases: list[int]) -> np.ndarray:
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


def category_of(life: StorageLifetime, phase: np.ndarray) -> str:
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
    return "buffers" if life.collective else "temporary"
