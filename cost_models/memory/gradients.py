"""Gradients that one accelerator holds at the moments of a step that can be its peak.

Units: bytes; rows of the ledger, columns of a plan table.

Leaves out: rounding of tensors to the allocator's blocks (``memory.allocator``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from cost_models.arrays import Count, Flag, Real, holds
from cost_models.columnar.columns import by_value
from cost_models.memory.ledger import Item, added, either, most
from cost_models.memory.model_states import (
    accumulated_gradients,
    gradients,
    reduced_gradients,
    shares,
)
from cost_models.model.spec import ModelSpec
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import SCHEDULES, PlanTable
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import SoftwareProfile

INTERLEAVED: Final = SCHEDULES.index("interleaved_1f1b")


def reduces_once(software: SoftwareProfile, table: PlanTable) -> Flag:
    """Whether gradients stay whole until the last micro-batch, whatever the ZeRO stage."""
    pipelined = table.pipeline_parallel > 1
    under_pipeline = pipelined & software.gradients.reduced_once_under_pipeline
    found: Flag = under_pipeline | software.gradients.accumulated_unsharded
    return found


class Gradients(Struct, frozen=True):
    """Rows of gradients at the moments of ``MOMENTS``."""

    full_flight: Item  # while all micro-batches are in flight
    later: Item  # once the first of them is done
    last_layer: Item  # when the last backward pass is at the first layer
    embedding: Item  # when it is at the embedding
    reduced: Item  # what the optimizer reads

    def replaced(self, flag: Flag, row: Item, **others: Item) -> Gradients:
        """Return another row under the plans with a flag; ``others``: at single moments."""
        at = asdict(self).items()
        return Gradients(**{name: either(flag, others.get(name, row), own) for name, own in at})


def gradients_of(view: RankView, in_flight: Real) -> Gradients:
    """Return the gradients as the trainer and the ZeRO stage accumulate and reduce them.

    Offloaded ones leave with the weights, or with the optimizer's states (``offloads_masters``): at
    most a layer's shard stays, and what is not reduced yet. Source: torch 2.13,
    distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce (offload_to_cpu: a shard goes
    to the host after its reduction).
    """
    software, params, table = view.software, view.parameters, view.table
    each = view.workload.gradient_bytes(in_master_precision=software.gradients.in_master_precision)
    none = Item("gradients", "gradients", np.zeros(len(table)))
    if software.optimizer.in_backward:  # only what one block's gradients take
        layer = gradients("of the layer being updated", each, params.largest_layer)
        outer = gradients("of the embedding", each, params.embedding)
        found = Gradients(none, none, layer, outer, none)
    elif software.gradients.whole_buffer:
        whole = gradients("one buffer of all gradients", each, params.total)
        found = Gradients(whole, whole, whole, whole, whole)
    else:
        found = _accumulated(view, each, in_flight)
    leave = table.offloads_weights
    if software.optimizer.offloads_masters:
        leave = leave | table.offloads_optimizer
    if not holds(leave):
        return found
    shards = np.maximum(1, table.shard_ranks)
    name, each = "of a layer, on their way to the host", view.workload.reduction_bytes
    layer = gradients(name, each, params.largest_layer, shards)
    # whole ones of earlier micro-batches stay on the device (``reduces_once``)
    several = (table.num_microbatches > 1) & (table.zero_stage >= 2)
    stay = several & reduces_once(software, table) & (not software.optimizer.offloads_masters)
    kept = found.replaced(leave & stay, found.later, full_flight=found.full_flight, reduced=none)
    return kept.replaced(leave & np.logical_not(stay), layer, reduced=none)


def _accumulated(view: RankView, each: float, in_flight: Real) -> Gradients:
    """Return gradients that micro-batches add up, block by block in the last one."""
    params, table = view.parameters, view.table
    parts = shares(params.total, params.expert_total, table)
    stage = one_stage_share(view.software, table)
    deferred = reduces_once(view.software, table)
    # whole ones are added up in the precision of their reduction, if that is narrower
    summand = np.where(deferred, np.minimum(each, view.reduction_bytes), each)

    def accumulated(when: Flag, *, others: bool = False) -> Item:
        """Return what is left by earlier passes; ``others``: of other stages on the rank, too."""
        rows = []
        for number, (numel, ranks) in enumerate(parts):
            ends = 0.0 if number else params.embedding + params.head
            if others and np.any(stage < 1.0):
                finished = np.where(when, (1.0 - stage) * numel, 0.0)
                name = "reduced gradients of other stages"
                shards = np.multiply(1.0, ranks)
                rows.append(gradients(name, each, finished, shards, experts=number > 0))
            row = accumulated_gradients(
                ends + stage * (numel - ends),
                ranks,
                table.zero_stage,
                summand,
                accumulates=when,
                defers_reduction=deferred,
                experts=number > 0,
            )
            buffer = gradients("one buffer of all gradients", each, numel, experts=number > 0)
            rows.append(either(_is_whole_replica(view, ranks), buffer, row))
        return added(*rows)

    # those of other ranks are freed when the optimizer starts
    whole = view.software.gradients.whole_until_update
    zero = np.where(table.zero_stage == 1, 0, table.zero_stage) if whole else table.zero_stage

    def reduced(parts: Sequence[tuple[Real, Count]], zero_stage: Count, sign: float = 1.0) -> Item:
        return added(
            *(
                reduced_gradients(n, ranks, zero_stage, sign * each, experts=number > 0)
                for number, (n, ranks) in enumerate(parts)
            )
        )

    def coming(total: Real, experts: Real) -> Item:
        """Gradients that do not exist before their block's pass, which count negative."""
        found = shares(total, experts, table)
        new = [(np.where(_is_whole_replica(view, ranks), 0.0, n), ranks) for n, ranks in found]
        return reduced(new, zero, -1.0)

    kept = view.software.gradients.zeroed  # as if an earlier micro-batch had left them
    later = accumulated(by_value((table.num_microbatches > 1) | kept), others=True)
    last = reduced(parts, zero)
    # a block's gradient comes only when the pass has reached it, unless an earlier one left it
    embedding = added(last, coming(params.embedding, 0.0))
    layer = coming(params.largest_layer, params.expert_layer)
    return Gradients(
        full_flight=accumulated(by_value((table.num_microbatches > in_flight) | kept)),
        later=later,
        last_layer=most(later, added(embedding, layer)),
        embedding=most(later, embedding),
        reduced=reduced(parts, table.zero_stage) if whole else last,
    )


def one_stage_share(software: SoftwareProfile, table: PlanTable) -> Real:
    """Share of a rank's gradients that are whole at once where each stage reduces its own.

    Interleaved 1F1B runs rounds of p micro-batches through one stage after another. With one round,
    a rank finishes the backward passes of a stage, and shards its gradients, before the next one:
    1 / v of them are whole, and those of its embedding and head; with more rounds, all.

    Source: Narayanan et al. (arXiv:2104.04473), sec. 2.2; torch 2.13, distributed/pipelining
    (schedules.py: REDUCE_GRAD after the last backward pass of a stage). Leaves out: weights that
    a finished stage frees.
    """
    one_round = table.num_microbatches <= table.pipeline_parallel
    looped = table.pipeline_schedule == INTERLEAVED
    later = (table.zero_stage == 1) | ((table.zero_stage >= 2) & reduces_once(software, table))
    freed = later & (table.shard_ranks > 1) & (not software.gradients.zeroed)
    share: Real = np.where(looped & one_round & freed, 1.0 / table.virtual_stages, 1.0)
    return share


def _is_whole_replica(view: RankView, ranks: Count) -> Flag:
    """Whether replicas keep one buffer of all gradients through the step."""
    workload, software = view.workload, view.software
    in_place = workload.compute_bytes == workload.master_bytes
    keeps = software.gradients.whole_replica_buffer and in_place
    found: Flag = by_value((view.table.zero_stage == 0) & np.greater(ranks, 1) & keeps)
    return found


def rearranged_bytes(model: ModelSpec, workload: Workload, table: PlanTable) -> Real:
    """Bytes an element of sharded experts: one matrix of three exists twice.

    Source: torch 2.13, foreach_reduce: a gradient that is not cut along its first dimension.
    """
    experts = max((kind.feed_forward.num_experts for kind in model.kinds), default=0)
    if not experts:
        return np.zeros(len(table))
    held = experts / table.expert_parallel
    inside = np.greater(table.expert_shard_ranks, held) & (table.zero_stage > 0)
    return np.where(inside, workload.compute_bytes / 3.0, 0.0)
