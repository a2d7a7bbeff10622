"""Traffic of one rank in one optimizer step: number and bytes of collectives by axis and kind.

Bytes are those of the full tensor: the output of an all-gather, the input of a reduce-scatter, the
tensor of an all-reduce, the message of a send. Everything broadcasts over plan columns. The
executor's tests count the bytes that its collectives move and require exactly these numbers.

Symbols   b micro_batch_size   s tokens of a sequence on a rank   h hidden_size
          m num_microbatches   v virtual_stages   t tensor_parallel
          d ranks that ZeRO shards over   z zero_stage   l layers of this rank
          c compute_bytes   w master_bytes   g reduction_bytes (default w)
          x = max(c, 4)   [bytes of an element]
          S elements of a unit on one data-parallel rank   P elements of the whole unit

Shards are those of the first data- and tensor-parallel rank, the largest if a size does not divide
evenly.

Leaves out: broadcasts at the start of a run, and collectives between steps (checkpoints,
evaluation).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from cost_models.arrays import Count, Real, holds
from cost_models.communication.context_parallel import context_traffic
from cost_models.communication.expert_parallel import expert_traffic
from cost_models.communication.tensor_parallel import tensor_traffic
from cost_models.communication.traffic import EXECUTOR_OPTIONS, Traffic, TrafficOptions, no_traffic
from cost_models.communication.zero_plus_plus import gathered_bytes, scattered_bytes
from cost_models.model.lora import embedding_is_frozen, has_frozen
from cost_models.model.spec import ModelSpec, Weight
from cost_models.partition.frozen_weights import gathered_frozen_bytes
from cost_models.partition.rank_view import RankView
from cost_models.partition.shared_tensors import tied_weights
from cost_models.partition.stages import PipelineRank
from cost_models.partition.tensor_sharding import data_shard, tensor_parallel_shape
from cost_models.plan.plan import PlanTable

# "data": ranks that share a model's shards; "replicate": the same shard of all replicas (HSDP)
# "secondary": neighbours with a secondary copy of the weights (ZeRO++)
# "expert": ranks that share a layer's experts; "expert_data": ranks with the same experts
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
KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


class CommunicationUnit(Struct, frozen=True):
    """Weights that are gathered and reduced together: a layer, the embedding, the head."""

    repeats: Count
    weights: tuple[Weight, ...]
    gathers: float  # gathers a micro-batch under ZeRO-3


def rank_traffic(view: RankView) -> dict[tuple[str, str], Traffic]:
    """Return the traffic of a rank on this pipeline rank, by (axis, kind)."""
    found = pass_traffic(view)
    for key, traffic in shared_gradient_traffic(view).items():
        found[key] = found[key] + traffic
    return found


def pass_traffic(
    view: RankView, *, options: TrafficOptions = EXECUTOR_OPTIONS
) -> dict[tuple[str, str], Traffic]:
    """Return ``rank_traffic`` without ``shared_gradient_traffic``: that of the passes only."""
    return {
        **data_traffic(view, options=options),
        **tensor_traffic(view, options=options),
        **expert_traffic(view),
        **context_traffic(view),
        **pipeline_traffic(view),
        **world_traffic(view.table),
    }


def shared_gradient_traffic(view: RankView) -> dict[tuple[str, str], Traffic]:
    """Traffic of gradients summed once a step over tensor-parallel ranks and over stages.

    tensor    g S of replicated tensors with partial gradients: with sequence parallelism all
              replicated tensors, else norms of q and k heads and those of routed experts
    pipeline  g S of a tensor on several stages (tied embeddings), from rank to rank, and the sum
              back; c S where the trainer sums in it (ties_in_compute_precision)

    Source: Korthikanti et al. (arXiv:2205.05198), sec. 4.2.2 (gradients of norms); Shoeybi et al.
    (arXiv:1909.08053), sec. 3 (tied embeddings); Megatron-LM
    core/distributed/finalize_model_grads.py.
    """
    table = view.table
    summands = no_traffic(len(table))
    if holds(table.tensor_parallel > 1):
        summands = _partial_sum_traffic(view).times(np.where(table.tensor_parallel > 1, 1.0, 0.0))
    sent = no_traffic(len(table))
    for weight, times in () if embedding_is_frozen(view.model) else view.rank.shared_gradients:
        size = _tied_bytes(view) * _reduced_numel(weight, view)
        sent += Traffic(np.ones(len(table)), size).times(float(times))
    piped = np.where(table.pipeline_parallel > 1, 1.0, 0.0)
    return {("tensor", "all_reduce"): summands, ("pipeline", "send"): sent.times(piped)}


def communication_units(model: ModelSpec, rank: PipelineRank) -> list[CommunicationUnit]:
    """Return the weights that the data-parallel ranks gather and reduce together.

    ZeRO-3 gathers a layer for its forward and for its backward pass. The head's backward pass
    follows its forward pass immediately, and the gradient of a look-up reads no weight (that of a
    norm in the same unit does): one gather each. A tied tensor is part of both units; on a stage
    with both, they are one unit. The tensors between an encoder and a decoder, and the embedding
    there, are part of the embedding's or the head's unit on that stage, or a unit of their own.
    """
    found = [
        CommunicationUnit(count, kind.weights, 2.0)
        for count, kind in zip(rank.kind_counts, model.kinds, strict=True)
        if holds(count)
    ]
    first, last = 1 * rank.first, 1 * rank.last
    if model.tie_embeddings and holds(rank.is_whole_model):
        whole = 1 * rank.is_whole_model
        found.append(CommunicationUnit(whole, model.outer, 1.0))
        first, last = first - whole, last - whole
    copy = tied_weights(model) if model.tie_embeddings else ()
    if holds(first):
        here = (*model.embedding, *(model.bridge if rank.bridge == "first" else ()))
        gathers = 1.0 if all(w.role == "lookup" for w in here) else 2.0
        found.append(CommunicationUnit(first, here, gathers))
    if rank.bridge == "between":
        found.append(CommunicationUnit(1, (*model.bridge, *copy), 2.0))
    if holds(last):
        here = model.bridge if rank.bridge == "last" else ()
        found.append(CommunicationUnit(last, (*here, *model.head, *copy), 1.0))
    return found


def data_traffic(
    view: RankView, *, options: TrafficOptions = EXECUTOR_OPTIONS
) -> dict[tuple[str, str], Traffic]:
    """Traffic of the gradients and weights of every unit over the data-parallel ranks.

        z = 0   all_reduce r P           backward pass of the last micro-batch
        z >= 1  reduce_scatter r d S     z = 1: in the same pass;  z >= 2: in every backward pass, m
                                         times (``reduces_once``: in the last one)
        1 <= z <= 2  all_reduce r P      instead, as often (``all_reduces``)
        z <= 2  all_gather c d S         first forward pass of the step
        z = 3   all_gather c d S         forward and backward passes, 2 m times (head, look-up: m)
        copies  all_reduce r S           over replicas, backward pass of the last micro-batch
        frozen  all_gather               z = 3, where the trainer shards them (``_frozen_traffic``)

    r is g, or c of trainers that reduce shards in it (``RankView.reduction_bytes``). Source:
    Rajbhandari et al. (arXiv:1910.02054), sec. 7; units and padding as in FSDP2, which
    accumulates a shard if its all_reduce is deferred (torch 2.13, partial_reduce_output). Experts
    sharded over other ranks are a unit of their own, over the ranks with the same experts. Matrices
    that are cast first are gathered in fewer bytes (``options``).
    """
    parts = communication_units(view.model, view.rank)
    found = _sharded_traffic(view, parts, "data", options)
    if any(w.is_routed_expert for part in parts for w in part.weights):
        experts = _sharded_traffic(view, parts, "expert_data", options)
        for key, traffic in experts.items():
            found[key] = found[key] + traffic if key in found else traffic
    if has_frozen(view.model):
        found["data", "all_gather"] = found["data", "all_gather"] + _frozen_traffic(view)
    return found


def _frozen_traffic(view: RankView) -> Traffic:
    """Gathers of frozen weights that ZeRO-3 shards: 2 m times.

    Leaves out: embedding and head, which one of the passes does not gather.
    """
    table = view.table
    size = np.where(table.shard_ranks > 1, gathered_frozen_bytes(view), 0.0)
    kinds = zip(view.rank.kind_counts, view.model.kinds, strict=True)
    gathers = sum(count * _gathers_of(view, kind.weights, frozen=True) for count, kind in kinds)
    count = np.where(size > 0.0, gathers, 0.0)
    return Traffic(count, size).times(2.0 * table.num_microbatches)


def _gathers_of(view: RankView, weights: Sequence[Weight], *, frozen: bool) -> Real:
    """Gathers of a unit's weights, trained or frozen ones: one, or one for each matrix.

    DeepSpeed's ZeRO-3 gathers matrices one by one; small tensors, adapters among them, stay whole
    (stage3_param_persistence_threshold).
    """
    matrices = sum(len(w.shape) > 1 and w.frozen == frozen and not w.is_adapter for w in weights)
    splits = view.software.sharding.matrices_apart & (view.table.zero_stage == 3)
    return np.where(splits, max(1, matrices), 1.0)


def _sharded_traffic(
    view: RankView, parts: Sequence[CommunicationUnit], axis: str, options: TrafficOptions
) -> dict[tuple[str, str], Traffic]:
    """Return the traffic of the weights that the ranks of one axis shard."""
    table, compute, reduction = view.table, view.compute_bytes, view.reduction_bytes
    of_experts = axis == "expert_data"
    d = table.expert_shard_ranks if of_experts else table.shard_ranks
    m = 1.0 * table.num_microbatches
    zero = np.zeros(len(table))
    reduced = gathered = scattered = copied = near = Traffic(zero, zero)
    has_second = (table.secondary_ranks > 1) & (table.zero_stage == 3) & (not of_experts)
    sizes = _unit_sizes(view, parts, options.matrix_share, of_experts=of_experts)
    for unit, (numel, shards, gathered_shards) in zip(parts, sizes, strict=True):
        repeats = 1.0 * unit.repeats
        once = np.where(numel > 0, repeats, 0.0)
        gathers = np.where(table.zero_stage == 3, unit.gathers * m, 1.0)
        # the backward pass gathers from the secondary copy, if any
        again = np.where(has_second, (unit.gathers - 1.0) * m, 0.0)
        first_way = repeats * gathered_bytes(compute, table) * d * gathered_shards
        each = _gathers_of(view, unit.weights, frozen=False)
        gathered += Traffic(once * each, first_way).times(gathers - again)
        near += Traffic(once, repeats * compute * d * shards).times(again)
        scatters = np.where((table.zero_stage >= 2) & np.logical_not(options.reduces_once), m, 1.0)
        reduced += Traffic(once, repeats * reduction * numel).times(scatters)
        scattered_size = repeats * scattered_bytes(reduction, table) * d * shards
        scattered += Traffic(once, scattered_size).times(scatters)
        copied += Traffic(once, repeats * reduction * shards)
    sums = (table.zero_stage == 0) | ((table.zero_stage <= 2) & options.all_reduces)
    whole = np.where((d > 1) & sums, 1.0, 0.0)
    sharded = np.where((d > 1) & (table.zero_stage >= 1), 1.0, 0.0)
    return {
        (axis, "all_reduce"): reduced.times(whole),
        (axis, "all_gather"): gathered.times(sharded),
        (axis, "reduce_scatter"): scattered.times(np.where(sums, 0.0, sharded)),
        ("secondary", "all_gather"): near.times(sharded),
        ("replicate", "all_reduce"): copied.times(np.where(table.dp_replicate > 1, 1.0, 0.0)),
    }


# columns of a plan on which the sizes of shards depend: the last three, where there are experts
SHARD_COLUMNS: Final = (
    "tensor_parallel",
    "shard_ranks",
    "expert_tensor_parallel",
    "expert_parallel",
    "expert_shard_ranks",
)


def _unit_sizes(
    view: RankView, parts: Sequence[CommunicationUnit], share: float, *, of_experts: bool
) -> list[tuple[Real, Real, Real]]:
    """Return elements of every unit, on a rank, and of its shards, gathered in part as ``share``.

    ``of_experts``: of the experts that are sharded apart; otherwise of all other weights.
    """
    units = tuple(tuple(w for w in unit.weights if not w.frozen) for unit in parts)

    def count(view: RankView) -> list[Real]:
        table, found = view.table, list[Real]()
        flat = view.software.gradients.whole_buffer  # cut evenly, wherever a tensor begins
        apart = np.where(table.experts_apart, 1.0, 0.0)
        for weights in units:
            numel = shards = gathered = np.zeros(len(table))
            for weight in weights:
                here = 1.0 - apart if weight.is_routed_expert else 1.0
                if of_experts:
                    here = apart if weight.is_routed_expert else 0.0
                numel = numel + here * _numel(weight, table)
                shard = here * _shard(weight, table, flat=flat)
                shards = shards + shard
                narrow = weight.is_matrix
                narrow = narrow and weight.part not in ("router", "head")
                gathered = gathered + (share if narrow else 1.0) * shard
            found += numel, shards, gathered
        return found

    routed = any(weight.is_routed_expert for weights in units for weight in weights)
    names = SHARD_COLUMNS if routed else SHARD_COLUMNS[:2]
    columns = view.on_known_rows(names, count, units, share, of_experts)
    return list(zip(*(columns[n::3] for n in range(3)), strict=True))


def pipeline_traffic(view: RankView) -> dict[tuple[str, str], Traffic]:
    """Traffic between stages: messages of c b s h bytes (/ t with sequence parallelism).

    activations  m (v - 1 if the last stage is on this rank else v)    forward
    gradients    m (v - 1 if the first stage is on this rank else v)   backward
                 one less each at the turn of a V, whose two stages are on one rank
                 the encoder's output goes along with the decoder's state, whose s is the targets'

    Source: Narayanan et al. (arXiv:2104.04473), sec. 2.2 and 3.2.
    """
    table, rank = view.table, view.rank
    message = view.compute_bytes * view.tokens * view.model.hidden_size / view.sequence_shards
    stages = 2.0 * table.virtual_stages - 1.0 * rank.first - 1.0 * rank.last
    stages = stages - 2.0 * rank.has_adjacent_stages
    m = 1.0 * table.num_microbatches
    states = stages + view.model.target_share * (rank.hidden_states_sent - stages)
    sent = Traffic(stages * m, states * m * message)
    return {("pipeline", "send"): sent.times(np.where(table.pipeline_parallel > 1, 1.0, 0.0))}


def world_traffic(table: PlanTable) -> dict[tuple[str, str], Traffic]:
    """One all_reduce of three fp64 numbers a step: loss, squared norm, and stop requests."""
    active = np.where(table.world_size > 1, 1.0, 0.0)
    return {("world", "all_reduce"): Traffic(active, 24.0 * active)}


def _tied_bytes(view: RankView) -> float:
    """Bytes of an element of a gradient that stages sum up."""
    workload, narrow = view.workload, view.software.gradients.ties_in_compute_precision
    if view.reduces_fp16 or (narrow and workload.gradient_precision == "auto"):
        return workload.compute_bytes
    return workload.reduction_bytes


def _partial_sum_traffic(view: RankView) -> Traffic:
    """Traffic of gradients that are partial sums on every tensor-parallel rank."""
    table = view.table
    numel: Real = np.zeros(len(table))
    for unit in communication_units(view.model, view.rank):
        for weight in unit.weights:
            if weight.sharding == "replicate" and not weight.frozen:
                always = weight.gradient_is_partial_sum or weight.part == "router"
                summed = np.where(table.sequence_parallel | always, 1.0, 0.0)
                if weight.is_routed_expert:
                    summed = np.where(table.expert_tensor_parallel, 1.0, 0.0)
                numel = numel + unit.repeats * summed * _reduced_numel(weight, view)
    return Traffic(np.where(numel > 0, 1.0, 0.0), view.workload.reduction_bytes * numel)


def _reduced_numel(weight: Weight, view: RankView) -> Real:
    """Elements of a tensor's gradient on a rank after the data-parallel reduction."""
    table, flat = view.table, view.software.gradients.whole_buffer
    shard = _shard(weight, table, flat=flat)
    return np.where(table.zero_stage >= 1, shard, _numel(weight, table))


def _numel(weight: Weight, table: PlanTable) -> Real:
    rows, width = tensor_parallel_shape(weight, *_shard_counts(weight, table))
    return rows * width


def _shard(weight: Weight, table: PlanTable, *, flat: bool) -> Real:
    """Elements of a tensor on a rank if ZeRO shards it, alone or as part of a buffer (``flat``)."""
    tensor, experts = _shard_counts(weight, table)
    apart = weight.is_routed_expert & table.experts_apart
    ranks = np.where(apart, table.expert_shard_ranks, table.shard_ranks)
    if flat:
        even: Real = _numel(weight, table) / np.maximum(1, ranks)
        return even
    return data_shard(weight, tensor, ranks, experts)


def _shard_counts(weight: Weight, table: PlanTable) -> tuple[Count, Count]:
    """Return the number of tensor-parallel shards of a tensor, and of expert-parallel shards."""
    if not weight.is_routed_expert:
        return table.tensor_parallel, 1
    tensor = np.where(table.expert_tensor_parallel, table.tensor_parallel, 1)
    return tensor, table.expert_parallel


def _activations_sent(view: RankView) -> Real:
    """Stages of a rank whose activations go to another rank."""
    return view.table.virtual_stages - 1.0 * view.rank.last - 1.0 * view.rank.has_adjacent_stages


def scattered_stage_messages(
    traffic: dict[tuple[str, str], Traffic], view: RankView
) -> dict[tuple[str, str], Traffic]:
    """Return traffic in which each tensor-parallel rank sends its part of a stage message.

    The receivers gather the parts. With sequence parallelism messages are split already. Gradients
    are whole where ``pipeline.scatters_gradients`` is off; where ``pipeline.sends_masks`` is on, a
    mask of c s^2 bytes goes along with the activations, whole from every rank.

    Source: Narayanan et al. (arXiv:2104.04473), sec. 4.1; microsoft/DeepSpeed of 2020:
    deepspeed/runtime/pipe/engine.py, is_grad_partitioned = False, _exec_send_activations.
    """
    table = view.table
    tensor = np.where(table.sequence_parallel, 1.0, 1.0 * table.tensor_parallel)
    whole = traffic["pipeline", "send"]
    microbatches = 1.0 * table.num_microbatches
    share: Real = 1.0
    if not view.software.pipeline.scatters_gradients:
        messages = np.maximum(1.0, whole.count / microbatches)
        share = np.minimum(1.0, _activations_sent(view) / messages)
    size = whole.size * (share / tensor + 1.0 - share)
    if view.software.pipeline.sends_masks:
        masks = _activations_sent(view) * microbatches * view.compute_bytes
        piped = np.where(table.pipeline_parallel > 1, masks, 0.0)
        size = size + piped * view.workload.seq_len**2
    parts = Traffic(whole.count, size)
    gathers = whole.times(np.where(tensor > 1.0, 1.0, 0.0))
    found = {**traffic, ("pipeline", "send"): parts}
    key = ("tensor", "all_gather")
    found[key] = found[key] + gathers if key in found else gathers
    return found
