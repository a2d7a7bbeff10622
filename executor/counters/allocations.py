"""The storages that are live at the largest tick of each event of a step, by their origin.

An event is a part of a step that the caller names from a tick's phase and place. An origin is all
that a trace knows of a storage: its category, when and where it was made, and by which operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from executor.counters.memory_peak import (
    PHASES,
    StorageLifetime,
    assign_phases,
    category_of,
    live_bytes,
)

Event = Callable[[str, str], str | None]  # (phase, place) -> name; None: not of interest


class Allocation(NamedTuple):
    """Live storages of one origin."""

    category: str  # one of ``CATEGORIES``
    phase: str  # in which they were made
    place: str  # part of the model in which they were made
    operator: str  # that made them; "": they existed before
    collective: str  # the first that read or wrote them; "": none
    named: bool  # a weight, a gradient or a state by name, not by lifetime alone
    frozen: bool  # a weight that is not trained
    is_new: bool  # made in the place of the event's largest tick
    storages: int
    bytes: int


def largest_by_event(
    lives: Iterable[StorageLifetime],
    phases: list[int],
    places: Sequence[str],
    operators: Sequence[str],
    event: Event,
) -> dict[str, list[Allocation]]:
    """Return the allocations at the largest tick of every event, largest first.

    Of equal ticks the last one counts: weights that a step gathers are known as such in the second.
    """
    lives, phase = list(lives), assign_phases(phases)
    total = live_bytes(lives, len(phase))
    names: dict[tuple[int, str], str | None] = {}
    largest: dict[str, int] = {}
    for tick, key in enumerate(zip(phase.tolist(), places, strict=True)):
        if key not in names:
            names[key] = event(PHASES[key[0]], key[1])
        name = names[key]
        if name is not None and total[tick] >= total[largest.setdefault(name, tick)]:
            largest[name] = tick
    return {name: _live_at(lives, tick, phase, places, operators) for name, tick in largest.items()}


def _live_at(
    lives: Iterable[StorageLifetime],
    tick: int,
    phase: np.ndarray,
    places: Sequence[str],
    operators: Sequence[str],
) -> list[Allocation]:
    found: Mapping[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0])
    for life in lives:
        if life.bytes and life.is_live(tick):
            at, named = life.created, life.category is not None
            made = PHASES[phase[at]], places[at], operators[at]
            is_new = places[at] == places[tick]
            kind = category_of(life, phase)
            sums = found[kind, *made, life.collective, named, life.frozen, is_new]
            sums[0] += 1
            sums[1] += life.bytes
    rows = [Allocation(*origin, *sums) for origin, sums in found.items()]
    return sorted(rows, key=lambda row: -row.bytes)
