"""Which layers lie beside which on the way back through a rank, where they are not of one size.

A layer's weights are there together with the gradients of the block that was walked before it and
with the weights of the block that is walked next (``blocks``). Layers of one size have neighbours
of that size. Elsewhere (a mixture of experts above dense layers, a decoder above an encoder) layers
of a kind count once for each pair of neighbours that they have: the first of these and the last.
Activations go and gradients come in between, layer by layer, so one of both ends is the fullest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cost_models.model.spec import ModelSpec

NONE: Final = -1  # no layer of this rank
Passed = tuple[int, ...]  # layers by kind that were walked before, and of these recomputed ones


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Layers of one kind that have the same kinds beside them; kinds by their number."""

    kind: int
    again: bool  # recomputed, if the plan recomputes
    behind: int  # the kind of the layer that was walked before
    ahead: int  # of the layer that is walked next
    first: tuple[Passed, Passed]  # what was walked before the first of them
    last: tuple[Passed, Passed]  # before the last of them

    @property
    def order(self) -> tuple[int, bool, int, int]:
        """What is no number of layers."""
        return self.kind, self.again, self.behind, self.ahead


def neighbours_on_the_way_back(
    model: ModelSpec, walked: Sequence[tuple[int, bool]]
) -> tuple[Neighbours, ...]:
    """Return them in the order of the walk; nothing where all layers have the same tensors.

    ``walked``: the kinds of the layers that a backward pass reaches, first to last, and whether
    they are recomputed. The last layer is the last of them, with nothing ahead.
    """
    kinds = [kind for kind, _ in walked]
    if len({model.kinds[kind].weights for kind in set(kinds)}) < 2:
        return ()
    passed, again = [0] * len(model.kinds), [0] * len(model.kinds)
    found: dict[tuple[int, bool, int, int], Neighbours] = {}
    sides = zip([NONE, *kinds], [*kinds[1:], NONE], strict=False)
    for (kind, repeats), (behind, ahead) in zip(walked, sides, strict=True):
        before = tuple(passed), tuple(again)
        key = (kind, repeats, behind, ahead)
        first = found[key].first if key in found else before
        found[key] = Neighbours(*key, first, before)
        passed[kind] += 1
        again[kind] += repeats
    return tuple(found.values())
