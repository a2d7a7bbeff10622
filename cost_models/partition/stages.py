"""What each pipeline rank holds, and how many micro-batches it keeps in flight.

Symbols   p pipeline_parallel   v virtual_stages (stages on one rank)   m num_microbatches
          r rank in the pipeline
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Final, Literal

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.model.spec import ModelSpec, Weight
from cost_models.partition.layer_neighbours import Neighbours, neighbours_on_the_way_back
from cost_models.partition.recomputed_layers import Recomputed
from cost_models.partition.schedules import owned_stages
from cost_models.partition.shared_tensors import bridge_stage, shared_tensors, times_sent
from cost_models.plan.plan import split_layers

EVERY_LAYER: Final = Recomputed()


@dataclass(frozen=True, slots=True)
class PipelineRank:
    """The contents of one pipeline rank, and how many ranks hold just that."""

    index: int  # the rank that is meant: the first one with these contents
    positions: tuple[int, ...]  # all ranks with these contents
    kind_counts: tuple[int, ...]  # layers of each kind
    recomputed: tuple[int, ...]  # of these, layers that are recomputed, if the plan recomputes
    kept_behind: tuple[int, ...]  # those behind the last recomputed layer of their stage
    recomputed_starts: int  # stages with an input whose first layer is recomputed
    largest_stage: tuple[int, ...]  # layers of each kind in the rank's largest (virtual) stage
    first: bool  # holds the embedding
    last: bool  # holds the head and computes the loss
    num_stages: int
    adjoining: bool  # two of its stages follow each other: the turn of a V
    # hidden states (an encoder's output travels with the decoder's): that it sends to other ranks,
    # both ways; that its stages get, from this rank too; of the largest message
    states_sent: int
    states_received: int
    states_at_once: int
    # gradients that are added up over stages: the tensor, and how often this rank sends it
    sums: tuple[tuple[Weight, int], ...] = ()
    # where the decoder begins: in the stage with the embedding, in the one with the head, or in one
    # of its own between them; "": not here
    bridge: Literal["", "first", "last", "between"] = ""
    decoders: int = 0  # stages whose layers read the encoder's output
    stacks: int = 0  # tables of positions that its stages make, one for each stack of each
    neighbours: tuple[Neighbours, ...] = ()  # on the way back, where layers are not of one size

    @property
    def multiplicity(self) -> int:
        """How many ranks have these contents."""
        return len(self.positions)

    @property
    def last_index(self) -> int:
        """The last of them; what ranks keep in flight grows or shrinks from the first to it."""
        return self.positions[-1]

    @property
    def recomputed_share(self) -> Real:
        """Share of the rank's layers that are recomputed, if the plan recomputes."""
        share: Real = sum(self.recomputed) / np.maximum(1, sum(self.kind_counts))
        return share

    @property
    def alone(self) -> bool:
        """Whether one stage is the whole model."""
        return self.first and self.last and self.num_stages == 1


def contents_of(
    model: ModelSpec,
    layer_ranges: Sequence[tuple[int, int]],
    rank_of: Sequence[int],
    rank: int,
    *,
    recomputed: Recomputed = EVERY_LAYER,
) -> PipelineRank:
    """Return the contents of one pipeline rank; ``rank_of``: the rank that owns each stage."""
    owned = [stage for stage, owner in enumerate(rank_of) if owner == rank]
    mine = [_kind_counts(model, layer_ranges[s], range(*layer_ranges[s])) for s in owned]
    again, behind, starts = [], [], 0
    walked: list[tuple[int, bool]] = []
    for stage in owned:
        first, last = layer_ranges[stage]
        layers = recomputed.of_stage(stage, (first, last))
        repeats, here = set(layers), enumerate(model.stage_kinds(first, last), start=first)
        walked += [(kind, i in repeats) for i, kind in here if not model.kinds[kind].idle]
        after = range(layers[-1] + 1 if layers else last, last)
        again.append(_kind_counts(model, (first, last), layers))
        behind.append(_kind_counts(model, (first, last), after))
        starts += stage > 0 and first in layers
    states = states_between(model, layer_ranges)
    ends = [(stage - 1, stage) for stage in owned if stage > 0]
    received = [states[before] for before, _ in ends]
    ends += [(stage + 1, stage) for stage in owned if stage + 1 < len(layer_ranges)]
    sent = [states[min(pair)] for pair in ends if rank_of[pair[0]] != rank]
    kinds = [[model.kinds[i] for i in model.pattern[slice(*layer_ranges[s])]] for s in owned]
    sums = (
        (shared.weight, times_sent({rank_of[stage] for stage in shared.stages}, rank))
        for shared in shared_tensors(model, layer_ranges)
    )
    return PipelineRank(
        index=rank,
        positions=(rank,),
        kind_counts=tuple(int(n) for n in np.sum(mine, axis=0)),
        recomputed=tuple(int(n) for n in np.sum(again, axis=0)),
        kept_behind=tuple(int(n) for n in np.sum(behind, axis=0)),
        recomputed_starts=starts,
        largest_stage=max(mine, key=sum),
        first=owned[0] == 0,
        last=owned[-1] == len(layer_ranges) - 1,
        num_stages=len(owned),
        adjoining=any(b == a + 1 for a, b in pairwise(owned)),
        states_sent=sum(sent),
        states_received=sum(received),
        states_at_once=max(sent, default=0),
        sums=tuple((weight, times) for weight, times in sums if times),
        bridge=_bridge(model, layer_ranges, owned),
        decoders=sum(any(kind.cross_attention for kind in stage) for stage in kinds),
        stacks=sum(len({kind.stack for kind in stage if kind.stack}) for stage in kinds),
        neighbours=neighbours_on_the_way_back(model, walked[::-1]),
    )


def states_between(model: ModelSpec, layer_ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return how many hidden states a stage hands to the next one, for every stage but the last.

    Behind the first layer of a decoder the encoder's output goes along, for the layers to come.
    """
    begin = model.num_layers if model.bridge_layer is None else model.bridge_layer
    return [2 if last > begin else 1 for _, last in layer_ranges[:-1]]


def _bridge(
    model: ModelSpec, layer_ranges: Sequence[tuple[int, int]], owned: Sequence[int]
) -> Literal["", "first", "last", "between"]:
    stage = bridge_stage(model, layer_ranges)
    if stage not in owned:
        return ""
    if stage == 0:
        return "first"
    return "last" if stage == len(layer_ranges) - 1 else "between"


def rank_contents(
    model: ModelSpec,
    layer_ranges: Sequence[tuple[int, int]],
    pipeline_parallel: int,
    *,
    v_shaped: bool = False,
    recomputed: Recomputed = EVERY_LAYER,
) -> list[PipelineRank]:
    """Return the distinct contents of the pipeline ranks; places: ``schedules.owned_stages``."""
    virtual = len(layer_ranges) // pipeline_parallel
    rank_of = [0] * len(layer_ranges)
    for rank in range(pipeline_parallel):
        for stage in owned_stages(rank, pipeline_parallel, virtual, v_shaped=v_shaped):
            rank_of[stage] = rank
    seen: dict[PipelineRank, PipelineRank] = {}
    for rank in range(pipeline_parallel):
        found = contents_of(model, layer_ranges, rank_of, rank, recomputed=recomputed)
        key = replace(found, index=0, positions=())
        old = seen.get(key, replace(found, positions=()))
        seen[key] = replace(old, positions=(*old.positions, rank))
    return list(seen.values())


@lru_cache(maxsize=4096)
def even_rank_contents(
    model: ModelSpec,
    pipeline_parallel: int,
    virtual_stages: int,
    *,
    v_shaped: bool = False,
    recomputed: Recomputed = EVERY_LAYER,
) -> tuple[PipelineRank, ...]:
    """Return ``rank_contents`` for the even split that the search uses."""
    ranges = split_layers(model.num_layers, pipeline_parallel * virtual_stages)
    return tuple(
        rank_contents(
            model,
            ranges,
            pipeline_parallel,
            v_shaped=v_shaped,
            recomputed=recomputed,
        )
    )


def _kind_counts(
    model: ModelSpec, stage: tuple[int, int], layers: Iterable[int]
) -> tuple[int, ...]:
    """Count some layers of a stage by kind."""
    counts = [0] * len(model.kinds)
    kinds = model.stage_kinds(*stage)
    for layer in layers:
        counts[kinds[layer - stage[0]]] += 1
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


Moment = tuple[Real, Real]  # stage inputs in flight, stages whose weight gradients are due


def moments_zero_bubble(
    num_microbatches: Count, pipeline_parallel: Count, virtual_stages: Count, rank: int
) -> tuple[Moment, ...]:
    """Fullest moments of ZB-H1 (v = 1) and its interleaved form, counted in stages.

        (w + 1, r)   and   (w, r + 1)    w = (v - 1) g + p - 1 - r warm-up passes

    Source: Qi et al. (arXiv:2401.10241), sec. 3.1: as many micro-batches as the first rank of 1f1b;
    the order of torch's ScheduleInterleavedZeroBubble (rounds of g micro-batches, m >= p).

    >>> [(float(f), float(d)) for f, d in moments_zero_bubble(8, 4, 1, 2)]
    [(2.0, 2.0), (1.0, 3.0)]
    """
    rounds = np.maximum(1, np.floor_divide(num_microbatches, pipeline_parallel))
    per_round = np.floor_divide(num_microbatches, rounds)
    warm_up = np.multiply(1.0, np.subtract(virtual_stages, 1)) * per_round
    warm_up = warm_up + np.subtract(pipeline_parallel, 1.0 + rank)
    late = 0.0 * warm_up + rank
    return (warm_up + 1.0, late), (warm_up, late + 1.0)


def moments_zbv(pipeline_parallel: Count, rank: int) -> tuple[Moment, ...]:
    """Fullest moments of ZB-V, counted in stages (half a rank's layers).

        (2 p, 0)   (2 p - 1, 1)   (p - 1 - r, 2 r + 1) at the end        m >= 2 p - 1

    Source: Qi et al. (arXiv:2401.10241), sec. 6: p micro-batches of a rank's layers everywhere.
    """
    stages = np.multiply(2.0, pipeline_parallel)
    none = np.zeros_like(stages)
    end = np.subtract(pipeline_parallel, 1.0 + rank)
    return (stages, none), (stages - 1.0, none + 1.0), (end, none + 2.0 * rank + 1.0)


def moments_dualpipev(pipeline_parallel: Count, rank: int) -> tuple[Moment, ...]:
    """Fullest moments of DualPipeV, counted in stages (half a rank's layers).

        (2 p + 1, 0)   (2 p - 1, 1) but for the last rank   (p - 1 - r, r + 1) at the end

    Source: DeepSeek-AI (arXiv:2412.19437), table 2: p + 1 micro-batches; torch's ScheduleDualPipeV.
    """
    stages = np.multiply(2.0, pipeline_parallel)
    none = np.zeros_like(stages)
    end = np.subtract(pipeline_parallel, 1.0 + rank)
    turns = np.where(end > 0, 1.0, 0.0)
    return (stages + 1.0, none), ((stages - 1.0) * turns, turns), (end, none + rank + 1.0)


def bubble_fraction(
    num_microbatches: Count, pipeline_parallel: Count, virtual_stages: Count
) -> Real:
    """Idle time over ideal time of a pipeline of equal stages: (p - 1) / (v m).

    Source: Narayanan et al. (arXiv:2104.04473), sec. 2.2.1 and 2.2.2 (v = 1: GPipe and 1F1B alike).

    >>> float(bubble_fraction(8, 4, 1)), float(bubble_fraction(8, 4, 2))
    (0.375, 0.1875)
    """
    return np.subtract(pipeline_parallel, 1.0) / np.multiply(virtual_stages, num_microbatches)
