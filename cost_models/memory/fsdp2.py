"""Weights and gradients on their way while a backward pass goes from block to block (FSDP2).

A block is what is gathered and reduced together: a layer, the embedding, or norm and head; a tied
table is one block with both ends. Symbols, for a block of P elements:

    c, g   bytes of the compute precision, and of the reduction        d ranks that share a shard
    gathered   c P under ZeRO-3; the block that comes next is gathered meanwhile, c P more
    fresh      c P of weight gradients, as far as the block's backward pass has come
    reducing   max(c + g, g + g / d) P: the fresh gradient and its copy for the reduction, then that
               copy and what comes out (and one more where every rank gets all of it), c more of the
               block's last parameter where it is scattered; g P where a whole gradient had been
               accumulated
    left over  g P of the block that was reduced last, until the next reduction (torch 2.13,
               FSDPCommContext.reduce_scatter_state): a gradient that an earlier micro-batch left

Below ZeRO-3 a block's gathered weights go when its last gradient of a step is reduced. Whether the
last micro-batch of a step or one before it is fuller depends on the plan: both are priced.

Units: bytes, columns of a plan table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self

import numpy as np

from cost_models.activations.live import Held, Walk
from cost_models.arrays import Flag, Real
from cost_models.columnar.columns import by_value
from cost_models.communication.zero_plus_plus import gathering_buffer, reducing_buffer
from cost_models.memory.gradients import rearranged_bytes
from cost_models.memory.moments import AtMoment, Moment, walked_layers
from cost_models.model.lora import embedding_is_frozen
from cost_models.model.spec import ModelSpec
from cost_models.partition.rank_parameters import RankParameters, block_numel, last_trained_share
from cost_models.partition.rank_view import RankView
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.partition.shared_tensors import tied_weights
from cost_models.partition.stages import NO_LAYER, LayerCounts, PipelineRank
from cost_models.plan.plan import SCHEDULES

DUALPIPEV: Final = SCHEDULES.index("dualpipev")


@dataclass(frozen=True, slots=True)
class LayerBlock:
    """A layer that is walked, and the blocks beside it; elements."""

    own: Real  # what is gathered and reduced with it: all but experts that are apart
    experts: Real  # these, where others than the layer's ranks share them
    before: Real  # of the block that was reduced before
    ahead: Real  # of the block that is gathered meanwhile


@dataclass(frozen=True, slots=True)
class End:
    """The first or the last of layers with the same neighbours."""

    done: Real  # elements of all blocks that were walked before
    # layers that were walked before: how many, or of each kind how many, and how many recomputed
    passed: Real | tuple[LayerCounts, LayerCounts]
    there: Flag = True

    def freed(self, walk: Walk, kept: Sequence[tuple[Real, Real]]) -> Real:
        """Bytes that these layers had saved; ``kept``: one of each kind, and a recomputed one."""
        if not isinstance(self.passed, tuple):
            return self.passed * walk.kept
        found: Real = 0.0
        for count, again, (every, left) in zip(*self.passed, kept, strict=True):
            found = found + (count - again) * every + again * left
        return found


@dataclass(frozen=True, slots=True)
class Spot:
    """Layers with the same neighbours, on the way back."""

    block: LayerBlock
    ends: tuple[End, ...]
    kind: int | None = None  # of the model's kinds; None: any, they are of one size
    again: bool = False  # recomputed ones, if the plan recomputes
    follows: bool = False  # a layer of its stack

    def has(self, walk: Walk) -> bool:
        """Whether a way back is one of these layers."""
        return self.kind is None or (self.kind, self.again) == (walk.kind, walk.again)


class WayBack(NamedTuple):
    """One point of a layer's backward pass, in one of the two modes (``Blocks._modes``)."""

    walk: Walk
    spot: int
    mode: int
    buffers: Real
    gone: Real  # gathered weights of this layer that are not there any more
    unpacked: Real  # a matrix, see ``Walk.unpacked``


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one rank: how they are gathered and reduced, and their bytes at each point."""

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
    added: Flag  # gradients have memory already: what is fresh is added to it, or copied there
    two: Flag  # one before the last, which begins without gradients
    shards: Real
    replicas: Flag  # nothing is scattered, but added up over others: in a copy more (torch 2.13)
    head: Real  # elements
    layer: Real  # the largest
    spots: tuple[Spot, ...]  # of layers, from the loss on
    first_layer: Spot  # that is walked last, when nothing else is left
    lowest: Real  # elements of that layer
    highest: Real  # of the one that is walked first, without experts that are apart
    embedding: Real
    total: Real
    ends: tuple[float, float]  # share of the head's and the embedding's last parameter in its block
    pair: Real  # two largest matrices of a layer
    expert_shards: Real
    inside: Real  # bytes an element: experts cut inside are rearranged matrix by matrix
    tied: Real  # elements of a block that is both ends
    table: Real  # of these, of the table that is both
    behind: Real  # of the block that a backward pass reduced last
    split: Flag  # weight gradients come after those of inputs
    turns_once: Flag  # DualPipeV of 2 p micro-batches: fullest before its first stage is due
    later_share: Real  # of gradients: those of the rank's last stage

    @classmethod
    def of(cls, view: RankView, in_flight: Real) -> Self:
        """Return the blocks of one rank under every plan of a view."""
        model, workload, software = view.model, view.workload, view.software
        table, rank, params = view.table, view.rank, view.parameters
        mixed = workload.compute_bytes != workload.master_bytes
        ranks = table.data_parallel * table.context_parallel
        sharded = table.zero_stage >= 1
        # replicas in one precision add gradients up where they lie
        managed = np.logical_or(mixed, (ranks > 1) & sharded)
        zeros = np.zeros(len(table))
        alone = rank.first and rank.last and model.tie_embeddings
        trains_first = rank.first and not embedding_is_frozen(model)
        keeps = software.gradients.whole_replica_buffer and not mixed
        several = by_value(table.num_microbatches > 1)
        lonely = (table.expert_shard_ranks <= 1) & (not mixed)  # experts: no reduction
        head, tied = params.head + zeros, params.embedding + zeros if alone else zeros
        layers = _Layers.of(params, lonely, zeros)
        behind = params.embedding + zeros if trains_first else layers.lowest(rank)
        # what was reduced before the last layer
        before = np.where(tied > 0.0, 0.0, head)
        before = np.where(head > 0.0, before, np.where(several, behind, 0.0))
        spots = layers.spots(model, rank, head, before)
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
            & (not software.gradients.whole_buffer)
            & np.logical_not(table.offloads_weights),
            zero_3=table.zero_stage >= 3,
            every=table.zero_stage >= 2,
            alone=by_value(in_flight <= 1.0),
            several=several,
            added=several | by_value((ranks > 1) & ~sharded & keeps),
            two=by_value((table.num_microbatches == 2) & (in_flight <= 1.0)),
            shards=np.where(sharded, 1.0 * table.shard_ranks, 1.0),
            replicas=managed & (ranks > 1) & ~(sharded & (table.shard_ranks > 1)),
            head=head,
            layer=layers.largest,
            spots=spots,
            first_layer=layers.first(model, rank, head, spots),
            lowest=layers.sizes[rank.layer_neighbours[-1].kind + 1 if rank.layer_neighbours else 0],
            highest=layers.own(rank.layer_neighbours[0].kind if rank.layer_neighbours else None),
            embedding=params.embedding + zeros,
            total=params.total + zeros,
            ends=(
                last_trained_share(model.head),
                0.0 if alone else last_trained_share(model.embedding),
            ),
            pair=params.largest_pair + zeros,
            inside=rearranged_bytes(model, workload, table),
            expert_shards=np.where(sharded, 1.0 * np.maximum(1, table.expert_shard_ranks), 1.0),
            tied=tied,
            table=block_numel(tied_weights(model), table.tensor_parallel) + zeros
            if alone
            else zeros,
            behind=behind,
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

    def _fresh(self, elements: Real, at_once: Real | None = None) -> Real:
        """Gradients of a block before they are added up: elsewhere only what comes ``at_once``.

        Of a layer that is a pair of matrices.
        """
        at_once = self.pair if at_once is None else at_once
        added = np.where(self.added, np.minimum(elements, at_once), elements)
        return self.compute * np.where(self.managed, elements, added)

    def _tied_gradient(self) -> Real:
        """The gradient that a tied table has from the head, until the embedding adds its own."""
        return self.compute * self.table

    def _reduced(
        self, elements: Real, last: bool, shards: Real | None = None, end: float = 0.0
    ) -> Real:
        """A block's gradients while they are reduced, or only added up.

        ``end``: the share of the last parameter, whose fresh gradient stays all the while where it
        is scattered (a name in torch's foreach_reduce goes on to mean it).
        """
        shards = self.shards if shards is None else shards
        g, c = self.reduction, self.compute
        stays = c * end * np.greater(shards, 1.0)
        both = self.copied + g / shards + g * self.replicas + stays
        both = np.maximum(c + self.copied, both)
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
        return np.where(self.added, 0.0, self.reduction / self.shards * done)

    def _before(self, gradients: Real, done: Real, last: bool) -> Real:
        """The first of two micro-batches has left gradients of the blocks behind it only."""
        each = self.reduction / np.where(self.every, self.shards, 1.0)
        return np.where(self.two & (not last), np.minimum(gradients, each * done), gradients)

    def _prefetched(self) -> Real:
        """The last layer, which comes while the head runs; a tied table is the first block."""
        return np.where(self.tied > 0.0, 0.0, self.highest)

    def _left_over(self) -> Real:
        return (self.every & self.several & self.managed) * self.reduction * self.behind

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
        """Gradients and activations at the loss."""
        left = self._left_over()
        return [(now + left, saved) for now, saved in self._turns(gradients, held)]

    def _turns(self, gradients: Real, held: Held) -> list[tuple[Real, Real]]:
        """Gradients and activations; DualPipeV has not both at once in few steps."""
        if not np.any(self.turns_once):
            return [(gradients, held.saved)]
        first = np.where(self.turns_once, gradients * self.later_share, gradients)
        less = np.where(self.turns_once, held.stage, 0.0)
        return [(first, held.saved), (gradients, held.saved - less)]

    def at_head(self, gradients: Real, held: Held) -> list[Moment]:
        """The head's weight gradient beside that of the logits; then its reduction."""
        places: list[Moment] = []
        for now, saved in self._turns(gradients, held):
            places += self._at_head(now, replace(held, saved=saved))
        return places

    def _at_head(self, gradients: Real, held: Held) -> list[Moment]:
        block = self.head + self.tied
        zeros = np.zeros_like(held.saved)
        ahead = self.head + self.tied + self._prefetched()
        ahead = self.gathered * np.where(self.zero_3, ahead, 0.0)
        projection, with_left = ahead + self._fresh(block, block), gradients + self._left_over()
        turned = held.saved - held.tail + held.head_norm
        walked = held.saved + held.head_walk
        places = [
            Moment(self._named((with_left, walked, held.logits_gradient, projection, zeros))),
            Moment(self._named((with_left, turned, zeros, projection, zeros))),
        ]
        turned = held.saved - held.tail + held.head_gradient
        for last, there in self._modes():
            coming = self._prefetched() + self.tied
            coming = self.gathered * np.where(self.zero_3, coming, 0.0)
            reduced = self._reduced(self.head, last, end=self.ends[0])
            buffers = coming + reduced + self._tied_gradient()
            gone = self._gone(self.head, last)
            now = self._before(gradients, 0.0 * self.head, last)
            place = self._named((now, turned, zeros, buffers, gone))
            places.append(Moment(place, there))
        return places

    def ways_back(self, held: Held, used: tuple[Real, Real] | None) -> list[WayBack]:
        """Return what the layers of every spot have on their way, at each place in them.

        ``used``: a matrix that is unpacked, and what helps to do that; None: none is packed.
        """
        found = []
        for walk in held.walks:
            unpacked = walk.unpacked(used)
            for number, spot in enumerate(self.spots):
                if not spot.has(walk):
                    continue
                for mode, (last, _) in enumerate(self._modes()):
                    buffers, gone = self._walk(walk, spot.block, last)
                    found.append(WayBack(walk, number, mode, buffers, gone, unpacked))
        return found

    def at_layer(
        self, gradients: Real, held: Held, logits: Real, ways: Sequence[WayBack]
    ) -> list[Moment]:
        """A layer on its way backward: the first one, the one behind that, or the last but one.

        Layer by layer activations go and reduced gradients come: one end is the fullest. ``ways``:
        ``ways_back``.
        """
        others, modes = held.saved - held.tail, self._modes()
        behind = [[self._behind(gradients, end.done) for end in spot.ends] for spot in self.spots]
        left: dict[tuple[int, int, bool], list[Real]] = {}  # of a layer, wherever one is in it
        places = []
        for walk, number, mode, buffers, gone, unpacked in ways:
            spot, layer = self.spots[number], (number, walk.kind, walk.again)
            if layer not in left:
                before = others + walk.shared * float(spot.follows)
                left[layer] = [before - end.freed(walk, held.kept) for end in spot.ends]
            for end, of_modes, saved in zip(spot.ends, behind[number], left[layer], strict=True):
                held_then, gone_then = of_modes[mode]
                now = np.maximum(saved + walk.beside, 0.0)
                parts = (held_then, now, logits, buffers, gone + gone_then)
                _, there = modes[mode]
                both = there if end.there is True else np.logical_and(there, end.there)
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
        spot = self.first_layer
        done = self.total - self.embedding - self.lowest
        modes = []
        for last, there in self._modes():
            whole = self._accumulated(gradients, self.embedding + self.lowest, last)
            modes.append((last, there, self._before(whole, done, last), self._gone(done, last)))
        places = []
        for walk in held.walks:
            if not spot.has(walk):
                continue
            alone = walk.alone + walk.shared * float(spot.follows)
            unpacked = walk.unpacked(used)
            for last, there, whole, gone_before in modes:
                buffers, gone = self._walk(walk, spot.block, last)
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
            left = np.where(last | self.every, self.reduction * self.first_layer.block.own, 0.0)
            whole = np.where(self.zero_3, self.gathered * self.tied, 0.0) + self._tied_gradient()
            whole = whole + self._tied_gradient()  # the sum of both: torch, input_buffer.cpp
            fresh = self._fresh(self.embedding, self.embedding)
            whole = whole + fresh + np.where(self.managed, left, 0.0)
            held = self._accumulated(gradients, self.embedding, last)
            held = self._before(held, self.total - self.embedding, last)
            gone = self._gone(self.total - self.embedding, last)
            places.append(Moment(self._named((held, zeros, zeros, whole, gone)), there))
            reduced = self._reduced(self.embedding, last, end=self.ends[1])
            gone = self._gone(self.total, last)
            places.append(Moment(self._named((held, zeros, zeros, reduced, gone)), there))
        return places

    def at_embedding_of_others(self, gradients: Real, held: Held) -> Moment:
        """The embedding's gradient while other micro-batches are in flight (gpipe)."""
        zeros = np.zeros_like(held.saved)
        coming = np.where(self.zero_3, self.gathered * self.tied, 0.0)
        coming = coming + self._reduced(self.embedding, False, end=self.ends[1])
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

    def _walk(self, walk: Walk, block: LayerBlock, last: bool) -> tuple[Real, Real]:
        """Return buffers, and weights that have gone, at one place in a layer."""
        tied: Real = 0.0
        if np.any(self.tied):
            tied = self._tied_gradient() + np.where(self.zero_3, self.gathered * self.tied, 0.0)
        reduces = self.managed & (last | self.every)
        apart: Real = 0.0
        if np.any(block.experts):
            apart = np.minimum(np.where(reduces, block.experts, 0.0), walk.gradients)
        experts = self.reduction * (1.0 + 1.0 / self.expert_shards) * apart
        if walk.complete:
            coming = np.where(self.zero_3, self.gathered * block.ahead, 0.0)
            rest = self._reduced(walk.gradients - apart, last)
            shard = self.reduction / self.expert_shards * apart
            return tied + coming + rest + shard, self._gone(walk.gradients, last)
        layer = block.own + block.experts
        ahead = np.where(self.zero_3, self.gathered * (layer + block.ahead), 0.0)
        if walk.experts == "reducing":
            going = self._reduced(apart, last, self.expert_shards) + self.inside * apart
            fresh = self._fresh(walk.gradients - apart)
            return tied + ahead + going + fresh, self._gone(apart, last)
        if walk.experts != "reduced":
            left = np.where(reduces, self.reduction * block.before, 0.0)
            if np.any(block.experts) and walk.experts in ("gathered", "gathering"):
                # experts come before the next layer; they have just arrived, and are then copied
                # out of what was gathered, once more where they are cut inside
                copies = (1.0 + np.greater(self.inside, 0.0)) * float(walk.experts == "gathering")
                alone = self.gathered * (layer + copies * block.experts)
                ahead = np.where(self.zero_3 & (block.experts > 0.0), alone, ahead)
            return tied + ahead + left + self._fresh(walk.gradients), 0.0 * self.layer
        left = np.where(reduces & (apart == 0.0), self.reduction * block.before, 0.0)
        fresh = self._fresh(walk.gradients - apart)
        return tied + ahead + left + fresh + experts, self._gone(apart, last)


@dataclass(frozen=True, slots=True)
class _Layers:
    """Elements of a rank's layers: of the largest, then of each kind."""

    sizes: tuple[Real, ...]
    experts: tuple[Real, ...]
    apart: tuple[Real, ...]

    @classmethod
    def of(cls, params: RankParameters, lonely: Flag, zeros: Real) -> Self:
        apart = (params.expert_layer, *params.expert_layers)
        return cls(
            tuple(size + zeros for size in (params.largest_layer, *params.layers)),
            tuple(np.where(lonely, 0.0, each) + zeros for each in apart),
            tuple(each + zeros for each in apart),
        )

    @property
    def largest(self) -> Real:
        """The largest layer, whole."""
        return self.sizes[0]

    def own(self, kind: int | None) -> Real:
        """What is gathered with a layer of a kind; None: they are of one size."""
        number = 0 if kind is None else kind + 1
        return self.sizes[number] - self.apart[number]

    def lowest(self, rank: PipelineRank) -> Real:
        """The same of the rank's first layer."""
        return self.own(rank.layer_neighbours[-1].kind if rank.layer_neighbours else None)

    def beside(self, kind: int | None, before: Real, ahead: Real) -> LayerBlock:
        """A layer of a kind between other blocks."""
        number = 0 if kind is None else kind + 1
        return LayerBlock(self.own(kind), self.experts[number], before, ahead)

    def passed(self, passed: LayerCounts) -> Real:
        """Elements of layers by kind."""
        return sum(n * size for n, size in zip(passed, self.sizes[1:], strict=True))

    def spots(
        self, model: ModelSpec, rank: PipelineRank, head: Real, before: Real
    ) -> tuple[Spot, ...]:
        """All but the last layer that is walked, which is the first one of the rank.

        Of layers of one size: the first on the way back, the second, and the last but one. Of
        others also the last one, which may be the only one of its size.
        """
        if not rank.layer_neighbours:
            own, whole, layers = self.own(None), self.largest, walked_layers(model, rank)
            more = layers > 2
            ends = [End(head + whole, 1, more)] if np.any(more) else []
            if np.any(layers > 3):  # of three the one behind the first is the last but one
                ends.append(End(head + (layers - 2.0) * whole, layers - 2.0, more))
            first = Spot(self.beside(None, before, own), (End(head, 0),))
            others = Spot(self.beside(None, own, own), tuple(ends), follows=True)
            return (first, others) if ends else (first,)
        found = []
        for near in rank.layer_neighbours:
            behind = before if near.previous == NO_LAYER else self.own(near.previous)
            ahead = 0.0 if near.next == NO_LAYER else self.own(near.next)
            counts = [near.first] if near.first is near.last else [near.first, near.last]
            found.append(
                Spot(
                    block=self.beside(near.kind, behind, ahead),
                    ends=tuple(End(head + self.passed(each[0]), each) for each in counts),
                    kind=near.kind,
                    again=near.recomputed,
                    follows=_same_stack(model, near.kind, near.previous),
                )
            )
        return tuple(found)

    def first(
        self, model: ModelSpec, rank: PipelineRank, head: Real, spots: tuple[Spot, ...]
    ) -> Spot:
        """The rank's first layer, which is walked last: nothing is gathered meanwhile."""
        if rank.layer_neighbours:
            return spots[-1]
        several = bool(walked_layers(model, rank) > 1)
        before = self.own(None) if several else head
        return Spot(self.beside(None, before, 0.0), (), follows=several)


def _same_stack(model: ModelSpec, kind: int, other: int) -> bool:
    return other != NO_LAYER and model.kinds[kind].stack == model.kinds[other].stack
