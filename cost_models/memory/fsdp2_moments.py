"""Places of a backward pass at which the blocks of a rank are fullest (see ``blocks``).

Units: bytes, columns of a plan table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cost_models.activations.live import Held, Walk
from cost_models.arrays import Flag, Real
from cost_models.memory.fsdp2_units import Blocks, LayerBlock
from cost_models.memory.moments import AtMoment, Moment


class WayBack(NamedTuple):
    """One place in a layer of one spot, in one of the two modes (``BlockPlaces._modes``)."""

    walk: Walk
    spot: int
    mode: int
    buffers: Real
    gone: Real  # gathered weights of this layer that are not there any more
    unpacked: Real  # a matrix, see ``Walk.unpacked``


@dataclass(frozen=True, slots=True)
class BlockPlaces(Blocks):
    """The same blocks, and what is there of them beside activations, place by place."""

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
