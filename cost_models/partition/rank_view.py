"""One pipeline rank under the plans of a table: the argument of most formulas.

Units: as named; every property is a number or a column of the plan table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as replaced
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from cost_models.arrays import Real, holds
from cost_models.columnar.known_rows import KnownRows
from cost_models.model.lora import trainable_part
from cost_models.model.spec import LayerKind, ModelSpec
from cost_models.model.target_length import with_target_length
from cost_models.partition.rank_parameters import RankParameters, rank_parameters
from cost_models.partition.stages import PipelineRank
from cost_models.partition.tensor_sharding import sequence_shards
from cost_models.plan.factored import rows_of
from cost_models.plan.plan import PlanTable
from cost_models.plan.workload import Workload
from cost_models.scenario import Scenario
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.software.trainer import SoftwareProfile


class LayersOfKind(Struct, frozen=True):
    """The layers of one kind on a pipeline rank."""

    kind: LayerKind
    count: int
    recomputed: int  # of ``count``: those that a plan with recomputation recomputes

    @property
    def trained(self) -> int:
        """Layers with a backward pass."""
        return 0 if self.kind.forward_only else self.count

    @property
    def run_again(self) -> int:
        """Layers with a backward pass that are recomputed."""
        return 0 if self.kind.forward_only else self.recomputed


class RankView(Struct, frozen=True, dict=True):
    """A scenario, a table of plans, and one pipeline rank of these plans.

    All rows of the table give the rank the same contents (its stages and recomputed layers).
    """

    scenario: Scenario
    table: PlanTable
    rank: PipelineRank

    @cached_property
    def model(self) -> ModelSpec:
        """The model of the scenario, with the length of its targets."""
        return with_target_length(self.scenario.model, self.scenario.workload)

    def own(self, kind: LayerKind) -> RankView:
        """The rank with the sequences of a kind of layers: their ``seq_len`` and ``tokens``."""
        length = kind.own_seq_len(self.workload.seq_len)
        return self if length == self.workload.seq_len else self._of_targets

    @property
    def at_head(self) -> RankView:
        """The rank with the sequences that reach the head."""
        return self.own(self.model.kinds[self.model.pattern[-1]])

    @cached_property
    def _of_targets(self) -> RankView:
        length = self.workload.target_seq_len
        workload = replaced(self.workload, seq_len=length, target_seq_len=0)
        return replace(self, scenario=replaced(self.scenario, model=self.model, workload=workload))

    @property
    def cluster(self) -> Cluster:
        """The cluster of the scenario."""
        return self.scenario.cluster

    @property
    def links(self) -> Any:
        """The links of each row (``LinkColumns``); None if all rows are on the cluster."""
        columns = self.scenario.columns
        return None if columns is None else columns.links

    @property
    def workload(self) -> Workload:
        """The workload of the scenario."""
        return self.scenario.workload

    @property
    def software(self) -> SoftwareProfile:
        """The trainer of the scenario."""
        return self.scenario.software

    @property
    def on_gpu(self) -> bool:
        """Whether the accelerator is a device of its own and not the host's processor."""
        return self.scenario.on_gpu

    @property
    def compute_bytes(self) -> float:
        """Bytes of an element in the precision of the matmuls (c)."""
        return self.scenario.workload.compute_bytes

    @cached_property
    def reduction_bytes(self) -> Real:
        """Bytes of an element of a gradient while data-parallel ranks reduce it (r).

            c   sharded gradients, where the trainer reduces them so (reduced_in_compute_precision);
                those of fp16, whoever reduces them, where fp16_reduced_in_fp16
            g   elsewhere

        The optimizer reads a shard that is cast back to the precision of its weights.

        Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce
        (reduce_dtype, then orig_dtype).
        """
        workload = self.workload
        narrow = self.software.gradients.reduced_in_compute_precision
        if self.reduces_fp16:
            return workload.compute_bytes
        if not narrow or workload.gradient_precision != "auto":
            return workload.reduction_bytes
        sharded = self.table.zero_stage >= 1
        return np.where(sharded, workload.compute_bytes, workload.reduction_bytes)

    @property
    def reduces_fp16(self) -> bool:
        """Whether gradients of fp16 are reduced in fp16 by whoever reduces them."""
        found = self.workload.precision == "fp16" and self.workload.gradient_precision == "auto"
        return found and self.software.gradients.fp16_reduced_in_fp16

    @cached_property
    def tokens(self) -> Real:
        """Tokens of a micro-batch on the rank: b s / context_parallel."""
        table = self.table
        return 1.0 * self.workload.seq_len * table.micro_batch_size / table.context_parallel

    @cached_property
    def sequence_shards(self) -> Real:
        """Ranks that norms and dropouts are sharded over: t with sequence parallelism, else 1."""
        return sequence_shards(self.table.tensor_parallel, self.table.sequence_parallel)

    @cached_property
    def parameters(self) -> RankParameters:
        """Trained elements on the rank, by block."""
        return rank_parameters(self.trained_model, self.rank, self.table)

    @property
    def trained_model(self) -> ModelSpec:
        """The model without its frozen tensors."""
        return trainable_part(self.model)

    @cached_property
    def layers(self) -> list[LayersOfKind]:
        """Layers of the rank by kind, without kinds that have none."""
        counts = zip(self.model.kinds, self.rank.kind_counts, self.rank.recomputed, strict=True)
        return [LayersOfKind(*each) for each in counts if holds(each[1])]

    def with_table(self, table: PlanTable) -> RankView:
        """Return the same rank under other plans."""
        return replace(self, table=table)

    def on_known_rows(
        self, names: Sequence[str], formula: Callable[[RankView], Sequence[Real]], *values: Any
    ) -> Sequence[Real]:
        """Return a formula's columns; rows of the table that an earlier view had are not priced.

        ``names``: columns of the table that it depends on, besides the ``values``, the model, the
        workload and the trainer.
        """
        if self.links is not None:
            return formula(self)
        same = self.model, self.workload, self.software
        known = _known_rows(formula.__qualname__, *map(id, same), *values)
        known.alive = same
        columns = [getattr(self.table, name) for name in names]
        found = known.columns(
            columns, lambda rows: formula(self.with_table(rows_of(self.table, rows)))
        )
        return formula(self) if found is None else found


@lru_cache(maxsize=256)
def _known_rows(*_: Any) -> KnownRows:
    """Return the known results of a formula."""
    return KnownRows()
