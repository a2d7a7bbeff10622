"""Contents of each pipeline rank: layers of each kind, messages, shared gradients, neighbours.

Symbols   p pipeline_parallel   v virtual_stages (stages on one rank)   m num_microbatches
          r rank in the pipeline
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from cost_models.arrays import Flag, Real
from cost_models.model.spec import ModelSpec, Weight
from cost_models.partition.recomputed_layers import RecomputedLayers
from cost_models.partition.schedules import owned_stages
from cost_models.partition.shared_tensors import bridge_stage, gradient_sends, shared_tensors
from cost_models.plan.plan import split_layers

NO_LAYER: Final = -1  # in place of a kind: the rank has no such layer
LayerCounts = tuple[int, ...]  # layers of each kind; all, and the recomputed ones among them

ALL_LAYERS: Final = RecomputedLayers()


class PipelineRank(Struct, frozen=True):
    """The contents of one pipeline rank, and all ranks with the same contents."""

    index: int  # the first rank with these contents
    positions: tuple[int, ...]  # all ranks with these contents
    kind_counts: tuple[int, ...]  # layers of each kind
    recomputed: tuple[int, ...]  # recomputed layers of each kind, if the plan recomputes
    # layers of each kind after the last recomputed one of their stage
    after_recomputed: tuple[int, ...]
    recomputed_first_layers: int  # stages with an input whose first layer is recomputed
    first: Flag  # holds the embedding
    last: Flag  # holds the head and computes the loss
    num_stages: int
    has_adjacent_stages: bool  # owns two consecutive stages (the turn of a V)
    # Hidden states (the encoder's output is sent along with the decoder's): sent to other ranks in
    # both directions; received by its stages, from this rank too; in the largest message
    hidden_states_sent: int
    hidden_states_received: int
    max_message_states: int
    # Gradients summed over stages: the tensor, and how often this rank sends it
    shared_gradients: tuple[tuple[Weight, int], ...] = ()
    # Where the decoder begins: in the stage with the embedding, in the one with the head, or in a
    # stage between them; "": not on this rank
    bridge: Literal["", "first", "last", "between"] = ""
    decoder_stages: int = 0  # stages whose layers read the encoder's output
    # position-bias tables that its stages compute: one for each stack of each stage
    position_tables: int = 0
    # empty if all layers have equal size
    layer_neighbours: tuple[LayerNeighbours, ...] = ()

    @property
    def multiplicity(self) -> int:
        """Number of ranks with these contents."""
        return len(self.positions)

    @property
    def recomputed_share(self) -> Real:
        """Share of the rank's layers that are recomputed, if the plan recomputes."""
        share: Real = sum(self.recomputed) / np.maximum(1, sum(self.kind_counts))
        return share

    @property
    def is_whole_model(self) -> Flag:
        """Whether one stage is the whole model."""
        whole: Flag = self.first & self.last & np.equal(self.num_stages, 1)
        return whole


def contents_of_rank(
    model: ModelSpec,
    layer_ranges: Sequence[tuple[int, int]],
    rank_of: Sequence[int],
    rank: int,
    *,
    recomputed: RecomputedLayers = ALL_LAYERS,
) -> PipelineRank:
    """Return the contents of one pipeline rank; ``rank_of``: the rank that owns each stage."""
    owned = [stage for stage, owner in enumerate(rank_of) if owner == rank]
    mine, again, behind, starts = [], [], [], 0
    stage_kinds: list[set[int]] = []
    backward_layers: list[tuple[int, bool]] = []
    for stage in owned:
        first, last = layer_ranges[stage]
        layers = recomputed.of_stage(stage, (first, last))
        kinds = model.stage_kinds(first, last)
        mine.append(_counts(model, kinds))
        again.append(_counts(model, [kinds[layer - first] for layer in layers]))
        behind.append(_counts(model, kinds[layers[-1] + 1 - first :] if layers else []))
        starts += stage > 0 and first in layers
        stage_kinds.append(set(model.pattern[first:last]))
        if len(model.kinds) > 1:
            repeats = set(layers)
            backward_layers += [
                (kind, layer in repeats)
                for layer, kind in enumerate(kinds, start=first)
                if not model.kinds[kind].forward_only
            ]
    states = states_between(model, layer_ranges)
    ends = [(stage - 1, stage) for stage in owned if stage > 0]
    received = [states[before] for before, _ in ends]
    ends += [(stage + 1, stage) for stage in owned if stage + 1 < len(layer_ranges)]
    sent = [states[min(pair)] for pair in ends if rank_of[pair[0]] != rank]
    of_stages = [[model.kinds[kind] for kind in kinds] for kinds in stage_kinds]
    sums = (
        (shared.weight, gradient_sends({rank_of[stage] for stage in shared.stages}, rank))
        for shared in shared_tensors(model, layer_ranges)
    )
    return PipelineRank(
        index=rank,
        positions=(rank,),
        kind_counts=tuple(map(sum, zip(*mine, strict=True))),
        recomputed=tuple(map(sum, zip(*again, strict=True))),
        after_recomputed=tuple(map(sum, zip(*behind, strict=True))),
        recomputed_first_layers=starts,
        first=owned[0] == 0,
        last=owned[-1] == len(layer_ranges) - 1,
        num_stages=len(owned),
        has_adjacent_stages=any(b == a + 1 for a, b in pairwise(owned)),
        hidden_states_sent=sum(sent),
        hidden_states_received=sum(received),
        max_message_states=max(sent, default=0),
        shared_gradients=tuple((weight, times) for weight, times in sums if times),
        bridge=_bridge(model, layer_ranges, owned),
        decoder_stages=sum(any(kind.cross_attention for kind in stage) for stage in of_stages),
        position_tables=sum(
            len({kind.stack for kind in stage if kind.stack}) for stage in of_stages
        ),
        layer_neighbours=backward_neighbours(model, backward_layers[::-1]),
    )


def states_between(model: ModelSpec, layer_ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the number of hidden states that each stage (except the last) sends to the next one.

    After the first decoder layer the encoder's output is sent along, for the layers that follow.
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


def distinct_rank_contents(
    model: ModelSpec,
    layer_ranges: Sequence[tuple[int, int]],
    pipeline_parallel: int,
    *,
    v_shaped: bool = False,
    recomputed: RecomputedLayers = ALL_LAYERS,
) -> list[PipelineRank]:
    """Return the distinct contents of all pipeline ranks (``schedules.owned_stages``)."""
    virtual = len(layer_ranges) // pipeline_parallel
    rank_of = [0] * len(layer_ranges)
    for rank in range(pipeline_parallel):
        for stage in owned_stages(rank, pipeline_parallel, virtual, v_shaped=v_shaped):
            rank_of[stage] = rank
    seen: dict[PipelineRank, PipelineRank] = {}
    for rank in range(pipeline_parallel):
        found = contents_of_rank(model, layer_ranges, rank_of, rank, recomputed=recomputed)
        key = replace(found, index=0, positions=())
        old = seen.get(key, replace(found, positions=()))
        seen[key] = replace(old, positions=(*old.positions, rank))
    return list(seen.values())


@lru_cache(maxsize=4096)
def even_split_contents(
    model: ModelSpec,
    pipeline_parallel: int,
    virtual_stages: int,
    *,
    v_shaped: bool = False,
    recomputed: RecomputedLayers = ALL_LAYERS,
) -> tuple[PipelineRank, ...]:
    """Return ``distinct_rank_contents`` for the even split that the search uses."""
    ranges = split_layers(model.num_layers, pipeline_parallel * virtual_stages)
    return tuple(
        distinct_rank_contents(
            model, ranges, pipeline_parallel, v_shaped=v_shaped, recomputed=recomputed
        )
    )


def _counts(model: ModelSpec, kinds: list[int]) -> tuple[int, ...]:
    """Count layers by kind."""
    if len(model.kinds) == 1:
        return (len(kinds),)
    return tuple(kinds.count(kind) for kind in range(len(model.kinds)))


class LayerNeighbours(Struct, frozen=True):
    """Layers of one kind whose neighbours in the backward pass have the same kinds.

    A layer's weights coexist with the gradients of the block whose backward pass ran before it and
    with the weights of the block that runs next. Layers of equal size have neighbours of that size.
    Elsewhere (a mixture of experts above dense layers, a decoder above an encoder), layers of a
    kind are grouped by the pair of their neighbours' kinds, and the first and the last layer of
    each group are evaluated: between them activations are released and gradients accumulate layer
    by layer, so one of both ends has the largest memory.
    """

    kind: int
    recomputed: bool  # if the plan recomputes
    previous: int  # kind of the layer whose backward pass ran before
    next: int  # kind of the layer whose backward pass runs next
    first: tuple[LayerCounts, LayerCounts]  # layers done before the first of these layers
    last: tuple[LayerCounts, LayerCounts]  # layers done before the last of them
    exists: Flag = True  # the rank has such layers

    @property
    def key(self) -> tuple[int, bool, int, int]:
        """The fields that identify the group."""
        return self.kind, self.recomputed, self.previous, self.next


def backward_neighbours(
    model: ModelSpec, backward_layers: Sequence[tuple[int, bool]]
) -> tuple[LayerNeighbours, ...]:
    """Return the groups in backward order; empty if all layers have the same tensors.

    ``backward_layers``: kind, and whether it is recomputed, of every layer with a backward pass,
    in backward order. The last one has no next layer.
    """
    kinds = [kind for kind, _ in backward_layers]
    if len({model.kinds[kind].weights for kind in set(kinds)}) < 2:
        return ()
    passed, again = [0] * len(model.kinds), [0] * len(model.kinds)
    found: dict[tuple[int, bool, int, int], LayerNeighbours] = {}
    sides = zip([NO_LAYER, *kinds], [*kinds[1:], NO_LAYER], strict=False)
    for (kind, repeats), (behind, ahead) in zip(backward_layers, sides, strict=True):
        before = tuple(passed), tuple(again)
        key = (kind, repeats, behind, ahead)
        first = found[key].first if key in found else before
        found[key] = LayerNeighbours(*key, first, before)
        passed[kind] += 1
        again[kind] += repeats
    return tuple(found.values())
