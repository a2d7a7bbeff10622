"""Blocks of weights that FSDP2 gathers and reduces as one, and their bytes at a point of a step.

A block is gathered and reduced as one: a layer, the embedding, or norm and head; a tied table is
one block of embedding and head. Symbols, for a block of P elements:

    c, r, g  bytes of the compute precision, the reduction, a kept gradient   d ranks of a shard
    gathered   c P under ZeRO-3; the next block is gathered meanwhile, c P more
    fresh      c P of the weight gradients that the block's backward pass has computed so far
    reducing   max(c + r, r + g / d) P: the fresh gradient and its copy for the reduction, then that
               copy and its result (one more where every rank receives the whole), and c more of the
               block's last parameter where it is scattered; r P where a whole gradient had been
               accumulated
    left over  r P of the block that was reduced last, until the next reduction (torch 2.13,
               FSDPCommContext.reduce_scatter_state): a gradient that an earlier micro-batch left

Below ZeRO-3 a block's gathered weights are freed when its last gradient of a step is reduced. The
peak may fall in the last micro-batch of a step or in one before it, by plan: both are priced.

Units: bytes, columns of a plan table.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec.structs import replace

from cost_models.activations.layer import LayerBackward
from cost_models.arrays import Flag, Real, among, everywhere, holds
from cost_models.columnar.columns import by_value
from cost_models.communication.zero_plus_plus import gathering_buffer, reducing_buffer
from cost_models.memory.fsdp.layer_groups import LayerBlock, LayerElements
from cost_models.memory.gradients import rearranged_bytes
from cost_models.memory.ledger import Item, Point, added, either, least, product, total
from cost_models.memory.model_states import gradients as gradient_row
from cost_models.model.lora import embedding_is_frozen
from cost_models.model.parameters import block_numel
from cost_models.partition.rank_parameters import last_trained_share
from cost_models.partition.rank_view import RankView
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.partition.shared_tensors import tied_weights
from cost_models.plan.plan import SCHEDULES

DUALPIPEV: Final = SCHEDULES.index("dualpipev")
RUNNING: Final = "backward pass of a layer"
LEFT_OVER: Final = "left over from a reduction"
UNPACKED: Final = "dequantised matrix"


class Blocks:
    """The blocks of one rank: how they are gathered and reduced, and their bytes at each point."""

    def __init__(self, view: RankView, in_flight: Real) -> None:
        """Describe the blocks of one rank under every plan of a view."""
        model, workload, software = view.model, view.workload, view.software
        table, rank, params = view.table, view.rank, view.parameters
        schedule, pipelined = table.pipeline_schedule, table.pipeline_parallel > 1
        # compute and master precision differ
        self.mixed = mixed = workload.compute_bytes != workload.master_bytes
        ranks = table.data_parallel * table.context_parallel
        self.sharded = sharded = table.zero_stage >= 1
        # gradients are copied for their reduction: by FSDP2, or in another precision; replicas in
        # one precision add them up where they lie
        self.managed = managed = np.logical_or(mixed, (ranks > 1) & sharded)
        zeros = np.zeros(len(table))
        alone = model.tie_embeddings & np.logical_and(rank.first, rank.last)
        trains_first = rank.first & np.logical_not(embedding_is_frozen(model))
        keeps = software.gradients.whole_replica_buffer and not mixed
        stays = (table.zero_stage < 3) & np.logical_not(table.offloads_weights)
        self.accumulates = several = by_value(table.num_microbatches > 1)
        unreduced = (table.expert_shard_ranks <= 1) & (not mixed)  # experts: no reduction
        # elements: of the head, of a block that is both embedding and head
        self.head, self.tied = params.head + zeros, zeros
        if holds(alone):
            self.tied = np.where(alone, params.embedding, zeros)
        layers = LayerElements.of(params, unreduced, zeros)
        self.embedding, self.total = params.embedding + zeros, params.total + zeros
        # of the block that a backward pass reduced last
        self.reduced_last = np.where(trains_first, self.embedding, layers.lowest(rank))
        # the block that was reduced before the last layer
        before = np.where(self.tied > 0.0, 0.0, self.head)
        before = np.where(self.head > 0.0, before, np.where(several, self.reduced_last, 0.0))
        # in backward order
        self.groups = groups = layers.groups(model, rank, self.head, before)
        self.compute = workload.compute_bytes
        self.reduction = view.reduction_bytes
        self.kept = workload.reduction_bytes
        # bytes of a gathered element, with its int8 values (qwZ)
        self.gathered = workload.compute_bytes + gathering_buffer(table)
        # of a gradient's copy for its reduction; int4 sent and received (qgZ)
        self.copied = reducing_buffer(self.reduction, table)
        # gathered weights are freed after the last reduction
        self.frees = managed & stays & (not software.gradients.whole_buffer)
        self.zero_3 = table.zero_stage >= 3
        self.reduces_each = table.zero_stage >= 2  # every micro-batch's gradients are reduced
        # one micro-batch is in flight: the last one may be the peak
        self.one_in_flight = by_value(in_flight <= 1.0)
        # gradients have their memory already: fresh ones are added to it, or copied to it
        self.added = several | by_value((ranks > 1) & ~sharded & keeps)
        self.gradients_leave = table.offloads_weights
        # two micro-batches, the first of which starts without gradients
        self.two_micro_batches = by_value((table.num_microbatches == 2) & (in_flight <= 1.0))
        self.shards = np.where(sharded, 1.0 * table.shard_ranks, 1.0)
        # gradients are summed over replicas, not scattered: one more copy (torch 2.13)
        self.replicas = managed & (ranks > 1) & ~(sharded & (table.shard_ranks > 1))
        self.layer = layers.largest
        # whose backward pass is the last, when no other activations are left
        self.first_layer = layers.first(model, rank, self.head, groups)
        near = rank.layer_neighbours
        self.lowest = layers.sizes[near[-1].kind + 1 if near else 0]
        # of the layer that is first in backward order, without separate experts
        self.highest = layers.own(near[0].kind if near else None)
        # share of the head's and the embedding's last parameter in its block
        self.ends = (
            last_trained_share(model.head),
            np.where(alone, 0.0, last_trained_share(model.embedding)),
        )
        self.largest_pair = params.largest_pair + zeros  # two largest matrices of a layer
        # bytes an element: experts cut inside are rearranged matrix by matrix
        self.rearranged = rearranged_bytes(model, workload, table)
        self.expert_shards = np.where(sharded, 1.0 * np.maximum(1, table.expert_shard_ranks), 1.0)
        self.experts_have_copies = by_value(table.expert_shard_ranks > 1)
        # of ``tied``, of the table alone; a frozen table has no gradient
        table_of = block_numel(tied_weights(model), table.tensor_parallel)
        self.tied_table = np.where(alone & trains_first, zeros + table_of, zeros)
        # DualPipeV of 2 p micro-batches: its peak precedes its first stage's backward
        self.peaks_early = by_value(
            (schedule == DUALPIPEV)
            & pipelined
            & (table.num_microbatches == 2 * table.pipeline_parallel)
            & np.logical_and(rank.first, rank.last)
        )
        # of gradients: those of the rank's last stage (a rank may train no parameter)
        later = params.total - params.embedding + params.head
        self.later_share = 0.5 * later / np.maximum(params.total, 1.0)
        # whether a block is reduced, by whether the micro-batch is the last one
        self.reduces = (managed & self.reduces_each, managed & True)
        self.stay = np.logical_not(managed | several)
        self.all_managed, self.some_stay = everywhere(managed), holds(self.stay)
        self.some_zero_3, self.some_free = holds(self.zero_3), holds(self.frees)
        self.some_tied = holds(self.tied)
        # weight gradients are computed after those of inputs
        self.split = by_value(among(schedule, SPLIT_CODES) & pipelined)

    def _fresh(self, elements: Real, at_once: Real | None = None) -> Item:
        """Return a block's gradients before they are accumulated.

        Where they are added to existing memory matrix by matrix, only ``at_once`` elements: of a
        layer, its two largest matrices.
        """
        if not self.all_managed:
            at_once = self.largest_pair if at_once is None else at_once
            some = np.where(self.added, np.minimum(elements, at_once), elements)
            elements = np.where(self.managed, elements, some)
        return buffer("fresh weight gradients", "c", self.compute, elements)

    def _gathered(self, name: str, elements: Real) -> Item:
        """Return gathered weights, under ZeRO-3."""
        gathered = np.where(self.zero_3, elements, 0.0) if self.some_zero_3 else 0.0
        return buffer(name, "c", self.gathered, gathered)

    def _tied_gradient(self, copies: float = 1.0) -> Item:
        """Return the head's gradient of a tied table, until the embedding adds its own."""
        each = copies * self.compute
        return buffer("gradient of the tied table", "c", each, self.tied_table)

    def _reduced(
        self,
        elements: Real,
        last: bool,
        shards: Real | None = None,
        end: Real = 0.0,
        summed: Flag = True,
    ) -> Item:
        """Return a block's gradients while they are reduced, or only accumulated.

        ``end``: the share of the last parameter, whose fresh gradient lives through the reduction
        where it is scattered (a variable of torch's foreach_reduce still refers to it). ``summed``:
        several ranks have the block.
        """
        shards = self.shards if shards is None else shards
        g, r, c = self.kept, self.reduction, self.compute
        stays = c * end * np.greater(shards, 1.0)
        summed = self.replicas & summed
        both = self.copied + g / shards + r * summed + stays
        both = np.maximum(c + self.copied, both)
        result = np.where(summed | np.greater(shards, 1.0), g / shards, 0.0)
        copied = np.where(self.accumulates & ~self.reduces_each, g + result, both)
        reduces = self.reduces[last]
        name, symbol = "gradients while they are reduced", "max(c + r, r + g/d)"
        return either(reduces, buffer(name, symbol, copied, elements), self._fresh(elements))

    def freed(self, elements: Real, last: bool = True) -> tuple[Item, ...]:
        """Return gathered weights of blocks that are done for this step, which count negative."""
        if not (last and self.some_free):
            return ()
        freed = ("P", np.where(self.frees, elements, 0.0), "parameters")
        name = "gathered weights of blocks that are done"
        return (product("weights", name, ("−c", -self.compute, "bytes"), freed),)

    def _accumulated(self, gradients: Item, coming: Real, last: bool) -> Item:
        """Return accumulated gradients: the last micro-batch reduces them by block."""
        if not last:
            return gradients
        whole = np.logical_and(self.managed & ~self.reduces_each, self.accumulates)
        mine = added(
            gradient_row("gradients of blocks to come", self.reduction, coming, symbol="r"),
            gradient_row("reduced gradients", self.kept, self.total - coming, self.shards),
        )
        return either(whole, least(gradients, mine), gradients)

    def _before(self, gradients: Item, done: Real, last: bool) -> Item:
        """Return gradients; in the first of two micro-batches those of finished blocks."""
        if last:
            return gradients
        shards = np.where(self.reduces_each, self.shards, 1.0)
        mine = gradient_row("gradients of blocks that are done", self.kept, done, shards)
        return either(self.two_micro_batches, least(gradients, mine), gradients)

    def _prefetched(self) -> Real:
        """Elements of the last layer, gathered while the head runs; none with a tied table."""
        return np.where(self.tied > 0.0, 0.0, self.highest)

    def _left_over(self) -> Item:
        kept = self.reduces_each & self.accumulates & self.managed
        return gradient_row(LEFT_OVER, self.reduction, kept * self.reduced_last, symbol="r")

    def _behind(self, gradients: Item, done: Real) -> list[tuple[Item, ...]]:
        """Gradients, and freed gathered weights, after the blocks that are done; by mode."""
        found = []
        # of a single micro-batch, unless they leave the device
        alone = np.where(self.added | self.gradients_leave, 0.0, done)
        single = gradient_row("reduced gradients", self.kept, alone, self.shards)
        for last, _ in self._modes():
            kept = self._before(gradients, done, last)
            kept = self._accumulated(kept, self.total - done, last)
            found.append((added(kept, single), *self.freed(done, last)))
        return found

    def _point(self, rows: tuple[Item, ...], exists: Flag = True) -> Point:
        """Count as gradients those of a single micro-batch that no rank reduces, not as buffers."""
        if not self.some_stay:
            return Point(rows, exists)
        stay = self.stay
        fresh = added(*(r for r in rows if r.part == "buffers" and r.name != UNPACKED))
        kept = total(row for row in rows if row.part == "gradients")
        missing = np.maximum(self.kept * self.total - kept, 0.0)
        to_come = Item("gradients", "gradients to come", missing, formula="g · P − done")
        named = replace(least(fresh, to_come), part="gradients")
        beyond = fresh.size - named.size
        rest = Item("buffers", "sum of a tied table's gradients", beyond, formula="c · P beyond")
        others = tuple(r for r in rows if r.part != "buffers" or r.name == UNPACKED)
        return Point((*others, either(stay, named), either(stay, rest, fresh)), exists)

    def _modes(self) -> list[tuple[bool, Flag]]:
        """Return whether a micro-batch is the last one, and the plans where it may be the peak."""
        every: list[tuple[bool, Flag]] = [
            (True, np.logical_or(self.one_in_flight, ~self.accumulates)),
            (False, self.accumulates),
        ]
        return [(last, everywhere(exists) or exists) for last, exists in every if holds(exists)]

    def _buffers(self, layer: LayerBackward, block: LayerBlock, last: bool) -> tuple[Item, ...]:
        """Return buffers, and freed weights, at one point of a layer's backward pass."""
        tied: tuple[Item, ...] = ()
        if self.some_tied:
            tied = (self._tied_gradient(), self._gathered("gathered table", self.tied))
        reduces, g, r, apart = self.reduces[last], self.kept, self.reduction, False
        separate: Real = 0.0
        if holds(block.experts):
            separate = np.minimum(np.where(reduces, block.experts, 0.0), layer.gradients)
            apart = True

        def experts(name: str, symbol: str, each: Real) -> tuple[Item, ...]:
            return (buffer(name, symbol, each, separate),) if apart else ()

        if layer.complete:
            rest = self._reduced(layer.gradients - separate, last)
            shard = experts("reduced experts", "g/d'", g / self.expert_shards)
            coming = self._gathered("gathered next layer", block.ahead)
            return (added(*tied, coming, rest, *shard), *self.freed(layer.gradients, last))
        own = block.own + block.experts
        ahead = own + block.ahead
        if layer.experts == "reducing":
            several = self.experts_have_copies
            going = self._reduced(separate, last, self.expert_shards, summed=several)
            moved = experts("rearranged experts", "c/3", self.rearranged)
            rows = (going, *moved, self._fresh(layer.gradients - separate))
        elif layer.experts == "reduced":
            left = np.where(reduces & (separate == 0.0), block.before, 0.0)
            adds = self.accumulates & ~self.reduces_each & ~self.experts_have_copies
            copies = r + np.where(adds, 0.0, g / self.expert_shards)
            done = experts("reduced experts and their copy", "r + g/d'", copies)
            fresh = self._fresh(layer.gradients - separate)
            rows = (buffer(LEFT_OVER, "r", r, left), fresh, *done)
        else:
            if apart and layer.experts in ("gathered", "gathering"):
                # experts are gathered before the next layer, then copied out of the gathered
                # buffer, and once more where they are cut inside
                copies = (1.0 + np.greater(self.rearranged, 0.0)) * (layer.experts == "gathering")
                ahead = np.where(block.experts > 0.0, own + copies * block.experts, ahead)
            left = np.where(reduces, block.before, 0.0)
            rows = (buffer(LEFT_OVER, "r", r, left), self._fresh(layer.gradients))
            apart = False
        freed = self.freed(separate, last) if apart else ()
        return (added(*tied, self._gathered("gathered layers", ahead), *rows), *freed)


def buffer(name: str, symbol: str, each: Real, elements: Real) -> Item:
    """Return bytes of each element of a block."""
    return product("buffers", name, (symbol, each, "bytes"), ("P_block", elements, "parameters"))
