"""Gathered weights and reducing gradients in a backward pass, block by block (FSDP2).

A block is gathered and reduced as one: a layer, the embedding, or norm and head; a tied table is
one block of embedding and head. Symbols, for a block of P elements:

    c, g   bytes of the compute precision, and of the reduction        d ranks that share a shard
    gathered   c P under ZeRO-3; the next block is gathered meanwhile, c P more
    fresh      c P of the weight gradients that the block's backward pass has computed so far
    reducing   max(c + g, g + g / d) P: the fresh gradient and its copy for the reduction, then that
               copy and its result (one more where every rank receives the whole), and c more of the
               block's last parameter where it is scattered; g P where a whole gradient had been
               accumulated
    left over  g P of the block that was reduced last, until the next reduction (torch 2.13,
               FSDPCommContext.reduce_scatter_state): a gradient that an earlier micro-batch left

Below ZeRO-3 a block's gathered weights are freed when its last gradient of a step is reduced. The
peak may fall in the last micro-batch of a step or in one before it, by plan: both are priced.

Units: bytes, columns of a plan table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Final, NamedTuple, Self

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from cost_models.activations.live import LayerBackward, LiveActivations
from cost_models.arrays import Flag, Real
from cost_models.columnar.columns import by_value
from cost_models.communication.zero_plus_plus import gathering_buffer, reducing_buffer
from cost_models.memory.gradients import rearranged_bytes
from cost_models.memory.step_points import StepPoint, TransientParts, backward_layers
from cost_models.model.lora import embedding_is_frozen
from cost_models.model.parameters import block_numel
from cost_models.model.spec import ModelSpec
from cost_models.partition.rank_parameters import RankParameters, last_trained_share
from cost_models.partition.rank_view import RankView
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.partition.shared_tensors import tied_weights
from cost_models.partition.stages import NO_LAYER, LayerCounts, PipelineRank
from cost_models.plan.plan import SCHEDULES, PlanTable

DUALPIPEV: Final = SCHEDULES.index("dualpipev")


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

    def freed(self, layer: LayerBackward, kept: Sequence[tuple[Real, Real]]) -> Real:
        """Activation bytes of the layers whose backward pass is finished.

        ``kept``: bytes of a layer of each kind, and of a recomputed one.
        """
        if not isinstance(self.passed, tuple):
            return self.passed * layer.saved
        found: Real = 0.0
        for count, recomputed, (every, left) in zip(*self.passed, kept, strict=True):
            found = found + (count - recomputed) * every + recomputed * left
        return found


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


class BlockBackward(NamedTuple):
    """One point of a layer's backward pass, in one of the two modes (``Blocks._modes``)."""

    layer: LayerBackward
    group: int
    mode: int
    buffers: Real
    freed: Real  # gathered weights of this layer that are freed
    unpacked: Real  # a matrix, see ``LayerBackward.unpacked``


class Blocks(Struct, frozen=True):
    """The blocks of one rank: how they are gathered and reduced, and their bytes at each point."""

    compute: float
    reduction: float
    gathered: Real  # bytes of a gathered element, with its int8 values (qwZ)
    copied: Real  # of a gradient's copy for its reduction; int4 sent and received (qgZ)
    mixed: bool  # compute and master precision differ
    managed: Flag  # gradients are copied for their reduction: by FSDP2, or in another precision
    sharded: Flag
    frees: Flag  # gathered weights are freed after the last reduction
    zero_3: Flag
    reduces_each: Flag  # every micro-batch's gradients are reduced
    one_in_flight: Flag  # one micro-batch is in flight: the last one may be the peak
    accumulates: Flag  # a step has several micro-batches
    added: Flag  # gradients have their memory already: fresh ones are added to it, or copied to it
    two_micro_batches: Flag  # two micro-batches, the first of which starts without gradients
    shards: Real
    replicas: Flag  # gradients are summed over replicas, not scattered: one more copy (torch 2.13)
    head: Real  # elements
    layer: Real  # the largest
    groups: tuple[LayerGroup, ...]  # in backward order
    first_layer: LayerGroup  # whose backward pass is the last, when no other activations are left
    lowest: Real  # elements of that layer
    highest: Real  # of the layer that is first in backward order, without separate experts
    embedding: Real
    total: Real
    ends: tuple[float, float]  # share of the head's and the embedding's last parameter in its block
    largest_pair: Real  # two largest matrices of a layer
    expert_shards: Real
    rearranged: Real  # bytes an element: experts cut inside are rearranged matrix by matrix
    tied: Real  # elements of a block that is both embedding and head
    tied_table: Real  # of these, of the tied table
    reduced_last: Real  # of the block that a backward pass reduced last
    split: Flag  # weight gradients are computed after those of inputs
    peaks_early: (
        Flag  # DualPipeV of 2 p micro-batches: its peak precedes its first stage's backward
    )
    later_share: Real  # of gradients: those of the rank's last stage

    @classmethod
    def of(cls, view: RankView, in_flight: Real) -> Self:
        """Return the blocks of one rank under every plan of a view."""
        model, workload, software = view.model, view.workload, view.software
        table, rank, params = view.table, view.rank, view.parameters
        tensor, near = table.tensor_parallel, rank.layer_neighbours
        mixed = workload.compute_bytes != workload.master_bytes
        ranks = table.data_parallel * table.context_parallel
        sharded = table.zero_stage >= 1
        # replicas in one precision add gradients up where they lie
        managed = np.logical_or(mixed, (ranks > 1) & sharded)
        zeros = np.zeros(len(table))
        alone = rank.first and rank.last and model.tie_embeddings
        trains_first = rank.first and not embedding_is_frozen(model)
        keeps = software.gradients.whole_replica_buffer and not mixed
        stays = (table.zero_stage < 3) & np.logical_not(table.offloads_weights)
        several = by_value(table.num_microbatches > 1)
        unreduced = (table.expert_shard_ranks <= 1) & (not mixed)  # experts: no reduction
        head, tied = params.head + zeros, params.embedding + zeros if alone else zeros
        layers = _LayerElements.of(params, unreduced, zeros)
        behind = params.embedding + zeros if trains_first else layers.lowest(rank)
        # the block that was reduced before the last layer
        before = np.where(tied > 0.0, 0.0, head)
        before = np.where(head > 0.0, before, np.where(several, behind, 0.0))
        groups = layers.groups(model, rank, head, before)
        return cls(
            compute=workload.compute_bytes,
            reduction=workload.reduction_bytes,
            gathered=workload.compute_bytes + gathering_buffer(table),
            copied=reducing_buffer(workload.reduction_bytes, table),
            mixed=mixed,
            managed=managed,
            sharded=sharded,
            frees=managed & stays & (not software.gradients.whole_buffer),
            zero_3=table.zero_stage >= 3,
            reduces_each=table.zero_stage >= 2,
            one_in_flight=by_value(in_flight <= 1.0),
            accumulates=several,
            added=several | by_value((ranks > 1) & ~sharded & keeps),
            two_micro_batches=by_value((table.num_microbatches == 2) & (in_flight <= 1.0)),
            shards=np.where(sharded, 1.0 * table.shard_ranks, 1.0),
            replicas=managed & (ranks > 1) & ~(sharded & (table.shard_ranks > 1)),
            head=head,
            layer=layers.largest,
            groups=groups,
            first_layer=layers.first(model, rank, head, groups),
            lowest=layers.sizes[near[-1].kind + 1 if near else 0],
            highest=layers.own(near[0].kind if near else None),
            embedding=params.embedding + zeros,
            total=params.total + zeros,
            ends=_last_shares(model, alone=alone),
            largest_pair=params.largest_pair + zeros,
            rearranged=rearranged_bytes(model, workload, table),
            expert_shards=np.where(sharded, 1.0 * np.maximum(1, table.expert_shard_ranks), 1.0),
            tied=tied,
            tied_table=zeros + block_numel(tied_weights(model) if alone else (), tensor),
            reduced_last=behind,
            peaks_early=by_value(_peaks_early(table) & bool(rank.first and rank.last)),
            later_share=(0.5 * (params.total - params.embedding) + 0.5 * params.head)
            / params.total,
            split=by_value(_splits(table)),
        )

    def _fresh(self, elements: Real, at_once: Real | None = None) -> Real:
        """Bytes of a block's gradients before they are accumulated.

        Where they are added to existing memory matrix by matrix, only ``at_once`` elements: of a
        layer, its two largest matrices.
        """
        at_once = self.largest_pair if at_once is None else at_once
        added = np.where(self.added, np.minimum(elements, at_once), elements)
        return self.compute * np.where(self.managed, elements, added)

    def _tied_gradient(self) -> Real:
        """Bytes of the head's gradient of a tied table, until the embedding adds its own."""
        return self.compute * self.tied_table

    def _reduced(
        self, elements: Real, last: bool, shards: Real | None = None, end: float = 0.0
    ) -> Real:
        """Bytes of a block's gradients while they are reduced, or only accumulated.

        ``end``: the share of the last parameter, whose fresh gradient lives through the reduction
        where it is scattered (a variable of torch's foreach_reduce still refers to it).
        """
        shards = self.shards if shards is None else shards
        g, c = self.reduction, self.compute
        stays = c * end * np.greater(shards, 1.0)
        both = self.copied + g / shards + g * self.replicas + stays
        both = np.maximum(c + self.copied, both)
        copied = np.where(self.accumulates & ~self.reduces_each, g, both)
        reduces = self.managed & (last | self.reduces_each)
        return np.where(reduces, copied * elements, self._fresh(elements))

    def _freed(self, elements: Real, last: bool) -> Real:
        """Bytes of gathered weights of blocks that are done for this step."""
        return self.compute * np.where(self.frees & last, elements, 0.0)

    def _accumulated(self, gradients: Real, coming: Real, last: bool) -> Real:
        """Bytes of accumulated gradients: the last micro-batch reduces them by block."""
        whole = self.managed & self.accumulates & ~self.reduces_each & last
        shard = self.reduction / self.shards
        mine = self.reduction * coming + shard * (self.total - coming)
        return np.where(whole, np.minimum(gradients, mine), gradients)

    def _single(self, done: Real) -> Real:
        """Reduced gradients of the blocks that are done, where a step has one micro-batch."""
        return np.where(self.added, 0.0, self.reduction / self.shards * done)

    def _before(self, gradients: Real, done: Real, last: bool) -> Real:
        """Gradients in the first of two micro-batches: only those of blocks that are done."""
        each = self.reduction / np.where(self.reduces_each, self.shards, 1.0)
        return np.where(
            self.two_micro_batches & (not last), np.minimum(gradients, each * done), gradients
        )

    def _prefetched(self) -> Real:
        """Elements of the last layer, gathered while the head runs; none with a tied table."""
        return np.where(self.tied > 0.0, 0.0, self.highest)

    def _left_over(self) -> Real:
        return (
            (self.reduces_each & self.accumulates & self.managed)
            * self.reduction
            * self.reduced_last
        )

    def at_loss_forward(self) -> Real:
        """Bytes of the gathered head (two copies while it is gathered)."""
        first = np.where(self.sharded & self.frees & ~self.accumulates, self.head, 0.0)
        gathering = np.where(self.zero_3, 2.0 * self.head + self.tied, first)
        return self.gathered * gathering

    def at_loss_backward(self) -> Real:
        """Bytes of the gathered head, and of the last layer that is being gathered."""
        whole = np.where(self.zero_3, self.head + self._prefetched() + self.tied, 0.0)
        return self.gathered * whole

    def at_loss(self, gradients: Real, live: LiveActivations) -> list[tuple[Real, Real]]:
        """Gradients and activations at the loss."""
        left = self._left_over()
        return [(now + left, saved) for now, saved in self._at_peak(gradients, live)]

    def _at_peak(self, gradients: Real, live: LiveActivations) -> list[tuple[Real, Real]]:
        """Gradients and activations; DualPipeV of few micro-batches peaks at two points."""
        if not np.any(self.peaks_early):
            return [(gradients, live.saved)]
        first = np.where(self.peaks_early, gradients * self.later_share, gradients)
        less = np.where(self.peaks_early, live.stage, 0.0)
        return [(first, live.saved), (gradients, live.saved - less)]

    def at_head(self, gradients: Real, live: LiveActivations) -> list[StepPoint]:
        """Points of the head: its weight gradient with that of the logits; then its reduction."""
        points: list[StepPoint] = []
        for now, saved in self._at_peak(gradients, live):
            points += self._at_head(now, replace(live, saved=saved))
        return points

    def _at_head(self, gradients: Real, live: LiveActivations) -> list[StepPoint]:
        block = self.head + self.tied
        zeros = np.zeros_like(live.saved)
        ahead = self.head + self.tied + self._prefetched()
        ahead = self.gathered * np.where(self.zero_3, ahead, 0.0)
        projection, with_left = ahead + self._fresh(block, block), gradients + self._left_over()
        after_head = live.saved - live.head_saved + live.head_norm
        with_head = live.saved + live.head_backward
        points = [
            StepPoint(
                self._as_gradients((with_left, with_head, live.logits_gradient, projection, zeros))
            ),
            StepPoint(self._as_gradients((with_left, after_head, zeros, projection, zeros))),
        ]
        after_head = live.saved - live.head_saved + live.head_gradient
        for last, exists in self._modes():
            coming = self._prefetched() + self.tied
            coming = self.gathered * np.where(self.zero_3, coming, 0.0)
            reduced = self._reduced(self.head, last, end=self.ends[0])
            buffers = coming + reduced + self._tied_gradient()
            freed = self._freed(self.head, last)
            now = self._before(gradients, 0.0 * self.head, last)
            point = self._as_gradients((now, after_head, zeros, buffers, freed))
            points.append(StepPoint(point, exists))
        return points

    def backward(
        self, live: LiveActivations, used: tuple[Real, Real] | None
    ) -> list[BlockBackward]:
        """Return buffers at each point of the backward pass of every group's layers.

        ``used``: bytes of an unpacked matrix and of its workspace; None: no matrix is packed.
        """
        found = []
        for layer in live.layer_backward:
            unpacked = layer.unpacked(used)
            for number, group in enumerate(self.groups):
                if not group.contains(layer):
                    continue
                for mode, (last, _) in enumerate(self._modes()):
                    buffers, freed = self._buffers(layer, group.block, last)
                    found.append(BlockBackward(layer, number, mode, buffers, freed, unpacked))
        return found

    def at_layer(
        self, gradients: Real, live: LiveActivations, logits: Real, blocks: Sequence[BlockBackward]
    ) -> list[StepPoint]:
        """Points of a layer's backward pass: of the first, the second, or the last but one.

        Layer by layer activations are freed and reduced gradients added, so that the maximum is at
        one end of a group. ``blocks``: of ``backward``.
        """
        others, modes = live.saved - live.head_saved, self._modes()
        behind = [
            [self._behind(gradients, end.done) for end in group.ends] for group in self.groups
        ]
        left: dict[tuple[int, int, bool], list[Real]] = {}  # the same at all points of a layer
        points = []
        for layer, number, mode, buffers, freed, unpacked in blocks:
            group, key = self.groups[number], (number, layer.kind, layer.recomputed)
            if key not in left:
                before = others + layer.positions_gradient * group.in_stack
                left[key] = [before - end.freed(layer, live.saved_by_kind) for end in group.ends]
            for end, of_modes, saved in zip(group.ends, behind[number], left[key], strict=True):
                accumulated, freed_before = of_modes[mode]
                now = np.maximum(saved + layer.added, 0.0)
                parts = (accumulated, now, logits, buffers, freed + freed_before)
                _, exists = modes[mode]
                exists = _all_of(exists, end.exists, layer.exists)
                points.append(StepPoint(self._as_gradients(parts, unpacked), exists))
        return points

    def _behind(self, gradients: Real, done: Real) -> list[tuple[Real, Real]]:
        """Gradients, and freed gathered weights, after the blocks that are done; by mode."""
        found = []
        for last, _ in self._modes():
            kept = self._before(gradients, done, last)
            kept = self._accumulated(kept, self.total - done, last)
            found.append((kept + self._single(done), self._freed(done, last)))
        return found

    def at_last_layer(
        self, gradients: Real, live: LiveActivations, used: tuple[Real, Real] | None
    ) -> list[StepPoint]:
        """Points of the first layer's backward pass, when no other activations are left."""
        zeros = np.zeros_like(live.saved)
        group = self.first_layer
        done = self.total - self.embedding - self.lowest
        modes = []
        for last, exists in self._modes():
            whole = self._accumulated(gradients, self.embedding + self.lowest, last)
            modes.append((last, exists, self._before(whole, done, last), self._freed(done, last)))
        points = []
        for layer in live.layer_backward:
            if not group.contains(layer):
                continue
            alone = layer.alone + layer.positions_gradient * group.in_stack
            unpacked = layer.unpacked(used)
            for last, exists, whole, freed_before in modes:
                buffers, freed = self._buffers(layer, group.block, last)
                freed = freed + freed_before
                point = self._as_gradients((whole, alone, zeros, buffers, freed), unpacked)
                points.append(StepPoint(point, _all_of(exists, layer.exists)))
        # late weight gradients are reduced while others are still pending: the copy in the
        # precision of the reduction, and its result next to the accumulated gradient
        copies = self.reduction * (1.0 + 1.0 / self.shards) + self.compute * self.mixed
        late = np.where(self.split & self.managed, copies * self.layer, 0.0)
        late = late if used is None else late + used[0]
        point = (gradients, live.last_layer, zeros, late, zeros)
        points.append(StepPoint(point, self.split))
        return points

    def at_embedding(self, gradients: Real) -> list[StepPoint]:
        """Points of the embedding: its gradient (whole, also of rows not read), its reduction."""
        zeros = np.zeros_like(self.total)
        points = []
        for last, exists in self._modes():
            left = np.where(
                last | self.reduces_each, self.reduction * self.first_layer.block.own, 0.0
            )
            whole = np.where(self.zero_3, self.gathered * self.tied, 0.0) + self._tied_gradient()
            whole = whole + self._tied_gradient()  # the sum of both: torch, input_buffer.cpp
            fresh = self._fresh(self.embedding, self.embedding)
            whole = whole + fresh + np.where(self.managed, left, 0.0)
            kept = self._accumulated(gradients, self.embedding, last)
            kept = self._before(kept, self.total - self.embedding, last)
            freed = self._freed(self.total - self.embedding, last)
            points.append(StepPoint(self._as_gradients((kept, zeros, zeros, whole, freed)), exists))
            reduced = self._reduced(self.embedding, last, end=self.ends[1])
            freed = self._freed(self.total, last)
            points.append(
                StepPoint(self._as_gradients((kept, zeros, zeros, reduced, freed)), exists)
            )
        return points

    def at_embedding_of_others(self, gradients: Real, live: LiveActivations) -> StepPoint:
        """Point of the embedding's gradient while other micro-batches are in flight (gpipe)."""
        zeros = np.zeros_like(live.saved)
        coming = np.where(self.zero_3, self.gathered * self.tied, 0.0)
        coming = coming + self._reduced(self.embedding, False, end=self.ends[1])
        return StepPoint((gradients, live.saved, zeros, coming, zeros), self.accumulates)

    def all_freed(self) -> Real:
        """Bytes of gathered weights that are freed while the optimizer runs."""
        return self.compute * np.where(self.frees, self.total, 0.0)

    def _as_gradients(self, point: TransientParts, used: Real = 0.0) -> TransientParts:
        """Count as gradients those of a single micro-batch that no rank reduces, not as buffers."""
        gradients, activations, logits, buffers, freed = point
        stay = ~(self.managed | self.accumulates)
        if not np.any(stay):
            return gradients, activations, logits, buffers + used, freed
        missing = np.maximum(self.reduction * self.total - gradients, 0.0)
        named = np.where(stay, np.minimum(buffers, missing), 0.0)
        return gradients + named, activations, logits, buffers - named + used, freed

    def _modes(self) -> list[tuple[bool, Flag]]:
        """Return whether a micro-batch is the last one, and the plans where it may be the peak."""
        return [
            (True, np.logical_or(self.one_in_flight, ~self.accumulates)),
            (False, self.accumulates),
        ]

    def _buffers(self, layer: LayerBackward, block: LayerBlock, last: bool) -> tuple[Real, Real]:
        """Return buffers, and freed weights, at one point of a layer's backward pass."""
        tied: Real = 0.0
        if np.any(self.tied):
            tied = self._tied_gradient() + np.where(self.zero_3, self.gathered * self.tied, 0.0)
        reduces = self.managed & (last | self.reduces_each)
        separate: Real = 0.0
        if np.any(block.experts):
            separate = np.minimum(np.where(reduces, block.experts, 0.0), layer.gradients)
        experts = self.reduction * (1.0 + 1.0 / self.expert_shards) * separate
        if layer.complete:
            coming = np.where(self.zero_3, self.gathered * block.ahead, 0.0)
            rest = self._reduced(layer.gradients - separate, last)
            shard = self.reduction / self.expert_shards * separate
            return tied + coming + rest + shard, self._freed(layer.gradients, last)
        own = block.own + block.experts
        ahead = np.where(self.zero_3, self.gathered * (own + block.ahead), 0.0)
        if layer.experts == "reducing":
            going = self._reduced(separate, last, self.expert_shards) + self.rearranged * separate
            fresh = self._fresh(layer.gradients - separate)
            return tied + ahead + going + fresh, self._freed(separate, last)
        if layer.experts != "reduced":
            left = np.where(reduces, self.reduction * block.before, 0.0)
            if np.any(block.experts) and layer.experts in ("gathered", "gathering"):
                # experts are gathered before the next layer, then copied out of the gathered
                # buffer, and once more where they are cut inside
                copies = (1.0 + np.greater(self.rearranged, 0.0)) * float(
                    layer.experts == "gathering"
                )
                alone = self.gathered * (own + copies * block.experts)
                ahead = np.where(self.zero_3 & (block.experts > 0.0), alone, ahead)
            return tied + ahead + left + self._fresh(layer.gradients), 0.0 * self.layer
        left = np.where(reduces & (separate == 0.0), self.reduction * block.before, 0.0)
        fresh = self._fresh(layer.gradients - separate)
        return tied + ahead + left + fresh + experts, self._freed(separate, last)


class _LayerElements(Struct, frozen=True):
    """Elements of a rank's layers: of the largest, then of each kind."""

    sizes: tuple[Real, ...]
    experts: tuple[Real, ...]
    separate: tuple[Real, ...]

    @classmethod
    def of(cls, params: RankParameters, unreduced: Flag, zeros: Real) -> Self:
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
            own, whole, layers = self.own(None), self.largest, backward_layers(model, rank)
            more = layers > 2
            ends = [GroupEnd(head + whole, 1, more)] if np.any(more) else []
            if np.any(layers > 3):  # of three, the second is the last but one
                ends.append(GroupEnd(head + (layers - 2.0) * whole, layers - 2.0, more))
            first = LayerGroup(self.block(None, before, own), (GroupEnd(head, 0),))
            others = LayerGroup(self.block(None, own, own), tuple(ends), in_stack=True)
            return (first, others) if ends else (first,)
        found = []
        for near in rank.layer_neighbours:
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
                    in_stack=_same_stack(model, near.kind, near.previous),
                )
            )
        return tuple(found)

    def first(
        self, model: ModelSpec, rank: PipelineRank, head: Real, groups: tuple[LayerGroup, ...]
    ) -> LayerGroup:
        """Return the rank's first layer; no block is gathered during its backward pass."""
        if rank.layer_neighbours:
            return groups[-1]
        several = np.greater(backward_layers(model, rank), 1)
        before = np.where(several, self.own(None), head)
        return LayerGroup(self.block(None, before, 0.0), (), in_stack=several)


def _last_shares(model: ModelSpec, *, alone: bool) -> tuple[float, float]:
    """Return the share of the head's and the embedding's last parameter in its block."""
    return last_trained_share(model.head), 0.0 if alone else last_trained_share(model.embedding)


def _all_of(*flags: Flag) -> Flag:
    """Return whether all flags are set."""
    found = [flag for flag in flags if flag is not True]
    return reduce(np.logical_and, found) if found else True


def _same_stack(model: ModelSpec, kind: int, other: int) -> bool:
    return other != NO_LAYER and model.kinds[kind].stack == model.kinds[other].stack


def _peaks_early(table: PlanTable) -> Flag:
    """Whether the schedule is DualPipeV with 2 p micro-batches."""
    few = table.num_microbatches == 2 * table.pipeline_parallel
    found: Flag = (table.pipeline_schedule == DUALPIPEV) & (table.pipeline_parallel > 1) & few
    return found


def _splits(table: PlanTable) -> Flag:
    """Whether weight gradients are computed after those of inputs."""
    found: Flag = np.isin(table.pipeline_schedule, SPLIT_CODES) & (table.pipeline_parallel > 1)
    return found
