"""Layers of a rank in backward order, grouped by the blocks around them, which FSDP2 gathers.

Units: elements of a block; columns of a plan table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from msgspec import Struct

from cost_models.activations.layer import LayerBackward
from cost_models.arrays import Count, Flag, Real, holds
from cost_models.memory.ledger import Item, product
from cost_models.model.spec import ModelSpec
from cost_models.partition.rank_parameters import RankParameters
from cost_models.partition.stages import NO_LAYER, LayerCounts, PipelineRank


class LayerBlock(Struct, frozen=True):
    """A layer in its backward pass, and the blocks around it; elements."""

    own: Real  # gathered and reduced with it: all but separately sharded experts
    experts: Real  # separately sharded: over other ranks than the layer
    before: Real  # of the block that was reduced before
    ahead: Real  # of the block that is gathered meanwhile


class GroupEnd(Struct, frozen=True):
    """The first or the last layer of a group."""

    done: Real  # elements of all blocks whose backward pass is done
    # layers whose backward pass is done: their number, or by kind all of them and recomputed ones
    passed: Real | tuple[LayerCounts, LayerCounts]
    exists: Flag = True

    def freed(self, layer: LayerBackward, kept: Sequence[tuple[Real, Real]]) -> Item:
        """Activations of the layers whose backward pass is finished, which count negative.

        ``kept``: bytes of a layer of each kind, and of a recomputed one.
        """
        name = "layers whose backward pass is done"
        if not isinstance(self.passed, tuple):
            each = ("b·s·a", layer.saved, "bytes")
            return product("activations", name, ("−k", -1.0 * self.passed, "layers"), each)
        found: Real = 0.0
        for count, recomputed, (every, left) in zip(*self.passed, kept, strict=True):
            found = found - (count - recomputed) * every - recomputed * left
        return Item("activations", name, found, formula="− k · b·s · a of each kind")


class LayerGroup(Struct, frozen=True):
    """Layers with the same neighbours in backward order."""

    block: LayerBlock
    ends: tuple[GroupEnd, ...]
    kind: int | None = None  # of the model's kinds; None: any, they are of one size
    recomputed: bool = False  # recomputed ones, if the plan recomputes
    in_stack: Flag = False  # another layer of its stack

    def contains(self, layer: LayerBackward) -> bool:
        """Whether a point belongs to the backward pass of one of these layers."""
        return self.kind is None or (self.kind, self.recomputed) == (layer.kind, layer.recomputed)


class LayerElements(Struct, frozen=True):
    """Elements of a rank's layers: of the largest, then of each kind."""

    sizes: tuple[Real, ...]
    experts: tuple[Real, ...]
    separate: tuple[Real, ...]

    @classmethod
    def of(cls, params: RankParameters, unreduced: Flag, zeros: Real) -> Self:
        """Return the elements of a rank's layers; ``unreduced``: experts that no rank reduces."""
        separate = (params.expert_layer, *params.expert_layers)
        return cls(
            tuple(size + zeros for size in (params.largest_layer, *params.layers)),
            tuple(np.where(unreduced, 0.0, each) + zeros for each in separate),
            tuple(each + zeros for each in separate),
        )

    @property
    def largest(self) -> Real:
        """The largest layer, whole."""
        return self.sizes[0]

    def own(self, kind: int | None) -> Real:
        """Elements gathered with a layer of a kind; None: all kinds are of one size."""
        number = 0 if kind is None else kind + 1
        return self.sizes[number] - self.separate[number]

    def lowest(self, rank: PipelineRank) -> Real:
        """Elements gathered with the rank's first layer."""
        return self.own(rank.layer_neighbours[-1].kind if rank.layer_neighbours else None)

    def block(self, kind: int | None, before: Real, ahead: Real) -> LayerBlock:
        """Return a layer of a kind and the blocks around it."""
        number = 0 if kind is None else kind + 1
        return LayerBlock(self.own(kind), self.experts[number], before, ahead)

    def passed(self, passed: LayerCounts) -> Real:
        """Elements of layers by kind."""
        return sum(n * size for n, size in zip(passed, self.sizes[1:], strict=True))

    def groups(
        self, model: ModelSpec, rank: PipelineRank, head: Real, before: Real
    ) -> tuple[LayerGroup, ...]:
        """Return all layers but the rank's first one, whose backward pass is the last.

        Of layers of one size: the first in backward order, the second, and the last but one. Of
        others also the last one, which may be the only one of its size.
        """
        if not rank.layer_neighbours:
            own, whole, layers = self.own(None), self.largest, _backward_layers(model, rank)
            more = layers > 2
            ends = [GroupEnd(head + whole, 1, more)] if holds(more) else []
            if holds(layers > 3):  # of three, the second is the last but one
                ends.append(GroupEnd(head + (layers - 2.0) * whole, layers - 2.0, more))
            first = LayerGroup(self.block(None, before, own), (GroupEnd(head, 0),))
            others = LayerGroup(self.block(None, own, own), tuple(ends), in_stack=True)
            return (first, others) if ends else (first,)
        found = []
        stacks = [kind.stack for kind in model.kinds]
        for near in rank.layer_neighbours:
            above = None if near.previous == NO_LAYER else stacks[near.previous]
            behind = before if near.previous == NO_LAYER else self.own(near.previous)
            ahead = 0.0 if near.next == NO_LAYER else self.own(near.next)
            counts = [near.first] if near.first is near.last else [near.first, near.last]
            found.append(
                LayerGroup(
                    block=self.block(near.kind, behind, ahead),
                    ends=tuple(
                        GroupEnd(head + self.passed(each[0]), each, near.exists) for each in counts
                    ),
                    kind=near.kind,
                    recomputed=near.recomputed,
                    in_stack=above == stacks[near.kind],
                )
            )
        return tuple(found)

    def first(
        self, model: ModelSpec, rank: PipelineRank, head: Real, groups: tuple[LayerGroup, ...]
    ) -> LayerGroup:
        """Return the rank's first layer; no block is gathered during its backward pass."""
        if rank.layer_neighbours:
            return groups[-1]
        several = np.greater(_backward_layers(model, rank), 1)
        before = np.where(several, self.own(None), head)
        return LayerGroup(self.block(None, before, 0.0), (), in_stack=several)


def _backward_layers(model: ModelSpec, rank: PipelineRank) -> Count:
    """Layers of a rank that have a backward pass."""
    counts = zip(rank.kind_counts, model.kinds, strict=True)
    return sum(count for count, kind in counts if not kind.forward_only)
