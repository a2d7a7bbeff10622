"""Points of a step under FSDP2: the head, layers block by block, the embedding (``blocks``).

The peak may fall in the last micro-batch of a step or in one before it, by plan: both are priced.
Units: bytes, columns of a plan table.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from cost_models.activations.layer import LayerBackward
from cost_models.activations.live import LiveActivations
from cost_models.arrays import Flag, Real, holds
from cost_models.memory.fsdp.blocks import LEFT_OVER, RUNNING, UNPACKED, Blocks, buffer
from cost_models.memory.fsdp.layer_groups import LayerGroup
from cost_models.memory.gradients import gradients_of
from cost_models.memory.ledger import Item, Point, added, either, most
from cost_models.memory.saved_tensors import activation, logits, saved_rows
from cost_models.partition.frozen_weights import (
    dequantisation_buffers,
    kept_unpacked_bytes,
    makes_matrices,
)
from cost_models.partition.rank_view import RankView


class BlockPoints(Blocks):
    """The points of a step, and the rows of each."""

    def at_loss_forward(self) -> Item:
        """Return the gathered head (two copies while it is gathered)."""
        before = np.where(self.sharded & self.frees & ~self.accumulates, self.head, 0.0)
        gathering = np.where(self.zero_3, 2.0 * self.head + self.tied, before)
        return buffer("gathered head", "c", self.gathered, gathering)

    def at_last_forward(self, gradients: Item, live: LiveActivations) -> Point:
        """Point of the last layer's forward pass while the previous one is copied to the host.

        A gathered buffer lives until the next block is gathered; the head is gathered later.
        """
        first = self.sharded & self.frees & ~self.accumulates
        before = np.where(first, self.highest - self.head, 0.0)
        whole = np.where(self.zero_3, 2.0 * self.highest + self.tied, before)
        gathered = buffer("gathered layers", "c", self.gathered, whole)
        moving = activation("layers in transfer to the host", live.in_transfer)
        return Point((gradients, self._left_over(), moving, gathered))

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
        if not holds(self.peaks_early):
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
                alive = [[most(added(one, running), none) for one in case] for case in left[key]]
                for mode, (last, may_peak) in enumerate(modes):
                    rows = self._buffers(layer, group.block, last) + _unpacked(layer, used)
                    for case, (_, _, of_loss) in enumerate(cases):
                        for at, end in enumerate(group.ends):
                            now = (*behind[case][at][mode], alive[case][at], *of_loss, *rows)
                            exists = _all_of(may_peak, end.exists, layer.exists)
                            points[case].append(self._point(now, exists))
        return points

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
        if not holds(self.split):
            return points
        # late weight gradients are reduced while others are still pending: the copy in the
        # precision of the reduction, and its result next to the accumulated gradient
        copies = self.reduction + self.kept / self.shards + self.compute * self.mixed
        elements = np.where(self.managed, self.layer, 0.0)
        late = [buffer("late weight gradients", "c + r + g/d", copies, elements)]
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
            left_over = buffer(LEFT_OVER, "r", self.reduction * left, self.first_layer.block.own)
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


def block_points(view: RankView, live: LiveActivations, update: Item) -> list[list[Point]]:
    """Return the points of each of ``MOMENTS``; ``update``: temporary tensors of the optimizer."""
    blocks = BlockPoints(view, live.in_flight + live.pending)
    gradients = gradients_of(view, live.in_flight + live.pending)
    used = dequantisation_buffers(view) if makes_matrices(view) else None
    kept = kept_unpacked_bytes(view)
    others = (Item("buffers", "matrices made in other layers", kept),) if holds(kept > 0) else ()
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
        (flight, saved_rows(live)[0], others),
        (gradients.later, added(later, freed), (next_loss, *others)),
    )
    at_losses = [[Point((*rows, *loss, *others)) for rows in at_loss] for loss in losses]
    if holds(view.table.offloads_activations):  # before the loss, as the last layer runs
        at_losses[0].append(blocks.at_last_forward(flight, live))
        later = either(np.logical_not(view.table.offloads_activations), later)
    return [
        *at_losses,
        blocks.at_head(flight, live),
        backward,
        [*later_backward, blocks.at_embedding_of_others(gradients.later, later)],
        blocks.at_last_layer(gradients.last_layer, live, used),
        blocks.at_embedding(gradients.embedding),
        [Point((gradients.reduced, update, *blocks.freed(blocks.total)))],
    ]


def _positions(layer: LayerBackward, group: LayerGroup) -> tuple[Item, ...]:
    """Return the gradient of position biases that all layers of a stack share."""
    if not holds(layer.positions_gradient):
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
