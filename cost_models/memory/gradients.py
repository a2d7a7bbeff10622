"""Gradients that one accelerator holds at the moments of a step that can be its peak.

Units: bytes. Every argument may be a column of a plan table.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from cost_models.arrays import Count, Flag, Real
from cost_models.columnar.columns import by_value
from cost_models.memory.model_states import accumulated_gradient_bytes, reduced_gradient_bytes
from cost_models.model.spec import ModelSpec
from cost_models.partition.rank_parameters import RankParameters
from cost_models.plan.plan import PlanTable
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import SoftwareProfile


def shares(params: RankParameters, table: PlanTable) -> list[tuple[Real, Count]]:
    """Return elements and the ranks that share them: experts that are apart, and all else."""
    return _shared(params.total, params.expert_total, table)


def _shared(numel: Real, apart: Real, table: PlanTable) -> list[tuple[Real, Count]]:
    return [
        (numel - apart, table.shard_ranks),
        (apart, np.maximum(1, table.expert_shard_ranks)),
    ]


def reduces_once(software: SoftwareProfile, table: PlanTable) -> Flag:
    """Whether gradients stay whole until the last micro-batch, whatever the ZeRO stage."""
    pipelined = table.pipeline_parallel > 1
    under_pipeline = pipelined & software.gradients.reduced_once_under_pipeline
    found: Flag = under_pipeline | software.gradients.accumulated_unsharded
    return found


@dataclass(frozen=True, slots=True)
class Gradients:
    """Bytes of gradients at the moments of ``MOMENTS``."""

    full_flight: Real  # while all micro-batches are in flight
    later: Real  # once the first of them is done
    last_layer: Real  # when the last backward pass is at the first layer
    embedding: Real  # when it is at the embedding
    reduced: Real  # what the optimizer reads

    def where_offloaded(self, table: PlanTable, layer: Real) -> Gradients:
        """Offloaded gradients, which leave with the weights: at most a layer's shard stays."""
        moves = table.offloads_weights
        shard = layer / np.maximum(1, table.shard_ranks)
        at = {f.name: np.where(moves, shard, getattr(self, f.name)) for f in fields(self)}
        return Gradients(**{**at, "reduced": np.where(moves, 0.0, self.reduced)})


def gradients_of(
    workload: Workload,
    software: SoftwareProfile,
    table: PlanTable,
    params: RankParameters,
    in_flight: Real,
) -> Gradients:
    """Return the gradients as the trainer and the ZeRO stage accumulate and reduce them."""
    gradient = workload.gradient_bytes(in_master_precision=software.gradients.in_master_precision)
    defers = reduces_once(software, table)

    parts_of, numel = shares(params, table), params.total
    in_place = workload.compute_bytes == workload.master_bytes
    keeps = software.gradients.whole_replica_buffer and in_place

    def stay(ranks: Count) -> Flag:
        found: Flag = by_value((table.zero_stage == 0) & np.greater(ranks, 1) & keeps)
        return found

    def accumulated(when: Flag) -> Real:
        parts = (
            np.where(
                stay(ranks),
                gradient * part,
                accumulated_gradient_bytes(
                    part,
                    ranks,
                    table.zero_stage,
                    gradient,
                    accumulates=when,
                    defers_reduction=defers,
                ),
            )
            for part, ranks in parts_of
        )
        return sum(parts, start=np.zeros(len(table)))

    if software.optimizer.in_backward:  # only what one block's gradients take
        none = np.zeros(len(table))
        layer, outer = gradient * params.largest_layer, gradient * params.embedding
        return Gradients(none, none, layer, outer, none)
    if software.gradients.whole_buffer:
        buffer = gradient * numel
        return Gradients(buffer, buffer, buffer, buffer, buffer)

    def reduced_of(parts: list[tuple[Real, Count]]) -> Real:
        each = (reduced_gradient_bytes(n, ranks, table.zero_stage, gradient) for n, ranks in parts)
        return sum(each, start=np.zeros(len(table)))

    def coming(parts: list[tuple[Real, Count]]) -> Real:
        return reduced_of([(np.where(stay(ranks), 0.0, n), ranks) for n, ranks in parts])

    reduced = reduced_of(parts_of)
    later = accumulated(by_value(table.num_microbatches > 1))
    # a block's gradient comes only when the pass has reached it, unless an earlier one left it
    embedding = coming([(params.embedding, table.shard_ranks)])
    layer = coming(_shared(params.largest_layer, params.expert_layer, table))
    at_embedding = np.maximum(later, reduced - embedding)
    at_layer = np.maximum(later, reduced - embedding - layer)
    return Gradients(
        full_flight=accumulated(by_value(table.num_microbatches > in_flight)),
        later=later,
        last_layer=at_layer,
        embedding=at_embedding,
        reduced=reduced,
    )


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
