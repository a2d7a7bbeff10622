"""The layers of a stage that a plan recomputes, and the part of a layer that is not recomputed.

A plan gives them in one of three forms: the first n layers of every (virtual) stage, the first n of
every k layers of a stage (``full:n/k``), or a number of first layers for each stage.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from cost_models.model.spec import LayerKind, Weight
from cost_models.plan.plan import Plan, split_layers
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import SoftwareProfile

Ranges = tuple[tuple[int, int], ...]


class RecomputedLayers(Struct, frozen=True):
    """The recomputed layers; by default all."""

    layers: int = 0  # the first ones of every ``every`` layers; 0: all
    every: int = 0  # 0: the whole stage
    by_stage: tuple[int, ...] | None = None  # instead: the number of first layers of each stage

    def of_stage(self, stage: int, layer_range: tuple[int, int]) -> list[int]:
        """Return the recomputed layers of one stage, which owns the layers [first, last).

        >>> RecomputedLayers().of_stage(0, (4, 8)), RecomputedLayers(3).of_stage(0, (4, 8))
        ([4, 5, 6, 7], [4, 5, 6])
        >>> RecomputedLayers(1, every=2).of_stage(0, (4, 9))
        [4, 6, 8]
        >>> RecomputedLayers(by_stage=(2, 0)).of_stage(1, (4, 8))
        []
        """
        first, last = layer_range
        if self.by_stage is not None:
            return list(range(first, min(last, first + self.by_stage[stage])))
        if not self.layers:
            return list(range(first, last))
        period = self.every or last - first
        return [layer for layer in range(first, last) if (layer - first) % period < self.layers]


def recomputed_layers(plan: Plan, by_stage: tuple[int, ...] | None = None) -> RecomputedLayers:
    """Return the layers that a plan recomputes; ``by_stage``: the number for each stage."""
    return RecomputedLayers(plan.recompute_layers, plan.recompute_every, by_stage)


def read_recompute_layers_by_stage(values: Any, where: str) -> tuple[int, ...]:
    """Check the numbers of recomputed layers, one for each stage."""
    whole = isinstance(values, (list, tuple)) and values
    if not whole or any(type(n) is not int or n < 0 for n in values) or not any(values):
        shown = str(values)
        raise InputError(
            f"{where} = {shown if len(shown) <= 60 else shown[:57] + '...'} (must be the number "
            "of recomputed layers at the start of each stage, in the order of the stages: whole "
            "numbers from 0, not all 0)"
        )
    return tuple(values)


def by_stage_error(
    by_stage: tuple[int, ...], num_stages: int, num_layers: int, ranges: Ranges | None
) -> str | None:
    """Return the error in the numbers of the stages, if any; ``ranges``: None for an even split.

    >>> by_stage_error((2, 0, 1), 2, 8, None)
    'recompute_layers = 2,0,1: 3 numbers for 2 stages (must be one for each stage)'
    >>> by_stage_error((2, 5), 2, 8, None)
    'recompute_layers = 2,5: stage 1 has 4 layers (must be 0 to 4)'
    """
    given = "recompute_layers = " + ",".join(map(str, by_stage))
    if len(by_stage) != num_stages:
        return (
            f"{given}: {len(by_stage)} numbers for {num_stages} stages (must be one for each stage)"
        )
    sizes = [last - first for first, last in ranges or split_layers(num_layers, num_stages)]
    for stage, (count, size) in enumerate(zip(by_stage, sizes, strict=True)):
        if count > size:
            return f"{given}: stage {stage} has {size} layers (must be 0 to {size})"
    return None


def needs_output(kind: LayerKind, *, hidden_dropout: bool) -> bool:
    """Whether a recomputed layer's output itself is needed: a norm or a dropout follows it."""
    return kind.norms_after or hidden_dropout


def skipped_last_matrix(
    kind: LayerKind, *, hidden_dropout: bool, software: SoftwareProfile
) -> tuple[Weight, ...]:
    """Return the matrix that the recomputation of a layer skips, if any.

    The output of a layer's last matrix is not read again, unless a norm or a dropout follows it or
    the router's weights multiply it. A trainer that recomputes only what is read stops before it.
    """
    needed = needs_output(kind, hidden_dropout=hidden_dropout) or kind.feed_forward.num_experts
    if software.kernels.recomputes_whole_layers or needed:
        return ()
    matrices = [w for w in kind.weights if w.part == "mlp" and w.role == "linear"]
    return tuple(w for w in matrices[-1:] if not w.is_adapter)
