"""What each pipeline rank holds, and how many micro-batches it keeps in flight.

Symbols   p pipeline_parallel   v virtual_stages (stages on one rank)   m num_microbatches
          r rank in the pipeline
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.model import ModelSpec
from cost_models.plan import split_layers


@dataclass(frozen=True, slots=True)
class PipelineRank:
    """The contents of one pipeline rank, and how many ranks hold just that."""

    index: int  # the first rank with these contents: it keeps the most micro-batches in flight
    kind_counts: tuple[int, ...]  # layers of each kind
    largest_stage: tuple[int, ...]  # layers of each kind in the rank's largest (virtual) stage
    first: bool  # holds the embedding
    last: bool  # holds the head and computes the loss
    multiplicity: int


def rank_contents(
    model: ModelSpec, layer_ranges: Sequence[tuple[int, int]], pipeline_parallel: int
) -> list[PipelineRank]:
    """Return the distinct contents of the pipeline ranks; stage s lives on rank s mod p."""
    stages = [_kind_counts(model, first, last) for first, last in layer_ranges]
    seen: dict[tuple[object, ...], PipelineRank] = {}
    for rank in range(pipeline_parallel):
        mine = stages[rank::pipeline_parallel]
        total = tuple(int(n) for n in np.sum(mine, axis=0))
        largest = max(mine, key=sum)
        first, last = rank == 0, rank == pipeline_parallel - 1
        key = (total, largest, first, last)
        old = seen.get(key)
        seen[key] = PipelineRank(
            index=old.index if old else rank,
            kind_counts=total,
            largest_stage=largest,
            first=first,
            last=last,
            multiplicity=old.multiplicity + 1 if old else 1,
        )
    return list(seen.values())


@lru_cache(maxsize=4096)
def even_rank_contents(
    model: ModelSpec, pipeline_parallel: int, virtual_stages: int
) -> tuple[PipelineRank, ...]:
    """Return ``rank_contents`` for the even split that the search uses."""
    ranges = split_layers(model.num_layers, pipeline_parallel * virtual_stages)
    return tuple(rank_contents(model, ranges, pipeline_parallel))


def _kind_counts(model: ModelSpec, first: int, last: int) -> tuple[int, ...]:
    counts = [0] * len(model.kinds)
    for kind in model.pattern[first:last]:
        counts[kind] += 1
    return tuple(counts)


def in_flight_gpipe(num_microbatches: Count) -> Real:
    """Micro-batches whose activations a rank keeps under GPipe: all of them.

    Source: Huang et al., GPipe (arXiv:1811.06965), sec. 2.3.
    """
    return np.multiply(1.0, num_microbatches)


def in_flight_1f1b(num_microbatches: Count, pipeline_parallel: Count, rank: int) -> Real:
    """Micro-batches in flight under 1F1B: min(m, p - r).

    Source: Narayanan et al. (arXiv:2104.04473), sec. 2.2.1 (PipeDream-Flush).

    >>> float(in_flight_1f1b(16, 4, 0)), float(in_flight_1f1b(16, 4, 3))
    (4.0, 1.0)
    """
    return np.multiply(1.0, np.minimum(num_microbatches, np.subtract(pipeline_parallel, rank)))


def in_flight_interleaved(
    num_microbatches: Count, pipeline_parallel: Count, virtual_stages: Count, rank: int
) -> Real:
    """Stage inputs in flight under interleaved 1F1B, counted in stages (1/v of a rank's layers).

        warm-up  min(v m, (v - 1) g + 2 (p - 1 - r)),
        g = m / max(1, floor(m / p)) micro-batches a round
        in flight  min(v m, warm-up + 1)

    Source: Narayanan et al. (arXiv:2104.04473), sec. 2.2.2; the warm-up of torch's
    ScheduleInterleaved1F1B (rounds of g micro-batches).
    """
    rounds = np.maximum(1, np.floor_divide(num_microbatches, pipeline_parallel))
    per_round = np.floor_divide(num_microbatches, rounds)
    total = np.multiply(virtual_stages, num_microbatches)
    warm_up = (np.subtract(virtual_stages, 1)) * per_round + 2 * (
        np.subtract(pipeline_parallel, 1) - rank
    )
    flying: Real = np.multiply(1.0, np.minimum(total, warm_up + 1))
    return flying


def bubble_fraction(
    num_microbatches: Count, pipeline_parallel: Count, virtual_stages: Count
) -> Real:
    """Idle time over ideal time of a pipeline of equal stages: (p - 1) / (v m).

    Source: Narayanan et al. (arXiv:2104.04473), sec. 2.2.1 and 2.2.2 (v = 1: GPipe and 1F1B alike).

    >>> float(bubble_fraction(8, 4, 1)), float(bubble_fraction(8, 4, 2))
    (0.375, 0.1875)
    """
    return np.subtract(pipeline_parallel, 1.0) / np.multiply(virtual_stages, num_microbatches)
