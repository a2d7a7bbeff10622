"""The layers of a stage that a plan recomputes, and the part of a layer that is not recomputed.

A plan gives them in one of three forms: the first n layers of every (virtual) stage, the first n of
every k layers of a stage (``full:n/k``), or a number of first layers for each stage.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from cost_models.arrays import Flag, holds
from cost_models.model.spec import LayerKind, Weight
from cost_models.plan.plan import Plan, PlanTable, split_layers
from cost_models.plan.recompute import EVERY_SECOND_MM, repeats_module, repeats_modules
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


def repeated_matrices(kind: LayerKind) -> tuple[Weight, ...]:
    """Return the matrices that ``ops:every-2nd-mm`` computes again, in order.

    torchtitan's policy counts ``aten.mm`` and saves every other result, the first one included;
    a matmul with a bias is another operator, which it does not save. Nor does it save the router's.
    """
    stems = {w.name.rpartition(".")[0] for w in kind.weights if w.name.endswith(".bias")}
    matrices = [w for w in kind.weights if w.role == "linear"]
    counted = [w for w in matrices if w.part != "router" and w.name.rpartition(".")[0] not in stems]
    saved = {w.name for w in counted[::2]}
    return tuple(w for w in matrices if w.name not in saved)


def exchanges_again(software: SoftwareProfile, table: PlanTable) -> Flag:
    """Return which plans exchange tokens of experts again, operator by operator."""
    again: Flag = np.equal(table.recompute, EVERY_SECOND_MM)
    return again if not holds(again) else again & (not software.activations.keeps_exchanged_rows)


def module_matrices(kind: LayerKind, module: str) -> tuple[Weight, ...]:
    """Return the matrices of a module that ``modules:...`` computes again."""
    mixed = bool(kind.feed_forward.num_experts)
    parts = {
        "mlp": () if mixed else ("mlp",),
        "moe": ("router", "experts", "shared_experts", "mlp") if mixed else (),
        "shared_experts": ("shared_experts",) if mixed else (),
        "experts": ("experts",) if mixed else (),
        "attn": ("attention",),
    }
    matrices = [w for w in kind.weights if w.is_matrix]
    if module == "mla_up_proj" and kind.attention.kv_lora_rank:
        return tuple(w for w in matrices if w.part == "attention" and w.sharding == "column")
    return tuple(w for w in matrices if w.part in parts.get(module, ()))


def repeated_by_setting(kind: LayerKind, table: PlanTable) -> list[tuple[Flag, tuple[Weight, ...]]]:
    """Return sets of matrices of a layer, and the plans that compute each again alone.

    A module inside another one that is computed again (``moe``, ``attn``) is not listed twice.
    """
    recompute = table.recompute
    found = [(np.equal(recompute, EVERY_SECOND_MM), repeated_matrices(kind))]
    if np.any(repeats_modules(recompute)):
        moe = repeats_module(recompute, "moe")
        attention = repeats_module(recompute, "attn")
        inside = {"moe": False, "shared_experts": moe, "experts": moe}
        inside |= {"mlp": False, "attn": False, "mla_up_proj": attention}
        for module, outer in inside.items():
            again = repeats_module(recompute, module) & ~np.asarray(outer)
            found += [(again, module_matrices(kind, module))]
    return [(again, matrices) for again, matrices in found if matrices and np.any(again)]
