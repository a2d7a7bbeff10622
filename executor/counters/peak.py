"""The peak over the lives of storages: when it was, and what was alive.

What a storage *is* follows from its whole life: a tensor of the forward pass that outlives the
start of a backward pass is a saved activation, one of the backward pass that outlives it is a
gradient, and so on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

FORWARD, BACKWARD, OPTIMIZER = range(3)
PHASES: Final = ("forward", "backward", "optimizer")
# weights, gradients, optimizer: kept between steps. activations: saved by the forward pass for the
# backward pass. buffers: gathered weights (storages that are freed and refilled), and what a
# collective reads or writes within one phase. temporary: anything else that is made and freed
# within one phase (recomputed activations too). other: what existed before and has no name.
# logits: only where the tracker is told which tensors are logits.
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
    """Bytes of live tensors on one rank at the worst moment of a step."""

    peak_bytes: int
    phase: str  # in which the peak falls
    parts: dict[str, int]  # category -> bytes at the peak; they add up to peak_bytes
    phase_peaks: dict[str, int]  # phase -> its own peak
    end_bytes: int  # still alive when the step was over
    allocated_bytes: int | None = None  # torch.cuda.max_memory_allocated; None on a CPU
    reserved_bytes: int | None = None  # torch.cuda.max_memory_reserved; None on a CPU
    place: str = ""  # in the model, where places were told
    gathered_bytes: int = 0  # of ``buffers``: storages that are freed and refilled

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


@dataclass(slots=True)
class Life:
    """One storage at one size; alive from the end of operator ``born`` to that of ``died``."""

    bytes: int
    born: int
    phase: int
    category: str | None  # None: told by its life
    hint: str | None = None  # a category for what its life does not name weights or gradients
    died: int | None = None
    communicated: bool = False
    storage: Any = None  # weak reference


def peak_of(
    lives: Iterable[Life], phases: list[int], places: Sequence[str] | None = None
) -> MemoryPeak:
    """Return the peak over lives of storages; phase, and place, are those of every tick."""
    lives = list(lives)
    phase = _settle(phases)
    change = np.zeros(len(phase) + 1, dtype=np.int64)
    for life in lives:
        change[life.born] += life.bytes
        if life.died is not None:
            change[life.died + 1] -= life.bytes
    total = np.cumsum(change)[:-1]
    at = int(total.argmax())
    parts: Counter[str] = Counter()
    gathered = 0
    for life in lives:
        if life.bytes and life.born <= at and (life.died is None or at <= life.died):
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
        end_bytes=sum(life.bytes for life in lives if life.died is None),
        place=places[at] if places else "",
        gathered_bytes=gathered,
    )


def _settle(phases: list[int]) -> np.ndarray:
    """Count what lies between a backward pass and an optimizer (gradient norm) to the optimizer."""
    phase = np.array(phases)
    if BACKWARD not in phases or OPTIMIZER not in phases:
        return phase
    following = OPTIMIZER
    for tick in range(len(phase) - 1, phases.index(BACKWARD), -1):
        if phase[tick] == FORWARD and following == OPTIMIZER:
            phase[tick] = OPTIMIZER
        following = phase[tick]
    return phase


def _category(life: Life, phase: np.ndarray) -> str:
    """Return what a storage was, from its name or from the phases that it lived through."""
    if life.category is not None:
        return life.category
    later = phase[life.born + 1 : None if life.died is None else life.died + 1]
    if life.hint is None and life.phase == FORWARD and (later == BACKWARD).any():
        return "activations"
    if life.phase == BACKWARD and (later != BACKWARD).any():
        return "gradients"
    if life.hint is not None:
        return life.hint
    return "buffers" if life.communicated else "temporary"
