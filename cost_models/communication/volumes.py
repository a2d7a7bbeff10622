"""What one rank sends in one optimizer step: number and bytes of collectives, by axis and kind.

Bytes are those of the full tensor: the output of an all-gather, the input of a reduce-scatter, the
tensor of an all-reduce, the message of a send. Everything broadcasts over plan columns. The
executor's tests count what its collectives really move and demand exactly these numbers.

Symbols   b micro_batch_size   s tokens of a sequence on a rank   h hidden_size
          m num_microbatches   v virtual_stages   t tensor_parallel
          d ranks that ZeRO shards over   z zero_stage   l layers of this rank
          c compute_bytes   w master_bytes   g reduction_bytes (w, unless it is said)
          x = max(c, 4)   [bytes of an element]
          S elements of a block that one data-parallel rank keeps   P elements of all of them

Shares are those of the first data- and tensor-parallel rank, which holds the most where a size does
not divide evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cost_models.arrays import Count, Flag, Real
from cost_models.communication.context_parallel import context_traffic, rank_tokens
from cost_models.communication.expert_parallel import expert_traffic
from cost_models.communication.tensor_parallel import layer_steps, untrained_steps
from cost_models.communication.traffic import Traffic, TrafficHabits
from cost_models.communication.zero_plus_plus import gathered_bytes, scattered_bytes
from cost_models.model.lora import embedding_is_frozen, projection_is_frozen
from cost_models.model.spec import ModelSpec, Weight
from cost_models.partition.shared_tensors import tied_weights
from cost_models.partition.stages import PipelineRank
from cost_models.partition.tensor_sharding import data_shard, tensor_shape
from cost_models.plan.plan import RECOMPUTE, PlanTable
from cost_models.plan.workload import Workload

# "data": the ranks that share a model's shards; "replicate": the same shard of all copies (HSDP)
# "secondary": neighbours with a second copy of the weights (ZeRO++)
# "expert": the ranks that share a layer's experts; "expert_data": those that share the same ones
AXES: Final = (
    "data",
    "replicate",
    "secondary",
    "context",
    "tensor",
    "expert",
    "expert_data",
    "pipeline",
    "world",
)
EXECUTOR: Final = TrafficHabits()  # the bundled one
KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


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
    found = pass_traffic(model, workload, table, rank)
    for key, traffic in gradient_sums(model, workload, table, rank).items():
        found[key] = found[key] + traffic
    return found


def pass_traffic(
    model: ModelSpec,
    workload: Workload,
    table: PlanTable,
    rank: PipelineRank,
    *,
    habits: TrafficHabits = EXECUTOR,
) -> dict[tuple[str, str], Traffic]:
    """Return it without ``gradient_sums``: on the tensor and pipeline axes, that of passes only."""
    return {
        **data_traffic(model, workload, table, rank, habits=habits),
        **tensor_traffic(model, workload, table, rank, habits=habits),
        **expert_traffic(model, workload, table, rank),
        **context_traffic(model, workload, table, rank),
        **pipeline_traffic(model, workload, table, rank),
        **world_traffic(table),
    }


def gradient_sums(
    model: ModelSpec, workload: Workload, table: PlanTable, rank: PipelineRank
) -> dict[tuple[str, str], Traffic]:
    """Gradients that are added up once a step over tensor-parallel ranks, and over stages.

    tensor    g S of whole tensors to which each rank gives a summand: with sequence parallelism
              every whole tensor, else norms of q and k heads and what belongs to routed experts
    pipeline  g S of a tensor that several stages hold (tied embeddings), from rank to rank, and
              the sum goes back
    """
    active = np.where(table.tensor_parallel > 1, 1.0, 0.0)
    summands = _summands(model, table, rank, workload.reduction_bytes).times(active)
    sent = Traffic(np.zeros(len(table)), np.zeros(len(table)))
    for weight, times in () if embedding_is_frozen(model) else rank.sums:
        size = workload.reduction_bytes * _kept(weight, table)
        sent += Traffic(np.ones(len(table)), size).times(float(times))
    piped = np.where(table.pipeline_parallel > 1, 1.0, 0.0)
    return {("tensor", "all_reduce"): summands, ("pipeline", "send"): sent.times(piped)}


def blocks(model: ModelSpec, rank: PipelineRank) -> list[Block]:
    """Return what the data-parallel ranks gather and reduce together.

    ZeRO-3 gathers a layer for its forward and for its backward pass. The head's backward pass
    follows its forward pass at once, and the gradient of a look-up reads no weight (that of a norm
    beside it does): one gathering each. A tied tensor is part of both blocks; where one stage holds
    both they are one block. What lies between an encoder and a decoder, and the embedding there, is
    part of the block of the embedding or of the head on that stage, or a block of its own.
    """
    found = [
        Block(count, kind.weights, 2.0)
        for count, kind in zip(rank.kind_counts, model.kinds, strict=True)
        if count
    ]
    if rank.alone and model.tie_embeddings:
        return [*found, Block(1, model.outer, 1.0)]
    copy = tied_weights(model) if model.tie_embeddings else ()
    if rank.first:
        here = (*model.embedding, *(model.bridge if rank.bridge == "first" else ()))
        found.append(Block(1, here, 1.0 if all(w.role == "lookup" for w in here) else 2.0))
    if rank.bridge == "between":
        found.append(Block(1, (*model.bridge, *copy), 2.0))
    if rank.last:
        here = model.bridge if rank.bridge == "last" else ()
        found.append(Block(1, (*here, *model.head, *copy), 1.0))
    return found


def data_traffic(
    model: ModelSpec,
    workload: Workload,
    table: PlanTable,
    rank: PipelineRank,
    *,
    habits: TrafficHabits = EXECUTOR,
) -> dict[tuple[str, str], Traffic]:
    """Gradients and weights of every block over the data-parallel ranks.

        z = 0   all_reduce g P           backward pass of the last micro-batch
        z >= 1  reduce_scatter g d S     z = 1: there too;  z >= 2: every backward pass, m times
                                         (``reduces_once``: in the last one)
        z <= 2  all_gather c d S         first forward pass of the step
        z = 3   all_gather c d S         forward and backward passes, 2 m times (head, look-up: m)
        copies  all_reduce g S           over replicas, backward pass of the last micro-batch

    Source: Rajbhandari et al. (arXiv:1910.02054), sec. 7; blocks and padding as in FSDP2, which
    keeps adding up a shard where its all_reduce is put off (torch 2.13, partial_reduce_output).
    Experts that are apart are a block of their own, over the ranks that hold the same ones.
    """
    parts = blocks(model, rank)
    apart = np.where(table.experts_apart, 1.0, 0.0)
    once = habits.reduces_once
    found = _shared_out(workload, table, parts, apart, "data", once)
    if any(w.is_routed_expert for part in parts for w in part.weights):
        for key, traffic in _shared_out(workload, table, parts, apart, "expert_data", once).items():
            found[key] = found[key] + traffic if key in found else traffic
    return found


def _shared_out(
    workload: Workload,
    table: PlanTable,
    parts: Sequence[Block],
    apart: Real,
    axis: str,
    reduces_once: Flag,
) -> dict[tuple[str, str], Traffic]:
    """Return the traffic of the weights that the ranks of one axis share."""
    compute, reduction = workload.compute_bytes, workload.reduction_bytes
    of_experts = axis == "expert_data"
    d = table.expert_shard_ranks if of_experts else table.shard_ranks
    m = 1.0 * table.num_microbatches
    zero = np.zeros(len(table))
    reduced = gathered = scattered = copied = near = Traffic(zero, zero)
    has_second = (table.secondary_ranks > 1) & (table.zero_stage == 3) & (not of_experts)
    for block in parts:
        numel, shards = zero, zero
        for weight in block.weights:
            if weight.frozen:
                continue
            here = 1.0 - apart if weight.is_routed_expert else 1.0
            if of_experts:
                here = apart if weight.is_routed_expert else 0.0
            numel = numel + here * _numel(weight, table)
            shards = shards + here * _shard(weight, table)
        repeats = 1.0 * block.repeats
        once = Traffic(np.where(numel > 0, repeats, 0.0), zero)
        reduced += once + Traffic(zero, repeats * reduction * numel)
        gathers = np.where(table.zero_stage == 3, block.gathers * m, 1.0)
        # the backward pass gathers from the second copy, where there is one
        again = np.where(has_second, (block.gathers - 1.0) * m, 0.0)
        first_way = repeats * gathered_bytes(compute, table) * d * shards
        gathered += (once + Traffic(zero, first_way)).times(gathers - again)
        near += (once + Traffic(zero, repeats * compute * d * shards)).times(again)
        scatters = np.where((table.zero_stage >= 2) & np.logical_not(reduces_once), m, 1.0)
        scattered_size = repeats * scattered_bytes(reduction, table) * d * shards
        scattered += (once + Traffic(zero, scattered_size)).times(scatters)
        copied += once + Traffic(zero, repeats * reduction * shards)
    whole = np.where((d > 1) & (table.zero_stage == 0), 1.0, 0.0)
    sharded = np.where((d > 1) & (table.zero_stage >= 1), 1.0, 0.0)
    return {
        (axis, "all_reduce"): reduced.times(whole),
        (axis, "all_gather"): gathered.times(sharded),
        (axis, "reduce_scatter"): scattered.times(sharded),
        ("secondary", "all_gather"): near.times(sharded),
        ("replicate", "all_reduce"): copied.times(np.where(table.dp_replicate > 1, 1.0, 0.0)),
    }


def tensor_traffic(
    model: ModelSpec,
    workload: Workload,
    table: PlanTable,
    rank: PipelineRank,
    *,
    habits: TrafficHabits = EXECUTOR,
) -> dict[tuple[str, str], Traffic]:
    """Hidden states over the tensor-parallel ranks, c b s h each; per micro-batch:

                            without sequence parallelism     with it
        column-cut matrices all_reduce backward              all_gather forward;
                                                             backward all_gather, reduce_scatter
        row-cut matrix      all_reduce forward               reduce_scatter forward, all_gather back
        experts cut         both of the above, but for the second gathering of their input
        experts whole       all_gather forward, backward     nothing
        full recomputation  the forward collectives again, of the layers that are recomputed
        embedding           all_reduce forward               reduce_scatter forward, all_gather back
        head                all_reduce backward              all_gather forward;
                                                             backward all_gather, reduce_scatter
        encoder's output    all_reduce backward              all_gather forward, reduce_scatter
                            of each stage whose layers read it   back
        loss                all_reduce x b s and 2 x b s     the same
                            (``gathers_logits``: all_gather c b s V instead, both)
        norms over all      all_reduce 2 x b s forward,      the same
        heads (OLMo 2)      backward, recomputed

    A layer has a column-cut and a row-cut step for each attention, MLP and shared expert; latent
    attention has two column-cut steps, as wide as its latents, and one more input that is gathered:
    the keys with positions. The backward pass gathers the input of a column-cut matrix again, or
    has kept it (``habits``). Recomputation stops at the last tensor that is needed: the layer's
    last collective is left out, unless a norm or a dropout follows it.
    Once a step gradients of whole tensors are added up beside this: ``gradient_sums``. Layers below
    all that is trained have the forward part alone. Where a layer casts before it gathers (fp8),
    elements of the embedding's and the head's collectives still have c.

    Source: Shoeybi et al. (arXiv:1909.08053), fig. 4; Korthikanti et al. (arXiv:2205.05198), sec.
    4.2.2; the loss: Shoeybi et al., sec. 3.
    """  # noqa: D400
    compute = workload.compute_bytes
    m, first, last = 1.0 * table.num_microbatches, float(rank.first), float(rank.last)
    tokens = rank_tokens(workload, table)
    zero = Traffic(np.zeros(len(table)), np.zeros(len(table)))
    again = np.where(table.recompute == RECOMPUTE.index("full"), 1.0, 0.0)
    runs = [
        (kind, n, 0 if kind.idle else n, 0 if kind.idle else r * again)
        for n, r, kind in zip(rank.kind_counts, rank.recomputed, model.kinds, strict=True)
        if n
    ]  # how often: forward; backward and again, not below all that is trained
    steps = [
        (layer_steps(model, kind, table, by_matrix=habits.gathers_by_matrix), n, back, r)
        for kind, n, back, r in runs
    ]
    columns = sum((step.columns.times(back) for step, _, back, _ in steps), start=zero)
    rows = sum((step.rows.times(n) for step, n, _, _ in steps), start=zero)
    rows_back = sum((step.rows.times(back) for step, _, back, _ in steps), start=zero)
    rows_again = sum((step.rows_again.times(r) for step, _, _, r in steps), start=zero)
    splits = sum((step.splits.times(n + back) for step, n, back, _ in steps), start=zero)
    outer = Traffic(1.0 + zero.count, float(model.hidden_size) + zero.size)  # one hidden state
    read = outer.times(1.0 * rank.decoders)
    inputs = sum((step.inputs.times(n) for step, n, _, _ in steps), start=read)
    turned = sum((step.inputs.times(back) for step, _, back, _ in steps), start=read)
    inputs_again = sum((step.inputs.times(r) for step, _, _, r in steps), start=zero)
    lookups = first + float(bool(rank.bridge))
    plain = rows + turned + rows_again + outer.times(lookups + last)
    untrained = sum((1.0 * back * untrained_steps(kind) for kind, _, back, _ in runs), start=0.0)
    kept = columns + outer.times(-untrained)  # what the backward pass reads again
    gathers = kept.times(float(habits.gathers_again)) + inputs + rows_back + inputs_again
    # a frozen embedding needs no gradient, a frozen projection not its input again
    around = outer.times(0.0 if embedding_is_frozen(model) else lookups)
    twice = habits.gathers_again and not projection_is_frozen(model)
    around += outer.times(2.0 * last if twice else last)
    share = (habits.gather_bytes or compute) / compute
    gathers = Traffic(gathers.count, share * gathers.size) + around
    along = np.where(table.sequence_parallel, 1.0, 0.0)
    active = np.where(table.tensor_parallel > 1, 1.0, 0.0)
    numbers = last * (not habits.gathers_logits)
    loss = Traffic(2.0 * m * numbers, 3.0 * max(4.0, compute) * tokens * m * numbers)
    whole_norms = sum(
        1.0 * n + back + r for kind, n, back, r in runs if kind.attention.qk_norm == "all"
    )
    statistics = m * whole_norms
    loss = loss + Traffic(statistics, statistics * 2.0 * max(4.0, compute) * tokens)

    def moved(features: Traffic, repeats: Real) -> Traffic:
        """Features of a token to bytes of a step."""
        return Traffic(features.count, features.size * compute * tokens).times(m * repeats * active)

    whole = last * habits.gathers_logits * outer.count
    logits = moved(Traffic(whole, whole * model.vocab_size), 1.0)
    reductions = loss.times(active) + moved(plain, 1.0 - along)
    return {
        ("tensor", "all_reduce"): reductions,
        ("tensor", "all_gather"): moved(gathers, along) + moved(splits, 1.0 - along) + logits,
        ("tensor", "reduce_scatter"): moved(plain, along),
    }


def pipeline_traffic(
    model: ModelSpec, workload: Workload, table: PlanTable, rank: PipelineRank
) -> dict[tuple[str, str], Traffic]:
    """Messages between stages, c b s h (/ t with sequence parallelism) each.

    activations  m (v - 1 if the last stage is here else v)    forward
    gradients    m (v - 1 if the first stage is here else v)   backward
                 one less each at the turn of a V, whose stages hand over on one rank
                 of twice the size where an encoder's output goes along with the decoder's state
    """
    compute = workload.compute_bytes
    along = np.where(table.sequence_parallel, 1.0 * table.tensor_parallel, 1.0)
    message = compute * rank_tokens(workload, table) * model.hidden_size / along
    stages = 2.0 * table.virtual_stages - float(rank.first) - float(rank.last)
    stages = stages - 2.0 * float(rank.adjoining)
    m = 1.0 * table.num_microbatches
    sent = Traffic(stages * m, rank.states_sent * m * message)
    return {("pipeline", "send"): sent.times(np.where(table.pipeline_parallel > 1, 1.0, 0.0))}


def world_traffic(table: PlanTable) -> dict[tuple[str, str], Traffic]:
    """One all_reduce of three fp64 numbers a step: loss, squared norm, and who wants to stop."""
    active = np.where(table.world_size > 1, 1.0, 0.0)
    return {("world", "all_reduce"): Traffic(active, 24.0 * active)}


def _summands(model: ModelSpec, table: PlanTable, rank: PipelineRank, reduction: float) -> Traffic:
    numel: Real = np.zeros(len(table))
    for block in blocks(model, rank):
        for weight in block.weights:
            if weight.cut == "replicate" and not weight.frozen:
                always = weight.gradient_is_summand or weight.part == "router"
                summed = np.where(table.sequence_parallel | always, 1.0, 0.0)
                if weight.is_routed_expert:
                    summed = np.where(table.expert_tensor_parallel, 1.0, 0.0)
                numel = numel + block.repeats * summed * _kept(weight, table)
    return Traffic(np.where(numel > 0, 1.0, 0.0), reduction * numel)


def _kept(weight: Weight, table: PlanTable) -> Real:
    """Elements of a tensor's gradient that a rank keeps after the data-parallel reduction."""
    return np.where(table.zero_stage >= 1, _shard(weight, table), _numel(weight, table))


def _numel(weight: Weight, table: PlanTable) -> Real:
    rows, width = tensor_shape(weight, *_places(weight, table))
    return rows * width


def _shard(weight: Weight, table: PlanTable) -> Real:
    """Elements of a tensor that a rank keeps where ZeRO shards it."""
    tensor, experts = _places(weight, table)
    apart = weight.is_routed_expert & table.experts_apart
    ranks = np.where(apart, table.expert_shard_ranks, table.shard_ranks)
    return data_shard(weight, tensor, ranks, experts)


def _places(weight: Weight, table: PlanTable) -> tuple[Count, Count]:
    """Return over how many ranks a tensor is cut, and over how many its experts are."""
    if not weight.is_routed_expert:
        return table.tensor_parallel, 1
    tensor = np.where(table.expert_tensor_parallel, table.tensor_parallel, 1)
    return tensor, table.expert_parallel
