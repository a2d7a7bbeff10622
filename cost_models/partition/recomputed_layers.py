"""Which layers of a stage are recomputed, where a plan recomputes, and what of a layer is not.

A plan says it in one of three ways: the first n layers of every (virtual) stage, the first n of
every k layers of a stage (``full:n/k``), or the first so many of each stage, one number a stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cost_models.model.spec import LayerKind, Weight
from cost_models.plan.plan import Plan, split_layers
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import SoftwareProfile

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The layers that are recomputed; the default is all of them."""

    layers: int = 0  # the first ones of every ``every`` layers; 0: all
    every: int = 0  # 0: of the whole stage
    by_stage: tuple[int, ...] | None = None  # instead: the first ones of each stage, none of a 0

    def of_stage(self, stage: int, layer_range: tuple[int, int]) -> list[int]:
        """Return the layers of one stage, which holds the layers [first, last).

        >>> Recomputed().of_stage(0, (4, 8)), Recomputed(3).of_stage(0, (4, 8))
        ([4, 5, 6, 7], [4, 5, 6])
        >>> Recomputed(1, every=2).of_stage(0, (4, 9))
        [4, 6, 8]
        >>> Recomputed(by_stage=(2, 0)).of_stage(1, (4, 8))
        []
        """
        first, last = layer_range
        if self.by_stage is not None:
            return list(range(first, min(last, first + self.by_stage[stage])))
        if not self.layers:
            return list(range(first, last))
        period = self.every or last - first
        return [layer for layer in range(first, last) if (layer - first) % period < self.layers]


def recomputed_layers(plan: Plan, by_stage: tuple[int, ...] | None = None) -> Recomputed:
    """Return the layers that a plan recomputes; ``by_stage``: the numbers of its stages."""
    return Recomputed(plan.recompute_layers, plan.recompute_every, by_stage)


def read_by_stage(values: Any, where: str) -> tuple[int, ...]:
    """Check the numbers of the stages, one by one."""
    whole = isinstance(values, (list, tuple)) and values
    if not whole or any(type(n) is not int or n < 0 for n in values) or not any(values):
        shown = str(values)
        raise InputError(
            f"{where} = {shown if len(shown) <= 60 else shown[:57] + '...'} (must be how many of "
            "the first layers of each stage are recomputed, in the order of the stages: whole "
            "numbers from 0, not all 0)"
        )
    return tuple(values)


def problem_of(
    by_stage: tuple[int, ...], num_stages: int, num_layers: int, ranges: Ranges | None
) -> str | None:
    """Return in words why the numbers of the stages cannot be; ``ranges``: None for even stages.

    >>> problem_of((2, 0, 1), 2, 8, None)
    'recompute_layers = 2,0,1: 3 numbers for 2 stages (must be one for each stage)'
    >>> problem_of((2, 5), 2, 8, None)
    'recompute_layers = 2,5: stage 1 has 4 layers (must be 0 to that)'
    """
    said = "recompute_layers = " + ",".join(map(str, by_stage))
    if len(by_stage) != num_stages:
        return (
            f"{said}: {len(by_stage)} numbers for {num_stages} stages (must be one for each stage)"
        )
    sizes = [last - first for first, last in ranges or split_layers(num_layers, num_stages)]
    for stage, (count, size) in enumerate(zip(by_stage, sizes, strict=True)):
        if count > size:
            return f"{said}: stage {stage} has {size} layers (must be 0 to that)"
    return None


def needs_output(kind: LayerKind, *, hidden_dropout: bool) -> bool:
    """Whether recomputing a layer needs its very output: a norm or a dropout follows it."""
    return kind.norms_after or hidden_dropout


def last_matrix(
    kind: LayerKind, *, hidden_dropout: bool, software: SoftwareProfile
) -> tuple[Weight, ...]:
    """Return the matrix that recomputing a layer leaves out, if there is one.

    Nobody reads the output of a layer's last matrix again, unless a norm or a dropout follows it,
    or the router's weights multiply it: recomputing ends in front of it where a trainer recomputes
    what is read only.
    """
    needed = needs_output(kind, hidden_dropout=hidden_dropout) or kind.feed_forward.num_experts
    if software.kernels.recomputes_whole_layers or needed:
        return ()
    matrices = [w for w in kind.weights if w.part == "mlp" and w.role == "linear"]
    return tuple(w for w in matrices[-1:] if not w.is_adapter)
