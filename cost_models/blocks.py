"""Weights and gradients on their way while a backward pass goes from block to block (FSDP2).

A block is what is gathered and reduced together: a layer, the embedding, or norm and head; a tied
table is one block with both ends. Symbols, for a block of P elements:

    c, g   bytes of the compute precision, and of the reduction        d ranks that share a shard
    gathered   c P under ZeRO-3; the block that comes next is gathered meanwhile, c P more
    fresh      c P of weight gradients, as far as the block's backward pass has come
    reducing   max(c + g, g + g / d) P: the fresh gradient and its copy for the reduction, then that
               copy and what comes out (and one more where every rank gets all of it); g P where a
               whole gradient had been accumulated
    left over  g P of the block that was reduced last, until the next reduction (torch 2.13,
               FSDPCommContext.reduce_scatter_state): a gradient that an earlier micro-batch left

Below ZeRO-3 a block's gathered weights go when its last gradient of a step is reduced. Whether the
last micro-batch of a step or one before it is fuller depends on the plan: both are priced.

Units: bytes, columns of a plan table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cost_models.adapters import embedding_is_frozen
from cost_models.arrays import Count, Flag, Real
from cost_models.columns import by_value
from cost_models.gradients import rearranged_bytes
from cost_models.held_activations import Held, Walk
from cost_models.model import ModelSpec
from cost_models.moments import AtMoment, Moment, walked_layers
from cost_models.plan import SCHEDULES, PlanTable
from cost_models.rank_parameters import RankParameters, block_numel
from cost_models.schedules import SPLIT_CODES
from cost_models.shared_tensors import tied_weights
from cost_models.stages import PipelineRank
from cost_models.workload import Workload
from cost_models.zero_plus_plus import gathering_buffer, reducing_buffer
from hardware_profiles.software import SoftwareProfile

DUALPIPEV: Final = SCHEDULES.index("dualpipev")


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one rank, and how they are gathered and reduced."""

    compute: float
    reduction: float
    gathered: Real  # bytes of an element that is gathered: with the int8 values it is made of (qwZ)
    copied: Real  # of a gradient's copy for its reduction; int4 sent and received (qgZ)
    mixed: bool
    managed: Flag  # by FSDP2, or as good as that: gradients are copied for their reduction
    sharded: Flag
    frees: Flag  # gathered weights go with the last reduction
    zero_3: Flag
    every: Flag  # every micro-batch is reduced
    alone: Flag  # one micro-batch is in flight: the last one may be fullest
    several: Flag  # there are micro-batches before the last
    two: Flag  # one before the last, which begins without gradients
    shards: Real
    replicas: Flag  # nothing is scattered, but added up over others: in a copy more (torch 2.13)
    head: Real  # elements
    layer: Real
    num_layers: Count
    embedding: Real
    total: Real
    pair: Real  # two largest matrices of a layer
    experts: Real  # of a layer, where others than the layer's ranks share them
    expert_shards: Real
    apart: Real  # of a layer: experts, gathered and reduced by themselves
    inside: Real  # bytes an element: experts cut inside are rearranged matrix by matrix
    tied: Real  # elements of a block that is both ends
    table: Real  # of these, of the table that is both
    behind: Real  # of the block that a backward pass reduced last
    split: Flag  # weight gradients come after those of inputs
    turns_once: Flag  # DualPipeV of 2 p micro-batches: fullest before its first stage is due
    later_share: Real  # of gradients: those of the rank's last stage

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        workload: Workload,
        software: SoftwareProfile,
        table: PlanTable,
        rank: PipelineRank,
        params: RankParameters,
        in_flight: Real,
    ) -> Blocks:
        """Take the blocks of one rank under every plan."""
        mixed = workload.compute_bytes != workload.master_bytes
        ranks = table.data_parallel * table.context_parallel
        sharded = table.zero_stage >= 1
        # replicas in one precision add gradients up where they lie
        managed = np.logical_or(mixed, (ranks > 1) & sharded)
        zeros = np.zeros(len(table))
        alone = rank.first and rank.last and model.tie_embeddings
        trains_first = rank.first and not embedding_is_frozen(model)
        lonely = (table.expert_shard_ranks <= 1) & (not mixed)  # experts: no reduction
        return cls(
            compute=workload.compute_bytes,
            reduction=workload.reduction_bytes,
            gathered=workload.compute_bytes + gathering_buffer(table),
            copied=reducing_buffer(workload.reduction_bytes, table),
            mixed=mixed,
            managed=managed,
            sharded=sharded,
            frees=managed
            & (table.zero_stage < 3)
            & (not software.whole_gradient_buffer)
            & np.logical_not(table.offloads_weights),
            zero_3=table.zero_stage >= 3,
            every=table.zero_stage >= 2,
            alone=by_value(in_flight <= 1.0),
            several=by_value(table.num_microbatches > 1),
            two=by_value((table.num_microbatches == 2) & (in_flight <= 1.0)),
            shards=np.where(sharded, 1.0 * table.shard_ranks, 1.0),
            replicas=managed & (ranks > 1) & ~(sharded & (table.shard_ranks > 1)),
            head=params.head + zeros,
            layer=params.largest_layer + zeros,
            num_layers=walked_layers(model, rank),
            embedding=params.embedding + zeros,
            total=params.total + zeros,
            pair=params.largest_pair + zeros,
            experts=np.where(lonely, 0.0, params.apart_layer) + zeros,
            apart=params.apart_layer + zeros,
            inside=rearranged_bytes(model, workload, table),
            expert_shards=np.where(sharded, 1.0 * np.maximum(1, table.expert_shard_ranks), 1.0),
            tied=params.embedding + zeros if alone else zeros,
            table=block_numel(tied_weights(model), table.tensor_parallel) + zeros
            if alone
            else zeros,
            behind=(params.embedding if trains_first else params.largest_layer) + zeros,
            turns_once=by_value(
                (table.pipeline_schedule == DUALPIPEV)
                & (table.num_microbatches == 2 * table.pipeline_parallel)
                & (table.pipeline_parallel > 1)
                & bool(rank.first and rank.last)
            ),
            later_share=(0.5 * (params.total - params.embedding) + 0.5 * params.head)
            / params.total,
            split=by_value(
                np.isin(table.pipeline_schedule, SPLIT_CODES) & (table.pipeline_parallel > 1)
            ),
        )

    def at_loss_forward(self) -> Real:
        """The head is gathered (twice while that goes on)."""
        first = np.where(self.sharded & self.frees & ~self.several, self.head, 0.0)
        gathering = np.where(self.zero_3, 2.0 * self.head + self.tied, first)
        return self.gathered * gathering

    def at_loss_backward(self) -> Real:
        """The head, and the last layer on its way."""
        whole = np.where(self.zero_3, self.head + self._prefetched() + self.tied, 0.0)
        return self.gathered * whole

    def at_the_turn(self, gradients: Real, held: Held) -> list[tuple[Real, Real]]:
        """Gradients and activations at the loss; DualPipeV has not both at once in few steps."""
        left = self._left_over()
        if not np.any(self.turns_once):
            return [(gradients + left, held.saved)]
        first = np.where(self.turns_once, gradients * self.later_share, gradients)
        less = np.where(self.turns_once, held.stage, 0.0)
        return [(first + left, held.saved), (gradients + left, held.saved - less)]

    def at_head(self, gradients: Real, held: Held) -> list[Moment]:
        """The head's weight gradient beside that of the logits; then its reduction."""
        block = self.head + self.tied
        zeros = np.zeros_like(held.saved)
        ahead = self.head + self.tied + self._prefetched()
        ahead = self.gathered * np.where(self.zero_3, ahead, 0.0)
        projection, with_left = ahead + self._fresh(block), gradients + self._left_over()
        turned = held.saved - held.tail + held.head_norm
        walked = held.saved + held.head_walk
        places = [
            Moment(self._named((with_left, walked, held.logits_gradient, projection, zeros))),
            Moment(self._named((with_left, turned, zeros, projection, zeros))),
        ]
        turned = held.saved - held.tail
        for last, there in self._modes():
            coming = self._prefetched() + self.tied
            coming = self.gathered * np.where(self.zero_3, coming, 0.0)
            buffers = coming + self._reduced(self.head, last) + self._tied_gradient()
            gone = self._gone(self.head, last)
            place = self._named((gradients, turned, zeros, buffers, gone))
            places.append(Moment(place, there))
        return places

    def at_layer(
        self, gradients: Real, held: Held, logits: Real, used: tuple[Real, Real] | None
    ) -> list[Moment]:
        """A layer on its way backward: the first one, the one behind that, or the last but one.

        Layer by layer activations go and reduced gradients come: one end is the fullest. ``used``:
        a matrix that is unpacked, and what helps to do that; None: none is packed.
        """
        first = np.where(self.tied > 0.0, 0.0, self.head)
        first = np.where(self.head > 0.0, first, np.where(self.several, self.behind, 0.0))
        others, ahead = held.saved - held.tail, self.layer - self.apart
        begin = self._behind(gradients, self.head)
        near, far = begin, begin
        more: Flag = self.num_layers > 2  # of three the one behind the first is the last but one
        if np.any(more):
            near = self._behind(gradients, self.head + self.layer)
        if np.any(self.num_layers > 3):
            far = self._behind(gradients, self.head + (self.num_layers - 2.0) * self.layer)
        places = []
        for walk in held.walks:
            beside = others + walk.beside
            unpacked = _unpacked(walk, used)
            for (last, there), now, then, end in zip(self._modes(), begin, near, far, strict=True):
                buffers, gone = self._walk(walk, last, first, ahead)
                parts = (now[0], np.maximum(beside, 0.0), logits, buffers, gone + now[1])
                places.append(Moment(self._named(parts, unpacked), there))
                if not np.any(more):
                    continue
                buffers, gone = self._walk(walk, last, ahead, ahead)
                ends: list[tuple[tuple[Real, Real], Real]] = [(then, 1.0)]
                if np.any(self.num_layers > 3):
                    ends.append((end, self.num_layers - 2.0))
                for (held_then, gone_then), layers in ends:
                    activations = np.maximum(beside + walk.shared - layers * walk.kept, 0.0)
                    parts = (held_then, activations, logits, buffers, gone + gone_then)
                    both = there if more is True else np.logical_and(there, more)
                    places.append(Moment(self._named(parts, unpacked), both))
        return places

    def _behind(self, gradients: Real, done: Real) -> list[tuple[Real, Real]]:
        """Gradients, and gathered weights that are gone, where blocks are done; of each mode."""
        found = []
        for last, _ in self._modes():
            held = self._before(gradients, done, last)
            held = self._accumulated(held, self.total - done, last)
            found.append((held + self._single(done), self._gone(done, last)))
        return found

    def at_last_layer(
        self, gradients: Real, held: Held, used: tuple[Real, Real] | None
    ) -> list[Moment]:
        """The first layer on its way backward: nothing else is left."""
        zeros = np.zeros_like(held.saved)
        before = self.layer - self.apart if self.num_layers > 1 else self.head
        done = self.total - self.embedding - self.layer
        modes = []
        for last, there in self._modes():
            whole = self._accumulated(gradients, self.embedding + self.layer, last)
            modes.append((last, there, self._before(whole, done, last), self._gone(done, last)))
        places = []
        for walk in held.walks:
            alone = walk.alone + walk.shared * float(bool(self.num_layers > 1))
            unpacked = _unpacked(walk, used)
            for last, there, whole, gone_before in modes:
                buffers, gone = self._walk(walk, last, before, 0.0)
                gone = gone + gone_before
                place = self._named((whole, alone, zeros, buffers, gone), unpacked)
                places.append(Moment(place, there))
        # weight gradients that come last are reduced while others are still due: the copy in the
        # precision of the reduction, and what comes out of it beside what was accumulated
        copies = self.reduction * (1.0 + 1.0 / self.shards) + self.compute * self.mixed
        late = np.where(self.split & self.managed, copies * self.layer, 0.0)
        late = late if used is None else late + used[0]
        place = (gradients, held.last_layer, zeros, late, zeros)
        places.append(Moment(place, self.split))
        return places

    def at_embedding(self, gradients: Real) -> list[Moment]:
        """The embedding's gradient, whole however few rows were read; then its reduction."""
        zeros = np.zeros_like(self.total)
        places = []
        for last, there in self._modes():
            left = np.where(last | self.every, self.reduction * self.layer, 0.0)
            whole = np.where(self.zero_3, self.gathered * self.tied, 0.0) + self._tied_gradient()
            whole = whole + self._fresh(self.embedding) + np.where(self.managed, left, 0.0)
            held = self._accumulated(gradients, self.embedding, last)
            held = self._before(held, self.total - self.embedding, last)
            gone = self._gone(self.total - self.embedding, last)
            places.append(Moment(self._named((held, zeros, zeros, whole, gone)), there))
            reduced = self._reduced(self.embedding, last)
            gone = self._gone(self.total, last)
            places.append(Moment(self._named((held, zeros, zeros, reduced, gone)), there))
        return places

    def at_embedding_of_others(self, gradients: Real, held: Held) -> Moment:
        """The embedding's gradient while other micro-batches are in flight (gpipe)."""
        zeros = np.zeros_like(held.saved)
        coming = np.where(self.zero_3, self.gathered * self.tied, 0.0)
        coming = coming + self._reduced(self.embedding, False)
        return Moment((gradients, held.saved, zeros, coming, zeros), self.several)

    def all_gone(self) -> Real:
        """Gathered weights that are not there while the optimizer runs."""
        return self.compute * np.where(self.frees, self.total, 0.0)

    def _named(self, place: AtMoment, used: Real = 0.0) -> AtMoment:
        """Call gradients what stays: those of one micro-batch that nobody reduces."""
        gradients, activations, logits, buffers, gone = place
        stay = ~(self.managed | self.several)
        if not np.any(stay):
            return gradients, activations, logits, buffers + used, gone
        missing = np.maximum(self.reduction * self.total - gradients, 0.0)
        named = np.where(stay, np.minimum(buffers, missing), 0.0)
        return gradients + named, activations, logits, buffers - named + used, gone

    def _modes(self) -> list[tuple[bool, Flag]]:
        """Return whether it is the step's last micro-batch, and where that may be fullest."""
        return [(True, np.logical_or(self.alone, ~self.several)), (False, self.several)]

    def _walk(self, walk: Walk, last: bool, before: Real, ahead: Real) -> tuple[Real, Real]:
        """Return buffers, and weights that have gone, at one place in a layer.

        ``before``: elements of the block that was reduced before; ``ahead``: of what is gathered
        for the next one.
        """
        tied: Real = 0.0
        if np.any(self.tied):
            tied = self._tied_gradient() + np.where(self.zero_3, self.gathered * self.tied, 0.0)
        reduces = self.managed & (last | self.every)
        apart: Real = 0.0
        if np.any(self.experts):
            apart = np.minimum(np.where(reduces, self.experts, 0.0), walk.gradients)
        experts = self.reduction * (1.0 + 1.0 / self.expert_shards) * apart
        if walk.complete:
            coming = np.where(self.zero_3, self.gathered * ahead, 0.0)
            rest = self._reduced(walk.gradients - apart, last)
            shard = self.reduction / self.expert_shards * apart
            return tied + coming + rest + shard, self._gone(walk.gradients, last)
        ahead = np.where(self.zero_3, self.gathered * (self.layer + ahead), 0.0)
        if walk.experts == "reducing":
            going = self._reduced(apart, last, self.expert_shards) + self.inside * apart
            fresh = self._fresh(walk.gradients - apart)
            return tied + ahead + going + fresh, self._gone(apart, last)
        if walk.experts != "reduced":
            left = np.where(reduces, self.reduction * before, 0.0)
            if walk.experts == "gathering":
                # copied out of what was gathered, and once more where they are cut inside
                copies = (1.0 + np.greater(self.inside, 0.0)) * self.apart
                ahead = np.where(self.zero_3, self.gathered * (self.layer + copies), 0.0)
            return tied + ahead + left + self._fresh(walk.gradients), 0.0 * self.layer
        left = np.where(reduces & (apart == 0.0), self.reduction * before, 0.0)
        fresh = self._fresh(walk.gradients - apart)
        return tied + ahead + left + fresh + experts, self._gone(apart, last)

    def _fresh(self, elements: Real) -> Real:
        """Gradients of a block before they are added up: elsewhere only of a pair of matrices."""
        added = np.where(self.several, np.minimum(elements, self.pair), elements)
        return self.compute * np.where(self.managed, elements, added)

    def _tied_gradient(self) -> Real:
        """The gradient that a tied table has from the head, until the embedding adds its own."""
        return np.where(self.managed | ~self.several, self.compute * self.table, 0.0)

    def _reduced(self, elements: Real, last: bool, shards: Real | None = None) -> Real:
        """A block's gradients while they are reduced, or only added up."""
        shards = self.shards if shards is None else shards
        g, c = self.reduction, self.compute
        both = np.maximum(c + self.copied, self.copied + g / shards + g * self.replicas)
        copied = np.where(self.several & ~self.every, g, both)
        reduces = self.managed & (last | self.every)
        return np.where(reduces, copied * elements, self._fresh(elements))

    def _gone(self, elements: Real, last: bool) -> Real:
        """Gathered weights of blocks that are done for this step."""
        return self.compute * np.where(self.frees & last, elements, 0.0)

    def _accumulated(self, gradients: Real, coming: Real, last: bool) -> Real:
        """Whole gradients go block by block when the last micro-batch reduces them."""
        whole = self.managed & self.several & ~self.every & last
        shard = self.reduction / self.shards
        mine = self.reduction * coming + shard * (self.total - coming)
        return np.where(whole, np.minimum(gradients, mine), gradients)

    def _single(self, done: Real) -> Real:
        """The only micro-batch has left reduced gradients of the blocks behind it."""
        return np.where(self.several, 0.0, self.reduction / self.shards * done)

    def _before(self, gradients: Real, done: Real, last: bool) -> Real:
        """The first of two micro-batches has left gradients of the blocks behind it only."""
        each = self.reduction / np.where(self.every, self.shards, 1.0)
        return np.where(self.two & (not last), np.minimum(gradients, each * done), gradients)

    def _prefetched(self) -> Real:
        """The last layer, which comes while the head runs; a tied table is the first block."""
        return np.where(self.tied > 0.0, 0.0, self.layer - self.apart)

    def _left_over(self) -> Real:
        return (self.every & self.several & self.managed) * self.reduction * self.behind


def _unpacked(walk: Walk, used: tuple[Real, Real] | None) -> Real:
    """Bytes of a matrix that is unpacked here; its product comes when what helped has gone."""
    if used is None:
        return 0.0
    matrix, helping = used
    there = matrix + np.maximum(helping - walk.product, 0.0)
    return np.where(np.less(walk.product, 0.0), 0.0, there)
