"""Gradients that one accelerator holds at the moments of a step that can be its peak.

Units: bytes. Every argument may be a column of a plan table.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from cost_models.arrays import Count, Flag, Real
from cost_models.columnar.columns import by_value
from cost_models.memory.model_states import (
    accumulated_gradient_bytes,
    reduced_gradient_bytes,
    shares,
)
from cost_models.model.spec import ModelSpec
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import PlanTable
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import SoftwareProfile


def reduces_once(software: SoftwareProfile, table: PlanTable) -> Flag:
    """Whether gradients stay whole until the last micro-batch, whatever the ZeRO stage."""
    pipelined = table.pipeline_parallel > 1
    under_pipeline = pipelined & software.gradients.reduced_once_under_pipeline
    found: Flag = under_pipeline | software.gradients.accumulated_unsharded
    return found


class Gradients(Struct, frozen=True):
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
        at = {name: np.where(moves, shard, value) for name, value in asdict(self).items()}
        return Gradients(**{**at, "reduced": np.where(moves, 0.0, self.reduced)})


def gradients_of(view: RankView, in_flight: Real) -> Gradients:
    """Return the gradients as the trainer and the ZeRO stage accumulate and reduce them."""
    software, params = view.software, view.parameters
    gradient = view.workload.gradient_bytes(
        in_master_precision=software.gradients.in_master_precision
    )
    if software.optimizer.in_backward:  # only what one block's gradients take
        none = np.zeros(len(view.table))
        layer, outer = gradient * params.largest_layer, gradient * params.embedding
        return Gradients(none, none, layer, outer, none)
    if software.gradients.whole_buffer:
        buffer = gradient * params.total
        return Gradients(buffer, buffer, buffer, buffer, buffer)
    reduction, table = _Reduction(view, gradient), view.table
    parts = shares(params.total, params.expert_total, table)
    reduced = reduction.reduced(parts)
    later = reduction.accumulated(parts, by_value(table.num_microbatches > 1))
    # a block's gradient comes only when the pass has reached it, unless an earlier one left it
    embedding = reduction.coming([(params.embedding, table.shard_ranks)])
    layer = reduction.coming(shares(params.largest_layer, params.expert_layer, table))
    return Gradients(
        full_flight=reduction.accumulated(parts, by_value(table.num_microbatches > in_flight)),
        later=later,
        last_layer=np.maximum(later, reduced - embedding - layer),
        embedding=np.maximum(later, reduced - embedding),
        reduced=reduction.reduced(parts, until_update=False),
    )


class _Reduction(Struct, frozen=True):
    """How gradients are accumulated and reduced; parts: elements, ranks that share them."""

    view: RankView
    gradient: float  # bytes of an element

    def accumulated(self, parts: list[tuple[Real, Count]], when: Flag) -> Real:
        """Bytes between micro-batches, where an earlier one left them."""
        table = self.view.table
        each = (
            np.where(
                self._is_whole_replica(ranks),
                self.gradient * part,
                accumulated_gradient_bytes(
                    part,
                    ranks,
                    table.zero_stage,
                    self.gradient,
                    accumulates=when,
                    defers_reduction=reduces_once(self.view.software, table),
                ),
            )
            for part, ranks in parts
        )
        return sum(each, start=np.zeros(len(table)))

    def reduced(self, parts: list[tuple[Real, Count]], *, until_update: bool = True) -> Real:
        """Bytes after the reduction; ``until_update``: and before the optimizer frees others'."""
        zero = self.view.table.zero_stage
        if until_update and self.view.software.gradients.whole_until_update:
            zero = np.where(zero == 1, 0, zero)
        each = (reduced_gradient_bytes(numel, ranks, zero, self.gradient) for numel, ranks in parts)
        return sum(each, start=np.zeros(len(self.view.table)))

    def coming(self, parts: list[tuple[Real, Count]]) -> Real:
        """Bytes after the reduction of gradients that do not exist before their block's pass."""
        return self.reduced(
            [(np.where(self._is_whole_replica(ranks), 0.0, n), ranks) for n, ranks in parts]
        )

    def _is_whole_replica(self, ranks: Count) -> Flag:
        """Whether replicas keep one buffer of all gradients through the step."""
        workload, software = self.view.workload, self.view.software
        in_place = workload.compute_bytes == workload.master_bytes
        keeps = software.gradients.whole_replica_buffer and in_place
        found: Flag = by_value((self.view.table.zero_stage == 0) & np.greater(ranks, 1) & keeps)
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
