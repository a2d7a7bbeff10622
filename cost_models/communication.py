"""What one rank sends in one optimizer step: number and bytes of collectives, by axis and kind.

Bytes are those of the full tensor: the output of an all-gather, the input of a reduce-scatter, the
tensor of an all-reduce, the message of a send. Everything broadcasts over plan columns. The
executor's tests count what its collectives really move and demand exactly these numbers.

Symbols   b micro_batch_size   s seq_len   h hidden_size   m num_microbatches   v virtual_stages
          t tensor_parallel   d ranks that ZeRO shards over   z zero_stage   l layers of this rank
          c compute_bytes   w master_bytes   x = max(c, 4)   [bytes of an element]
          S elements of a block that one data-parallel rank keeps   P elements of all of them

Shares are those of the first data- and tensor-parallel rank, which holds the most where a size does
not divide evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.model import LayerKind, ModelSpec, Weight
from cost_models.plan import RECOMPUTE, PlanTable
from cost_models.sharding import data_shard, tensor_shape
from cost_models.stages import PipelineRank
from cost_models.workload import COMPUTE_BYTES, MASTER_BYTES, Workload

# "data": the ranks that share a model's shards; "replicate": the same shard of all copies (HSDP)
AXES: Final = ("data", "replicate", "tensor", "pipeline", "world")
KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "send")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind on one axis in one step."""

    count: Real
    size: Real  # bytes, all together

    def __add__(self, other: Traffic) -> Traffic:
        """Add counts and bytes."""
        return Traffic(self.count + other.count, self.size + other.size)

    def times(self, repeats: Real) -> Traffic:
        """Repeat everything."""
        return Traffic(self.count * repeats, self.size * repeats)


@dataclass(frozen=True, slots=True)
class Block:
    """Weights that are gathered and reduced together: a layer, the embedding, the head."""

    repeats: int
    weights: tuple[Weight, ...]
    gathers: float  # how often a micro-batch gathers them under ZeRO-3


def rank_traffic(
    model: ModelSpec, workload: Workload, table: PlanTable, rank: PipelineRank
) -> dict[tuple[str, str], Traffic]:
    """Return the traffic of a rank on this pipeline rank, by (axis, kind)."""
    return {
        **data_traffic(model, workload, table, rank),
        **tensor_traffic(model, workload, table, rank),
        **pipeline_traffic(model, workload, table, rank),
        **world_traffic(table),
    }


def blocks(model: ModelSpec, rank: PipelineRank) -> list[Block]:
    """Return what the data-parallel ranks gather and reduce together.

    ZeRO-3 gathers a layer for its forward and for its backward pass. The head's backward pass
    follows its forward pass at once, and the gradient of a look-up reads no weight: one gathering
    each. A tied tensor is part of both blocks; where one rank holds both they are one block.
    """
    found = [
        Block(count, kind.weights, 2.0)
        for count, kind in zip(rank.kind_counts, model.kinds, strict=True)
        if count
    ]
    if rank.first and rank.last and model.tie_embeddings:
        return [*found, Block(1, (*model.embedding, *model.head), 1.0)]
    if rank.first:
        found.append(Block(1, model.embedding, 1.0))
    if rank.last:
        copy = tuple(_tied(model)) if model.tie_embeddings else ()
        found.append(Block(1, (*model.head, *copy), 1.0))
    return found


def data_traffic(
    model: ModelSpec, workload: Workload, table: PlanTable, rank: PipelineRank
) -> dict[tuple[str, str], Traffic]:
    """Gradients and weights of every block over the data-parallel ranks.

        z = 0   all_reduce w P           backward pass of the last micro-batch
        z >= 1  reduce_scatter w d S     z = 1: there too;  z >= 2: every backward pass, m times
        z <= 2  all_gather c d S         first forward pass of the step
        z = 3   all_gather c d S         forward and backward passes, 2 m times (head, look-up: m)
        copies  all_reduce w S           over replicas, backward pass of the last micro-batch

    Source: Rajbhandari et al. (arXiv:1910.02054), sec. 7; blocks and padding as in FSDP2, which
    keeps adding up a shard where its all_reduce is put off (torch 2.13, partial_reduce_output).
    """
    compute, master = COMPUTE_BYTES[workload.precision], MASTER_BYTES[workload.precision]
    t, d, m = table.tensor_parallel, table.shard_ranks, 1.0 * table.num_microbatches
    zero = np.zeros(len(table))
    reduced = gathered = scattered = copied = Traffic(zero, zero)
    for block in blocks(model, rank):
        numel = sum((_numel(w, t) for w in block.weights), start=zero)
        shards = sum((data_shard(w, t, d) for w in block.weights), start=zero)
        repeats = float(block.repeats)
        once = Traffic(zero + repeats, zero)
        reduced += once + Traffic(zero, repeats * master * numel)
        gathers = np.where(table.zero_stage == 3, block.gathers * m, 1.0)
        gathered += (once + Traffic(zero, repeats * compute * d * shards)).times(gathers)
        scatters = np.where(table.zero_stage >= 2, m, 1.0)
        scattered += (once + Traffic(zero, repeats * master * d * shards)).times(scatters)
        copied += once + Traffic(zero, repeats * master * shards)
    whole = np.where((d > 1) & (table.zero_stage == 0), 1.0, 0.0)
    sharded = np.where((d > 1) & (table.zero_stage >= 1), 1.0, 0.0)
    return {
        ("data", "all_reduce"): reduced.times(whole),
        ("data", "all_gather"): gathered.times(sharded),
        ("data", "reduce_scatter"): scattered.times(sharded),
        ("replicate", "all_reduce"): copied.times(np.where(table.dp_replicate > 1, 1.0, 0.0)),
    }


def tensor_traffic(
    model: ModelSpec, workload: Workload, table: PlanTable, rank: PipelineRank
) -> dict[tuple[str, str], Traffic]:
    """Hidden states over the tensor-parallel ranks, c b s h each; per micro-batch:

                            without sequence parallelism     with it
        block (2 a layer)   all_reduce forward, backward     forward all_gather, reduce_scatter;
                                                             backward 2 all_gather, reduce_scatter
        full recomputation  1 all_reduce a layer             2 all_gather, 1 reduce_scatter a layer
        embedding           all_reduce forward               reduce_scatter forward, all_gather back
        head                all_reduce backward              all_gather forward;
                                                             backward all_gather, reduce_scatter
        loss                all_reduce x b s and 2 x b s     the same
        norms over all      all_reduce 2 x b s forward,      the same
        heads (OLMo 2)      backward, recomputed

    The backward pass gathers the input of a column-cut matrix again instead of keeping it.
    Recomputation stops at the last tensor that is needed: the layer's last reduction is left out,
    unless a norm or a dropout follows it.
    Once a step one all_reduce of w S completes the gradients of whole tensors to which each rank
    gives a summand: every whole tensor with sequence parallelism, else only norms of q and k heads.

    Source: Shoeybi et al. (arXiv:1909.08053), fig. 4; Korthikanti et al. (arXiv:2205.05198), sec.
    4.2.2; the loss: Shoeybi et al., sec. 3.
    """  # noqa: D400
    compute, master = COMPUTE_BYTES[workload.precision], MASTER_BYTES[workload.precision]
    m, first, last = 1.0 * table.num_microbatches, float(rank.first), float(rank.last)
    tokens = 1.0 * workload.seq_len * table.micro_batch_size
    hidden = compute * tokens * model.hidden_size
    layers = list(zip(rank.kind_counts, model.kinds, strict=True))
    pairs = float(sum(n * _num_blocks(kind) for n, kind in layers))
    last_is_needed = model.hidden_dropout > 0
    unneeded = float(sum(n for n, kind in layers if not (kind.norms_after or last_is_needed)))
    whole_norms = float(sum(n for n, kind in layers if kind.attention.qk_norm == "all"))
    again = np.where(table.recompute == RECOMPUTE.index("full"), 1.0, 0.0)
    plain = m * (2.0 * pairs + again * (pairs - unneeded) + first + last)
    gathers = m * (3.0 * pairs + again * pairs + first + 2.0 * last)
    scatters = m * (2.0 * pairs + again * (pairs - unneeded) + first + last)
    along = np.where(table.sequence_parallel, 1.0, 0.0)
    active = np.where(table.tensor_parallel > 1, 1.0, 0.0)
    loss = Traffic(2.0 * m * last, 3.0 * max(4.0, compute) * tokens * m * last)
    statistics = m * whole_norms * (2.0 + again)
    loss = loss + Traffic(statistics, statistics * 2.0 * max(4.0, compute) * tokens)
    summands = _summands(model, table, rank, master)
    reductions = Traffic(plain, plain * hidden).times(1.0 - along) + loss + summands
    return {
        ("tensor", "all_reduce"): reductions.times(active),
        ("tensor", "all_gather"): Traffic(gathers, gathers * hidden).times(active * along),
        ("tensor", "reduce_scatter"): Traffic(scatters, scatters * hidden).times(active * along),
    }


def pipeline_traffic(
    model: ModelSpec, workload: Workload, table: PlanTable, rank: PipelineRank
) -> dict[tuple[str, str], Traffic]:
    """Messages between stages, c b s h (/ t with sequence parallelism) each.

    activations  m (v - 1 if the last stage is here else v)    forward
    gradients    m (v - 1 if the first stage is here else v)   backward
    tied         w S, once a step, between the first and the last stage: the sum of the
                 embedding's and the head's gradient
    """
    compute, master = COMPUTE_BYTES[workload.precision], MASTER_BYTES[workload.precision]
    along = np.where(table.sequence_parallel, 1.0 * table.tensor_parallel, 1.0)
    message = compute * workload.seq_len * table.micro_batch_size * model.hidden_size / along
    stages = 2.0 * table.virtual_stages - float(rank.first) - float(rank.last)
    count = stages * table.num_microbatches
    sent = Traffic(count, count * message)
    if model.tie_embeddings and (rank.first or rank.last):
        (tied,) = _tied(model)
        sent += Traffic(np.ones(len(table)), master * _kept(model, tied, table))
    return {("pipeline", "send"): sent.times(np.where(table.pipeline_parallel > 1, 1.0, 0.0))}


def world_traffic(table: PlanTable) -> dict[tuple[str, str], Traffic]:
    """One all_reduce of three fp64 numbers a step: loss, squared norm, and who wants to stop."""
    active = np.where(table.world_size > 1, 1.0, 0.0)
    return {("world", "all_reduce"): Traffic(active, 24.0 * active)}


def _num_blocks(kind: LayerKind) -> int:
    """Pairs of a column-cut and a row-cut matrix in a layer: attentions and MLP."""
    return 2 if kind.cross_attention is None else 3


def _summands(model: ModelSpec, table: PlanTable, rank: PipelineRank, master: float) -> Traffic:
    numel: Real = np.zeros(len(table))
    for block in blocks(model, rank):
        for weight in block.weights:
            if weight.cut == "replicate":
                summed = np.where(table.sequence_parallel | weight.is_head_norm, 1.0, 0.0)
                numel = numel + block.repeats * summed * _kept(model, weight, table)
    return Traffic(np.where(numel > 0, 1.0, 0.0), master * numel)


def _kept(model: ModelSpec, weight: Weight, table: PlanTable) -> Real:
    """Elements of a tensor's gradient that a rank keeps after the data-parallel reduction."""
    t = table.tensor_parallel
    shard = data_shard(weight, t, table.shard_ranks)
    return np.where(table.zero_stage >= 1, shard, _numel(weight, t))


def _numel(weight: Weight, tensor_parallel: Count) -> Real:
    rows, width = tensor_shape(weight, tensor_parallel)
    return rows * width


def _tied(model: ModelSpec) -> list[Weight]:
    """Return the tensor that is both the embedding of tokens and the output projection."""
    return [w for w in model.embedding if w.cut == "vocab"][:1]
