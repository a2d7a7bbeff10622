"""What one rank sends in one optimizer step: number and bytes of collectives, by axis and kind.

Bytes are those of the full tensor: the output of an all-gather, the input of a reduce-scatter, the
tensor
of an all-reduce, the message of a send. Everything broadcasts over plan columns.

Symbols   T tokens of a micro-batch   h hidden_size   c compute_bytes, w master_bytes
          m num_microbatches
          P elements of a block on a tensor-parallel rank   t tensor_parallel   z zero_stage
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.model import ModelSpec, Weight
from cost_models.parameters import shard_numel
from cost_models.plan import RECOMPUTE, PlanTable
from cost_models.stages import PipelineRank
from cost_models.workload import COMPUTE_BYTES, MASTER_BYTES, Workload

AXES: Final = ("data", "tensor", "pipeline", "world")
KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "send")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind on one axis in one step."""

    count: Real
    size: Real  # bytes, all together

    def __add__(self, other: Traffic) -> Traffic:
        """Add counts and bytes."""
        return Traffic(self.count + other.count, self.size + other.size)


def rank_traffic(
    model: ModelSpec, workload: Workload, table: PlanTable, rank: PipelineRank
) -> dict[tuple[str, str], Traffic]:
    """Return the traffic of a rank on this pipeline rank, by (axis, kind)."""
    return {
        **data_traffic(model, workload, table, rank),
        **tensor_traffic(model, workload, table, rank),
        **pipeline_traffic(model, workload, table, rank),
    }


def _blocks(model: ModelSpec, rank: PipelineRank) -> list[tuple[int, tuple[Weight, ...]]]:
    blocks = [(n, kind.weights) for n, kind in zip(rank.kind_counts, model.kinds, strict=True) if n]
    if rank.first:
        blocks.append((1, model.embedding))
    if rank.last:
        blocks.append((1, model.head))
    return blocks


def data_traffic(
    model: ModelSpec, workload: Workload, table: PlanTable, rank: PipelineRank
) -> dict[tuple[str, str], Traffic]:
    """Gradient reduction and weight gathering, once for each block (layer, embedding, head).

    z = 0  all-reduce w P a step
    z = 1  all-gather c P and reduce-scatter w P a step
    z = 2  the same for every micro-batch (under a pipeline: as z = 1)
    z = 3  two all-gathers a micro-batch
    """
    compute, master = COMPUTE_BYTES[workload.precision], MASTER_BYTES[workload.precision]
    blocks: Real = np.zeros(len(table))
    numel: Real = np.zeros(len(table))
    for count, weights in _blocks(model, rank):
        blocks = blocks + count
        numel = numel + count * sum(shard_numel(w, table.tensor_parallel) for w in weights)
    active = table.data_parallel > 1
    each = np.where(table.pipeline_parallel > 1, 1.0, 1.0 * table.num_microbatches)
    reductions = np.where(table.zero_stage >= 2, each, 1.0)
    gathers = np.select(
        [table.zero_stage == 3, table.zero_stage == 2],
        [2.0 * table.num_microbatches, each],
        1.0,
    )
    whole = np.where(active & (table.zero_stage == 0), 1.0, 0.0)
    sharded = np.where(active & (table.zero_stage >= 1), 1.0, 0.0)
    return {
        ("data", "all_reduce"): Traffic(whole * blocks, whole * master * numel),
        ("data", "all_gather"): Traffic(
            sharded * gathers * blocks, sharded * gathers * compute * numel
        ),
        ("data", "reduce_scatter"): Traffic(
            sharded * reductions * blocks, sharded * reductions * master * numel
        ),
    }


def tensor_traffic(
    model: ModelSpec, workload: Workload, table: PlanTable, rank: PipelineRank
) -> dict[tuple[str, str], Traffic]:
    """Activations of the residual stream, T h c each.

        without sequence parallelism  2 all-reduces forward, 2 backward a layer
        with                          2 all-gathers and 2 reduce-scatters each way
        full recomputation            the forward pass once more

    Source: Shoeybi et al. (arXiv:1909.08053), fig. 4; Korthikanti et al. (arXiv:2205.05198), sec.
    4.2.2.
    """
    compute = COMPUTE_BYTES[workload.precision]
    message = compute * workload.seq_len * table.micro_batch_size * model.hidden_size
    layers = float(sum(rank.kind_counts))
    again = np.where(table.recompute == RECOMPUTE.index("full"), 1.0, 0.0)
    passes = (2.0 + again) * table.num_microbatches
    count = 2.0 * layers * passes + (float(rank.first) + float(rank.last)) * table.num_microbatches
    plain = np.where((table.tensor_parallel > 1) & ~table.sequence_parallel, count, 0.0)
    along = np.where((table.tensor_parallel > 1) & table.sequence_parallel, count, 0.0)
    return {
        ("tensor", "all_reduce"): Traffic(plain, plain * message),
        ("tensor", "all_gather"): Traffic(along, along * message),
        ("tensor", "reduce_scatter"): Traffic(along, along * message),
    }


def pipeline_traffic(
    model: ModelSpec, workload: Workload, table: PlanTable, rank: PipelineRank
) -> dict[tuple[str, str], Traffic]:
    """Outputs to the next stage, gradients to the previous: T h c (/ t if sequence parallel)."""
    compute = COMPUTE_BYTES[workload.precision]
    along = np.where(table.sequence_parallel, 1.0 * table.tensor_parallel, 1.0)
    message = compute * workload.seq_len * table.micro_batch_size * model.hidden_size / along
    stages: Count = table.virtual_stages
    forward = stages - float(rank.last)  # the last rank's last stage sends nothing on
    backward = stages - float(rank.first)
    active = table.pipeline_parallel > 1
    count = np.where(active, (forward + backward) * table.num_microbatches, 0.0)
    return {("pipeline", "send"): Traffic(count, count * message)}
