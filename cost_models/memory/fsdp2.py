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

from functools import reduce
from typing import Final, Self

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from cost_models.activations.live import LayerBackward, LiveActivations
from cost_models.arrays import Flag, Real
from cost_models.columnar.columns import by_value
from cost_models.communication.zero_plus_plus import gathering_buffer, reducing_buffer
from cost_models.memory.gradients import gradients_of, rearranged_bytes
from cost_models.memory.layer_groups import LayerBlock, LayerElements, LayerGroup
from cost_models.memory.ledger import Item, Point, added, either, least, most, product, total
from cost_models.memory.model_states import gradients as gradient_row
from cost_models.memory.saved_tensors import activation, logits, saved_rows
from cost_models.model.lora import embedding_is_frozen
from cost_models.model.parameters import block_numel
from cost_models.partition.frozen_weights import dequantisation_buffers
from cost_models.partition.rank_parameters import last_trained_share
from cost_models.partition.rank_view import RankView
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.partition.shared_tensors import tied_weights
from cost_models.plan.plan import SCHEDULES

DUALPIPEV: Final = SCHEDULES.index("dualpipev")
RUNNING: Final = "backward pass of a layer"
LEFT_OVER: Final = "left over from a reduction"
UNPACKED: Final = "dequantised matrix"


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
    # DualPipeV of 2 p micro-batches: its peak precedes its first stage's backward
    peaks_early: Flag
    later_share: Real  # of gradients: those of the rank's last stage

    @classmethod
    def of(cls, view: RankView, in_flight: Real) -> Self:
        """Return the blocks of one rank under every plan of a view."""
        model, workload, software = view.model, view.workload, view.software
        table, rank, params = view.table, view.rank, view.parameters
        tensor, near = table.tensor_parallel, rank.layer_neighbours
        schedule, pipelined = table.pipeline_schedule, table.pipeline_parallel > 1
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
        layers = LayerElements.of(params, unreduced, zeros)
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
            ends=(
                last_trained_share(model.head),
                0.0 if alone else last_trained_share(model.embedding),
            ),
            largest_pair=params.largest_pair + zeros,
            rearranged=rearranged_bytes(model, workload, table),
            expert_shards=np.where(sharded, 1.0 * np.maximum(1, table.expert_shard_ranks), 1.0),
            tied=tied,
            tied_table=zeros + block_numel(tied_weights(model) if alone else (), tensor),
            reduced_last=behind,
            peaks_early=by_value(
                (schedule == DUALPIPEV)
                & pipelined
                & (table.num_microbatches == 2 * table.pipeline_parallel)
                & bool(rank.first and rank.last)
            ),
            later_share=0.5 * (params.total - params.embedding + params.head) / params.total,
            split=by_value(np.isin(schedule, SPLIT_CODES) & pipelined),
        )

    def _fresh(self, elements: Real, at_once: Real | None = None) -> Item:
        """Return a block's gradients before they are accumulated.

        Where they are added to existing memory matrix by matrix, only ``at_once`` elements: of a
        layer, its two largest matrices.
        """
        at_once = self.largest_pair if at_once is None else at_once
        some = np.where(self.added, np.minimum(elements, at_once), elements)
        some = np.where(self.managed, elements, some)
        return _buffer("fresh weight gradients", "c", self.compute, some)

    def _gathered(self, name: str, elements: Real) -> Item:
        """Return gathered weights, under ZeRO-3."""
        return _buffer(name, "c", self.gathered, np.where(self.zero_3, elements, 0.0))

    def _tied_gradient(self, copies: float = 1.0) -> Item:
        """Return the head's gradient of a tied table, until the embedding adds its own."""
        each = copies * self.compute
        return _buffer("gradient of the tied table", "c", each, self.tied_table)

    def _reduced(
        self, elements: Real, last: bool, shards: Real | None = None, end: float = 0.0
    ) -> Item:
        """Return a block's gradients while they are reduced, or only accumulated.

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
        name, symbol = "gradients while they are reduced", "max(c + g, g + g/d)"
        return either(reduces, _buffer(name, symbol, copied, elements), self._fresh(elements))

    def freed(self, elements: Real, last: bool = True) -> tuple[Item, ...]:
        """Return gathered weights of blocks that are done for this step, which count negative."""
        if not (last and np.any(self.frees)):
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
            gradient_row("gradients of blocks to come", self.reduction, coming),
            gradient_row("reduced gradients", self.reduction, self.total - coming, self.shards),
        )
        return either(whole, least(gradients, mine), gradients)

    def _before(self, gradients: Item, done: Real, last: bool) -> Item:
        """Return gradients; in the first of two micro-batches those of finished blocks."""
        if last:
            return gradients
        shards = np.where(self.reduces_each, self.shards, 1.0)
        mine = gradient_row("gradients of blocks that are done", self.reduction, done, shards)
        return either(self.two_micro_batches, least(gradients, mine), gradients)

    def _prefetched(self) -> Real:
        """Elements of the last layer, gathered while the head runs; none with a tied table."""
        return np.where(self.tied > 0.0, 0.0, self.highest)

    def _left_over(self) -> Item:
        kept = self.reduces_each & self.accumulates & self.managed
        return gradient_row(LEFT_OVER, self.reduction, kept * self.reduced_last)

    def at_loss_forward(self) -> Item:
        """Return the gathered head (two copies while it is gathered)."""
        before = np.where(self.sharded & self.frees & ~self.accumulates, self.head, 0.0)
        gathering = np.where(self.zero_3, 2.0 * self.head + self.tied, before)
        return _buffer("gathered head", "c", self.gathered, gathering)

    def at_loss_backward(self) -> Item:
        """Return the gathered head, and the last layer that is being gathered."""
        whole = self.head + self._prefetched() + self.tied
        return self._gathered("gathered head and next layer", whole)

    def at_loss(self, gradients: Item, live: LiveActivations) -> list[tuple[Item, Item, Item]]:
        """Return gradients and activations at the loss."""
        saved, left = added(*saved_rows(live)), self._left_over()
        return [(now, left, kept) for now, kept in self._at_peak(gradients, saved, live)]

    def _at_peak(
        self, gradients: Item, saved: Item, live: LiveActivations
    ) -> list[tuple[Item, Item]]:
        """Gradients and activations; DualPipeV of few micro-batches peaks at two points."""
        if not np.any(self.peaks_early):
            return [(gradients, saved)]
        size = gradients.size * self.later_share
        share = Item("gradients", "of the rank's last stage", size, formula="a share of g · P")
        stage = activation("one stage's layers, freed", -live.stage)
        return [
            (either(self.peaks_early, share, gradients), saved),
            (gradients, added(saved, either(self.peaks_early, stage))),
        ]

    def at_head(self, gradients: Item, live: LiveActivations) -> list[Point]:
        """Points of the head: its weight gradient with that of the logits; then its reduction."""
        rest, inputs = saved_rows(live)
        block = self.head + self.tied
        ahead = self._gathered("gathered head and next layer", block + self._prefetched())
        projection, left = (ahead, self._fresh(block, block)), self._left_over()
        backward = activation("backward pass of the projection", live.head_backward)
        norm = activation("backward pass of the last norm", live.head_norm)
        of_input = activation("gradient of the head's input", live.head_gradient)
        of_logits = logits("gradient of the logits", live.logits_gradient)
        coming = self._gathered("gathered next layer", self._prefetched() + self.tied)
        points = []
        for now, saved in self._at_peak(gradients, rest, live):
            kept = (now, left)
            points += [
                self._point((*kept, saved, inputs, backward, of_logits, *projection)),
                self._point((*kept, saved, norm, *projection)),
            ]
            for last, exists in self._modes():
                reduced = self._reduced(self.head, last, end=self.ends[0])
                buffers = (coming, reduced, self._tied_gradient(), *self.freed(self.head, last))
                before = self._before(now, 0.0 * self.head, last)
                points.append(self._point((before, saved, of_input, *buffers), exists))
        return points

    def at_layers(
        self,
        live: LiveActivations,
        used: tuple[Real, Real] | None,
        *cases: tuple[Item, Item, tuple[Item, ...]],
    ) -> list[list[Point]]:
        """Points of a layer's backward pass: of the first, the second, or the last but one.

        Layer by layer activations are freed and reduced gradients added, so that the maximum is at
        one end of a group. ``cases``: gradients, saved activations, and logits, each with points of
        its own. ``used``: bytes of an unpacked matrix and of its workspace; None: none is packed.
        """
        modes, none = self._modes(), activation(RUNNING, 0.0)
        points: list[list[Point]] = [[] for _ in cases]
        for group in self.groups:
            behind = [[self._behind(own, end.done) for end in group.ends] for own, _, _ in cases]
            left: dict[tuple[int, bool], list[list[Item]]] = {}  # the same at all points of a layer
            for layer in filter(group.contains, live.layer_backward):
                key = layer.kind, layer.recomputed
                if key not in left:
                    freed = [end.freed(layer, live.saved_by_kind) for end in group.ends]
                    more = _positions(layer, group)
                    left[key] = [[added(kept, *more, f) for f in freed] for _, kept, _ in cases]
                running = activation(RUNNING, layer.added)
                for mode, (last, may_peak) in enumerate(modes):
                    rows = self._buffers(layer, group.block, last) + _unpacked(layer, used)
                    for case, (_, _, of_loss) in enumerate(cases):
                        for at, end in enumerate(group.ends):
                            kept = most(added(left[key][case][at], running), none)
                            now = (*behind[case][at][mode], kept, *of_loss, *rows)
                            exists = _all_of(may_peak, end.exists, layer.exists)
                            points[case].append(self._point(now, exists))
        return points

    def _behind(self, gradients: Item, done: Real) -> list[tuple[Item, ...]]:
        """Gradients, and freed gathered weights, after the blocks that are done; by mode."""
        found = []
        alone = np.where(self.added, 0.0, done)  # of a single micro-batch
        single = gradient_row("reduced gradients", self.reduction, alone, self.shards)
        for last, _ in self._modes():
            kept = self._before(gradients, done, last)
            kept = self._accumulated(kept, self.total - done, last)
            found.append((added(kept, single), *self.freed(done, last)))
        return found

    def at_last_layer(
        self, gradients: Item, live: LiveActivations, used: tuple[Real, Real] | None
    ) -> list[Point]:
        """Points of the first layer's backward pass, when no other activations are left."""
        group, coming = self.first_layer, self.embedding + self.lowest
        done = self.total - coming
        modes = []
        for last, exists in self._modes():
            kept = self._before(self._accumulated(gradients, coming, last), done, last)
            modes.append((last, exists, (kept, *self.freed(done, last))))
        points = []
        for layer in live.layer_backward:
            if not group.contains(layer):
                continue
            alone = (activation(RUNNING, layer.alone), *_positions(layer, group))
            for last, exists, before in modes:
                buffers = self._buffers(layer, group.block, last) + _unpacked(layer, used)
                exists = _all_of(exists, layer.exists)
                points.append(self._point((*before, *alone, *buffers), exists))
        if not np.any(self.split):
            return points
        # late weight gradients are reduced while others are still pending: the copy in the
        # precision of the reduction, and its result next to the accumulated gradient
        copies = self.reduction * (1.0 + 1.0 / self.shards) + self.compute * self.mixed
        elements = np.where(self.managed, self.layer, 0.0)
        late = [_buffer("late weight gradients", "c + g + g/d", copies, elements)]
        if used is not None:
            late.append(Item("buffers", UNPACKED, used[0], formula="c · P_matrix"))
        pending = activation("operands of pending weight gradients", live.last_layer)
        points.append(Point((gradients, pending, *late), self.split))
        return points

    def at_embedding(self, gradients: Item) -> list[Point]:
        """Points of the embedding: its gradient (whole, also of rows not read), its reduction."""
        points, done = [], self.total - self.embedding
        # the sum of both gradients of a tied table: torch, input_buffer.cpp
        both, table = self._tied_gradient(2.0), self._gathered("gathered table", self.tied)
        fresh = self._fresh(self.embedding, self.embedding)
        for last, exists in self._modes():
            left = np.where(self.managed & (last | self.reduces_each), 1.0, 0.0)
            left_over = _buffer(LEFT_OVER, "g", self.reduction * left, self.first_layer.block.own)
            kept = self._before(self._accumulated(gradients, self.embedding, last), done, last)
            rows = (table, both, fresh, left_over, *self.freed(done, last))
            points.append(self._point((kept, *rows), exists))
            reduced = self._reduced(self.embedding, last, end=self.ends[1])
            rows = (reduced, *self.freed(self.total, last))
            points.append(self._point((kept, *rows), exists))
        return points

    def at_embedding_of_others(self, gradients: Item, saved: Item) -> Point:
        """Point of the embedding's gradient while other micro-batches are in flight (gpipe)."""
        reduced = self._reduced(self.embedding, False, end=self.ends[1])
        rows = (gradients, saved, self._gathered("gathered table", self.tied), reduced)
        return Point(rows, self.accumulates)

    def _point(self, rows: tuple[Item, ...], exists: Flag = True) -> Point:
        """Count as gradients those of a single micro-batch that no rank reduces, not as buffers."""
        stay = np.logical_not(self.managed | self.accumulates)
        if not np.any(stay):
            return Point(rows, exists)
        fresh = added(*(r for r in rows if r.part == "buffers" and r.name != UNPACKED))
        kept = total(row for row in rows if row.part == "gradients")
        missing = np.maximum(self.reduction * self.total - kept, 0.0)
        to_come = Item("gradients", "gradients to come", missing, formula="g · P − done")
        named = replace(least(fresh, to_come), part="gradients")
        beyond = fresh.size - named.size
        rest = Item("buffers", "sum of a tied table's gradients", beyond, formula="c · P beyond")
        others = tuple(r for r in rows if r.part != "buffers" or r.name == UNPACKED)
        return Point((*others, either(stay, named), either(stay, rest, fresh)), exists)

    def _modes(self) -> list[tuple[bool, Flag]]:
        """Return whether a micro-batch is the last one, and the plans where it may be the peak."""
        return [
            (True, np.logical_or(self.one_in_flight, ~self.accumulates)),
            (False, self.accumulates),
        ]

    def _buffers(self, layer: LayerBackward, block: LayerBlock, last: bool) -> tuple[Item, ...]:
        """Return buffers, and freed weights, at one point of a layer's backward pass."""
        tied: tuple[Item, ...] = ()
        if np.any(self.tied):
            tied = (self._tied_gradient(), self._gathered("gathered table", self.tied))
        reduces, g, apart = self.managed & (last | self.reduces_each), self.reduction, False
        separate: Real = 0.0
        if np.any(block.experts):
            separate = np.minimum(np.where(reduces, block.experts, 0.0), layer.gradients)
            apart = True

        def experts(name: str, symbol: str, each: Real) -> tuple[Item, ...]:
            return (_buffer(name, symbol, each, separate),) if apart else ()

        if layer.complete:
            rest = self._reduced(layer.gradients - separate, last)
            shard = experts("reduced experts", "g/d'", g / self.expert_shards)
            coming = self._gathered("gathered next layer", block.ahead)
            return (added(*tied, coming, rest, *shard), *self.freed(layer.gradients, last))
        own = block.own + block.experts
        ahead = own + block.ahead
        if layer.experts == "reducing":
            going = self._reduced(separate, last, self.expert_shards)
            moved = experts("rearranged experts", "c/3", self.rearranged)
            rows = (going, *moved, self._fresh(layer.gradients - separate))
        elif layer.experts == "reduced":
            left = np.where(reduces & (separate == 0.0), block.before, 0.0)
            copies = g * (1.0 + 1.0 / self.expert_shards)
            done = experts("reduced experts and their copy", "g + g/d'", copies)
            fresh = self._fresh(layer.gradients - separate)
            rows = (_buffer(LEFT_OVER, "g", g, left), fresh, *done)
        else:
            if apart and layer.experts in ("gathered", "gathering"):
                # experts are gathered before the next layer, then copied out of the gathered
                # buffer, and once more where they are cut inside
                copies = (1.0 + np.greater(self.rearranged, 0.0)) * (layer.experts == "gathering")
                ahead = np.where(block.experts > 0.0, own + copies * block.experts, ahead)
            left = np.where(reduces, block.before, 0.0)
            rows = (_buffer(LEFT_OVER, "g", g, left), self._fresh(layer.gradients))
            apart = False
        freed = self.freed(separate, last) if apart else ()
        return (added(*tied, self._gathered("gathered layers", ahead), *rows), *freed)


def block_points(view: RankView, live: LiveActivations, update: Item) -> list[list[Point]]:
    """Return the points of each of ``MOMENTS``; ``update``: temporary tensors of the optimizer."""
    blocks = Blocks.of(view, live.in_flight + live.pending)
    gradients = gradients_of(view, live.in_flight + live.pending)
    quantised = any(w.quantised for kind in view.model.kinds for w in kind.weights)
    used = dequantisation_buffers(view) if quantised else None
    flight, later = gradients.full_flight, saved_rows(live, 1.0)[0]
    both, at_loss = "logits, their gradient and copies", blocks.at_loss(flight, live)
    losses = (
        (logits("logits and copies", live.logits_forward), blocks.at_loss_forward()),
        (logits(both, live.logits_backward), blocks.at_loss_backward()),
    )
    next_loss = logits(both, live.logits_later)
    inputs = np.minimum(live.head_per_token * live.tokens, later.size)
    freed = activation("the head's inputs, freed", -inputs)
    backward, later_backward = blocks.at_layers(
        live,
        used,
        (flight, saved_rows(live)[0], ()),
        (gradients.later, added(later, freed), (next_loss,)),
    )
    return [
        *([Point((*rows, *loss)) for rows in at_loss] for loss in losses),
        blocks.at_head(flight, live),
        backward,
        [*later_backward, blocks.at_embedding_of_others(gradients.later, later)],
        blocks.at_last_layer(gradients.last_layer, live, used),
        blocks.at_embedding(gradients.embedding),
        [Point((gradients.reduced, update, *blocks.freed(blocks.total)))],
    ]


def _buffer(name: str, symbol: str, each: Real, elements: Real) -> Item:
    return product("buffers", name, (symbol, each, "bytes"), ("P_block", elements, "parameters"))


def _positions(layer: LayerBackward, group: LayerGroup) -> tuple[Item, ...]:
    """Return the gradient of position biases that all layers of a stack share."""
    if not np.any(layer.positions_gradient):
        return ()
    size = layer.positions_gradient * group.in_stack
    return (activation("gradient of position biases", size),)


def _unpacked(layer: LayerBackward, used: tuple[Real, Real] | None) -> tuple[Item, ...]:
    if used is None:
        return ()
    return (Item("buffers", UNPACKED, layer.unpacked(used), formula="c · P_matrix + workspace"),)


def _all_of(*flags: Flag) -> Flag:
    """Return whether all flags are set."""
    found = [flag for flag in flags if flag is not True]
    return reduce(np.logical_and, found) if found else True
