"""Buffers of torch FSDP1 and similar trainers: gathered weights and unreduced gradients.

A unit is a layer, or the root: embedding, last norm and head together. The root is gathered once
and stays so through the step; layers are gathered one or two at a time (prefetch). A unit's
gradient is whole until it is reduced.

Units: bytes. Source: Zhao et al. (arXiv:2304.11277), sec. 4.2 and 4.3; torch 2.4
distributed/fsdp/_runtime_utils.py (the root is not resharded after its forward pass).

Leaves out: more layers gathered ahead, where torch's rate limiter is off (limit_all_gathers=False).
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from cost_models.arrays import Flag, Real
from cost_models.memory.autocast_copies import gathered_bytes
from cost_models.memory.gradients import Gradients
from cost_models.memory.ledger import Item, added, either, product
from cost_models.model.lora import frozen_part, has_frozen, trainable_part
from cost_models.partition.frozen_weights import sharded_bytes
from cost_models.partition.rank_parameters import rank_parameters
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import PlanTable
from hardware_profiles.software.trainer import SoftwareProfile


class Units(Struct, frozen=True):
    """Bytes of whole weights and gradients, of the root and of a layer."""

    root: Real
    layer: Real
    root_gradient: Real
    layer_gradient: Real
    all_gradients: Real
    frozen_layers: Real  # of all layers, without adapters


def units(view: RankView) -> Units:
    """Return the sizes of a rank's units: trained, frozen and quantised weights together."""
    model, workload, software = view.model, view.workload, view.software
    table, rank = view.table, view.rank
    compute = gathered_bytes(workload, software)
    parts = [(trainable_part(model), compute, True)]
    if has_frozen(model):
        among = software.gradients.include_frozen
        plain = compute if software.frozen.in_fp32 else workload.compute_bytes
        parts.append((frozen_part(model, quantised=False), plain, among))
        parts.append((frozen_part(model, quantised=True), sharded_bytes(view), False))
    with_adapters = any(w.is_adapter for kind in model.kinds for w in kind.weights)
    zeros = np.zeros(len(table))
    root, layer, root_gradient, layer_gradient, whole, frozen = (zeros for _ in range(6))
    for part, each, has_gradient in parts:
        params = rank_parameters(part, rank, table)
        outer = params.embedding + params.head
        root, own = root + each * outer, each * params.largest_layer
        # adapters lie in the layers of their base; else a layer is trained or frozen
        layer = layer + own if with_adapters else np.maximum(layer, own)
        if with_adapters and part is not parts[0][0]:
            frozen = frozen + each * (params.total - outer)
        if has_gradient:
            root_gradient = root_gradient + compute * outer
            layer_gradient = layer_gradient + compute * params.largest_layer
            whole = whole + compute * params.total
    return Units(root, layer, root_gradient, layer_gradient, whole, frozen)


def is_gathered(software: SoftwareProfile, table: PlanTable) -> Flag:
    """Whether a plan's units are gathered, or cast by NO_SHARD, for their passes alone."""
    found: Flag = (table.zero_stage >= 3) & (table.shard_ranks > 1)
    if software.sharding.casts_unsharded:
        found = found | (table.zero_stage == 0)
    return found


def flat_buffers(
    software: SoftwareProfile, table: PlanTable, whole: Units, others: dict[str, Item]
) -> dict[str, Item]:
    """Buffers, besides the shards, at each moment of ``others``, where a plan shards.

        loss      root gathered after the layers' forward passes; in the backward pass g - 1 layers
        head      the same and the root's gradient
        backward  root + g layers, the gradients of the root and of a layer

    The root's own hook gathers the last layer ahead (BACKWARD_PRE: _pre_backward_hook).
    Where frozen layers stay gathered (``sharding.frozen_stay``), all of them are at the end of the
    backward pass. Elsewhere that of ``others``. Whole gradients that are added up (no_sync) are no
    buffers.
    """
    sharded = is_gathered(software, table)
    kept = software.gradients.accumulated_unsharded & (table.num_microbatches > 1)
    each = software.sharding.gathered_layers
    root = _whole("buffers", "gathered root: embedding, last norm, head", whole.root)
    fresh = _whole("buffers", "the root's gradient", np.where(kept, 0.0, whole.root_gradient))
    layer = _whole("buffers", "a layer's gradient", np.where(kept, 0.0, whole.layer_gradient))

    def layers(count: float) -> Item:
        each = ("bytes of a layer", whole.layer, "bytes")
        return product("buffers", "gathered layers", ("g", count, "layers"), each)

    backward = added(root, layers(each), fresh, layer)
    stay: tuple[Item, ...] = ()
    if software.sharding.frozen_stay:
        stay = (_whole("buffers", "frozen layers that stay gathered", whole.frozen_layers),)
    at = {
        "loss_forward": root,
        "loss_backward": added(root, layers(each - 1.0)),
        "head": added(root, layers(each - 1.0), fresh),
        "backward": backward,
        "last_layer": added(root, *stay, fresh, layer) if stay else backward,
        "embedding": added(root, *stay, fresh),
    }
    return {name: either(sharded, row, others[name]) for name, row in at.items()}


def flat_gradients(
    software: SoftwareProfile, table: PlanTable, whole: Units, others: Gradients
) -> Gradients:
    """Whole gradients of all units, where they are added up before they are reduced (no_sync).

    The optimizer reads shards: a unit's whole gradient is dropped once it is reduced (_reduce_grad:
    flat_param.grad = None). If the longest sequences come first, no gradients are accumulated at
    their peak.
    """
    if not software.gradients.accumulated_unsharded:
        return others
    kept = (table.zero_stage >= 3) & (table.shard_ranks > 1) & (table.num_microbatches > 1)
    row = _whole("gradients", "whole gradients of all units", whole.all_gradients)
    early = software.activations.longest_sequences_first
    none = {name: replace(row, size=0.0) for name in ("full_flight", "later")} if early else {}
    return others.replaced(kept, row, reduced=others.reduced, **none)


def _whole(part: str, name: str, size: Real) -> Item:
    return Item(part, name, size, formula="bytes of the unit")
