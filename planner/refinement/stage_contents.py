"""Contents of pipeline stages with arbitrary layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

from msgspec import Struct, structs

from cost_models.model.spec import ModelSpec
from cost_models.partition.recomputed_layers import RecomputedLayers
from cost_models.partition.schedules import ranks_of_stages
from cost_models.partition.stages import PipelineRank, contents_of_rank
from cost_models.plan.plan import Plan, split_layers

Ranges = Sequence[tuple[int, int]]
Pair = tuple[int, int]  # layers [first, last)


class StageContents(Struct, dict=True):
    """Contents of the stages of a pipeline with one stage on each rank.

    The time of a stage depends on its layers and on whether it is the first or the last one; its
    memory also on its position. A key contains the kinds of the layers and, for models with encoder
    and decoder, the tensors that a stage sends.

    Where a rank has several stages and all layers are of one kind, a *stage* is all of a rank's:
    time and memory depend on their number of layers together (``split_over_stages``).
    """

    model: ModelSpec
    stages: int
    owner: tuple[int, ...] = ()  # the rank of each stage; empty: one stage on each rank
    _contents: dict[tuple[int, int, int, int], PipelineRank] = {}
    _keys: dict[tuple[int, int, int], Any] = {}
    _ranges: dict[tuple[int, int], list[Pair]] = {}

    @classmethod
    def of_plan(cls, model: ModelSpec, plan: Plan) -> StageContents:
        """Return the contents for the pipeline of a plan, which searches for one model share."""
        owner = tuple(ranks_of_stages(plan)) if plan.virtual_stages > 1 else ()
        return _contents(model, plan.pipeline_parallel, owner)

    @cached_property
    def least(self) -> list[int]:
        """Fewest layers of each stage: the first and the last may hold embedding and head alone."""
        owner = self.owner or range(self.stages)
        inner = Counter(owner[1:-1])
        return [inner[rank] for rank in range(self.stages)]

    def split_over_stages(self, rank: int, layers: int) -> list[int]:
        """Return the layers of each of a rank's stages, as even as possible."""
        last = len(self.owner) - 1
        mine = [s for s, owner in enumerate(self.owner) if owner == rank]
        each, more = divmod(layers, len(mine))
        # the stages with embedding or head have no more layers than the others
        order = sorted(range(len(mine)), key=lambda n: mine[n] in (0, last))
        sizes = [each] * len(mine)
        for n in order[:more]:
            sizes[n] += 1
        return sizes

    def ranges_of(self, layers: Sequence[int]) -> tuple[Pair, ...]:
        """Return the layers of every stage; ``layers``: their number on each rank."""
        left = [self.split_over_stages(rank, n) for rank, n in enumerate(layers)]
        ends = list(accumulate(left[rank].pop(0) for rank in self.owner))
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    def layers_of_ranks(self, ranges: Sequence[Pair]) -> list[int]:
        """Return the number of layers on each rank; ``ranges``: of every stage."""
        pairs = list(zip(self.owner, ranges, strict=True))
        return [
            sum(b - a for owner, (a, b) in pairs if owner == rank) for rank in range(self.stages)
        ]

    def recomputed_of(self, ranges: Sequence[Pair], layers: Sequence[int]) -> tuple[int, ...]:
        """Return the recomputed layers of every stage; ``layers``: their number on each rank."""
        sizes = [last - first for first, last in ranges]
        mine = [[s for s, r in enumerate(self.owner) if r == rank] for rank in range(self.stages)]
        of_ranks = [spread(n, own, sizes) for n, own in zip(layers, mine, strict=True)]
        return tuple(map(sum, zip(*of_ranks, strict=True)))

    def key(self, stage: int, first: int, last: int) -> Any:
        """Return the properties of a stage that determine its time."""
        place = (stage, first, last)
        if place not in self._keys:
            layers: Any = last - first
            if len(self.model.kinds) > 1:
                layers = self.model.pattern[first:last]
            if self.model.bridge_layer is not None:
                layers = structs.replace(self.of(stage, first, last, 0), index=0, positions=())
            self._keys[place] = (stage == 0, stage == self.stages - 1, layers)
        return self._keys[place]

    def of(self, stage: int, first: int, last: int, recomputed: int) -> PipelineRank:
        """Return the contents of a stage; the other stages split the remaining layers evenly."""
        place = (stage, first, last, recomputed)
        if place not in self._contents and self.owner:
            counts = list(self.least)
            counts[stage] = last - first
            counts[stage - 1] += self.model.num_layers - sum(counts)
            ranges = self.ranges_of(counts)
            again = self.recomputed_of(
                ranges, [recomputed * (r == stage) for r in range(self.stages)]
            )
            self._contents[place] = contents_of_rank(
                self.model, ranges, self.owner, stage, recomputed=RecomputedLayers(by_stage=again)
            )
        elif place not in self._contents:
            later, layers = self.stages - 1 - stage, self.model.num_layers
            before, left = _evenly(first, stage), layers - last
            after = [(layers - b, layers - a) for a, b in reversed(_evenly(left, later))]
            self._contents[place] = contents_of_rank(
                self.model,
                [*before, (first, last), *after],
                range(self.stages),
                stage,
                recomputed=RecomputedLayers(by_stage=(recomputed,) * self.stages),
            )
        return self._contents[place]

    def ranges(self, stage: int, sizes: Iterable[int]) -> list[Pair]:
        """Return layers that a stage may have, one range for each key."""
        return [pair for size in sizes for pair in self.ranges_of_size(stage, size)]

    def ranges_of_size(self, stage: int, size: int) -> list[Pair]:
        """Return the same of one number of layers."""
        if self.owner:
            most = self.model.num_layers - sum(self.least) + self.least[stage]
            return [(0, size)] if self.least[stage] <= size <= most else []
        if (stage, size) not in self._ranges:
            layers, later = self.model.num_layers, self.stages - 1 - stage
            latest = layers - max(0, later - 1) - size  # the last stage may be empty, too
            starts = list(range(max(0, stage - 1), latest + 1))
            if stage == 0 or later == 0:
                starts = [0 if stage == 0 else layers - size] if starts else []
            elif size == 0:
                starts = []
            elif len(self.model.kinds) == 1:
                starts = [min(stage, latest)] if starts else []
            found: dict[Any, Pair] = {}
            for first in starts:
                pair = first, first + size
                found.setdefault(self.key(stage, *pair), pair)
            self._ranges[stage, size] = list(found.values())
        return self._ranges[stage, size]

    def of_one_kind(self, stage: int, low: int, high: int) -> bool:
        """Whether a stage with each number of layers can have those of one kind alone."""
        if len(self.model.kinds) == 1:
            return True
        every = [self.ranges_of_size(stage, size) for size in range(low, high + 1)]
        if self.model.bridge_layer is not None or any(len(pairs) != 1 for pairs in every):
            return False
        return len(set(self.model.pattern[slice(*every[-1][0])])) == 1

    def different(self, sizes: Iterable[int]) -> list[tuple[int, Pair]]:
        """Return stages with some numbers of layers that differ in more than their position."""
        found: dict[Any, tuple[int, Pair]] = {}
        for size in sizes:
            for stage in self._unlike(size):
                for pair in self.ranges_of_size(stage, size):
                    found.setdefault(self.key(stage, *pair), (stage, pair))
        return list(found.values())

    def _unlike(self, size: int) -> Sequence[int]:
        """Return stages that have all layers which any stage of a size may have."""
        last, layers = self.stages - 1, self.model.num_layers
        if len(self.model.kinds) == 1 and self.model.bridge_layer is None:
            return sorted({0, min(1, last), last})
        # the second stage may begin with layers up to this one, the last but one from last - 2 on
        latest = layers - max(0, last - 2) - size
        ends = self.model.bridge_layer is None and last - 2 <= latest + 1
        return sorted({0, min(1, last), max(0, last - 1), last}) if ends else range(self.stages)


@lru_cache(maxsize=64)
def _contents(model: ModelSpec, stages: int, owner: tuple[int, ...]) -> StageContents:
    return StageContents(model, stages, owner)


def spread(number: int, mine: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return recomputed layers of each stage: ``number`` layers in turn over the stages ``mine``.

    >>> spread(5, [0, 2], [4, 4, 2])
    (3, 0, 2)
    """
    shared = [0] * len(sizes)
    while number:
        for stage in mine:
            if number and shared[stage] < sizes[stage]:
                shared[stage] += 1
                number -= 1
    return tuple(shared)


def _evenly(layers: int, stages: int) -> Ranges:
    """Return stages as even as possible; the first has none where there are fewer layers."""
    if stages > layers:
        return [(0, 0), *_evenly(layers, stages - 1)]
    return split_layers(layers, stages) if stages else ()
