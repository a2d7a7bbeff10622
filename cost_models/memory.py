"""Peak memory of one accelerator: the parts, at the moment when their sum is largest.

A training step has few moments that can be the peak; all of them are priced and the largest counts:

    loss       every in-flight micro-batch's activations, and on the last rank the logits
    backward
    the same activations, and one layer's gradients, gathered weights and recomputed inside
    reduction  no activations; the embedding's gradient on its way to being reduced
    optimizer  no activations; reduced gradients and the optimizer's temporaries

Units: bytes. Every argument may be a column of a plan table whose rows share pipeline_parallel and
virtual_stages (what a rank holds is found once for them, see ``stages``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from cost_models.activations import (
    FULL,
    NONE,
    SELECTIVE,
    backward_working_bytes_per_token,
    layer_regions,
    logits_bytes_per_token,
    norm_bytes,
    saved_bytes_per_token,
)
from cost_models.arrays import Count, Real
from cost_models.model import ModelSpec, Weight
from cost_models.model_states import (
    accumulated_gradient_bytes,
    optimizer_bytes,
    reduced_gradient_bytes,
    weight_bytes,
)
from cost_models.parameters import kind_numel, shard_numel
from cost_models.plan import SCHEDULES, PlanTable
from cost_models.stages import (
    PipelineRank,
    in_flight_1f1b,
    in_flight_gpipe,
    in_flight_interleaved,
)
from cost_models.workload import COMPUTE_BYTES, MASTER_BYTES, OPTIMIZER_STATES, Workload
from hardware_profiles.software import SoftwareProfile

MOMENTS = ("loss", "backward", "reduction", "optimizer")
TOKEN_ID_BYTES = 8.0  # int64 inputs and labels


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes on one accelerator at its peak, by what they are."""

    weights: Real
    gradients: Real
    optimizer: Real
    activations: Real
    logits: Real
    buffers: Real
    runtime: Real

    @property
    def allocated(self) -> Real:
        """Bytes of live tensors."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.logits
            + self.buffers
        )

    @property
    def peak(self) -> Real:
        """Bytes that the device shows as used."""
        return self.allocated + self.runtime


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Elements on one tensor-parallel rank of one pipeline rank (columns over plans)."""

    total: Real
    largest_layer: Real
    embedding: Real
    head: Real


def block_numel(weights: tuple[Weight, ...], tensor_parallel: Count) -> Real:
    """Elements of some tensors on one tensor-parallel rank."""
    return sum((shard_numel(w, tensor_parallel) for w in weights), start=np.asarray(0.0))


def rank_parameters(
    model: ModelSpec, rank: PipelineRank, tensor_parallel: Count, pipeline_parallel: Count
) -> RankParameters:
    """Count what a pipeline rank holds; a tied projection is a second copy only on another rank."""
    kinds = [kind_numel(kind, tensor_parallel) for kind in model.kinds]
    layers = sum(
        (n * size for n, size in zip(rank.kind_counts, kinds, strict=True)), start=np.asarray(0.0)
    )
    present = [size for n, size in zip(rank.kind_counts, kinds, strict=True) if n]
    zero = np.zeros_like(np.multiply(1.0, tensor_parallel))
    embedding = block_numel(model.embedding, tensor_parallel) if rank.first else zero
    head = block_numel(model.head, tensor_parallel) if rank.last else zero
    if rank.last and model.tie_embeddings and model.head_multiply:
        copy = np.multiply(1.0, model.head_multiply) / tensor_parallel
        head = head + np.where(np.greater(pipeline_parallel, 1), copy, 0.0)
    largest = present[0] if present else zero
    for size in present[1:]:
        largest = np.maximum(largest, size)
    return RankParameters(layers + embedding + head, largest, embedding, head)


def in_flight_stages(table: PlanTable, rank: int) -> Real:
    """Stage inputs whose activations a rank holds at its peak, in stages (1/v of its layers)."""
    microbatches, pipeline = table.num_microbatches, table.pipeline_parallel
    gpipe = in_flight_gpipe(microbatches) * table.virtual_stages
    one = in_flight_1f1b(microbatches, pipeline, rank)
    interleaved = in_flight_interleaved(microbatches, pipeline, table.virtual_stages, rank)
    # without a pipeline a micro-batch is walked back before the next one starts
    by_schedule = np.select(
        [
            table.pipeline_schedule == SCHEDULES.index("gpipe"),
            table.pipeline_schedule == SCHEDULES.index("1f1b"),
        ],
        [gpipe, one],
        interleaved,
    )
    return np.where(pipeline > 1, by_schedule, 1.0 * table.virtual_stages)


def rank_memory(
    model: ModelSpec,
    workload: Workload,
    software: SoftwareProfile,
    table: PlanTable,
    rank: PipelineRank,
    *,
    on_gpu: bool,
) -> tuple[MemoryParts, Real]:
    """Return the parts at the peak of one pipeline rank, and the index of the peak's moment.

    Shapes: columns of the table's length. Source: the formulas named in ``model_states`` and
    ``activations``; what torch's FSDP holds while it gathers and reduces (compute-precision weights
    and gradient, fp32 reduction buffer) is counted in ``buffers``.
    """
    compute, master = COMPUTE_BYTES[workload.precision], MASTER_BYTES[workload.precision]
    gradient = master if software.gradients_in_master_precision else compute
    states = OPTIMIZER_STATES[workload.optimizer]
    tensor, data, zero = table.tensor_parallel, table.data_parallel, table.zero_stage
    params = rank_parameters(model, rank, tensor, table.pipeline_parallel)
    tokens = 1.0 * workload.seq_len * table.micro_batch_size
    pipelined = table.pipeline_parallel > 1

    weights = weight_bytes(params.total, data, zero, compute, master)
    optimizer = optimizer_bytes(params.total, data, zero, compute, master, states)
    accumulated = accumulated_gradient_bytes(
        params.total,
        data,
        zero,
        gradient,
        accumulates=table.num_microbatches > 1,
        defers_reduction=pipelined & software.reduces_gradients_at_last_microbatch_under_pipeline,
    )
    reduced = reduced_gradient_bytes(params.total, data, zero, gradient)

    saved, working = _rank_activations(model, workload, software, table, rank)
    tail, logits = _head_activations(model, workload, software, table, rank)
    held = saved + tail + 2.0 * TOKEN_ID_BYTES * tokens
    passing = _pipeline_buffers(model, table, rank, tokens, compute)

    sharded = zero >= 1
    # a block's weights are gathered (ZeRO-3), its gradient waits beside its reduction buffer
    group = np.maximum(params.largest_layer, params.head)
    gathered = np.where(zero >= 3, compute, 0.0)
    reducing = np.where(sharded, compute + master, np.where(compute != master, compute, 0.0))
    at_loss = np.where(zero >= 3, compute * (params.head + params.largest_layer), 0.0)
    zeros = np.zeros_like(tokens)
    moments = [
        (accumulated, held, logits, passing + at_loss),
        (accumulated, held + working, zeros, passing + (gathered + reducing) * group),
        (reduced, zeros, zeros, (gathered + reducing) * params.embedding),
        (reduced, zeros, zeros, zeros),
    ]
    totals = np.stack([sum(parts, start=zeros) for parts in moments])
    moment = np.argmax(totals, axis=0)
    gradients, activations, at_logits, buffers = (
        pick([parts[part] for parts in moments], moment) for part in range(4)
    )
    allocated = weights + optimizer + gradients + activations + at_logits + buffers
    runtime = software.context_bytes + software.allocator_slack * allocated if on_gpu else zeros
    parts = MemoryParts(weights, gradients, optimizer, activations, at_logits, buffers, runtime)
    return parts, moment


def _rank_activations(
    model: ModelSpec,
    workload: Workload,
    software: SoftwareProfile,
    table: PlanTable,
    rank: PipelineRank,
) -> tuple[Real, Real]:
    """Return the bytes that a rank's layers save in flight, and what one backward layer adds."""
    compute = COMPUTE_BYTES[workload.precision]
    tokens = 1.0 * workload.seq_len * table.micro_batch_size
    saved, working = np.zeros_like(tokens), np.zeros_like(tokens)
    for count, kind in zip(rank.kind_counts, model.kinds, strict=True):
        if not count:
            continue
        regions = layer_regions(
            kind,
            model.hidden_size,
            workload.seq_len,
            compute_bytes=compute,
            kernel=workload.attention_kernel,
            hidden_dropout=model.hidden_dropout,
            attention_dropout=model.attention_dropout,
            software=software,
        )

        def per_token(recompute: Count, regions=regions) -> Real:  # type: ignore[no-untyped-def]
            return saved_bytes_per_token(
                regions,
                model.hidden_size,
                compute_bytes=compute,
                tensor_parallel=table.tensor_parallel,
                sequence_parallel=table.sequence_parallel,
                recompute=recompute,
                keeps_gathered_inputs=software.keeps_gathered_inputs,
            )

        saved = saved + count * per_token(table.recompute)
        # what was dropped is there again while its layer is walked backward
        dropped = np.where(
            table.recompute == SELECTIVE, per_token(NONE) - per_token(SELECTIVE), 0.0
        )
        again = np.where(table.recompute == FULL, per_token(NONE), dropped)
        walk = backward_working_bytes_per_token(
            kind, model.hidden_size, compute, table.tensor_parallel
        )
        working = np.maximum(working, (again + walk) * tokens)
    in_flight = in_flight_stages(table, rank.index) / table.virtual_stages
    return saved * tokens * in_flight, working


def _head_activations(
    model: ModelSpec,
    workload: Workload,
    software: SoftwareProfile,
    table: PlanTable,
    rank: PipelineRank,
) -> tuple[Real, Real]:
    """Return what the final norm and the projection save, and the logits with the loss."""
    tokens = 1.0 * workload.seq_len * table.micro_batch_size
    if not rank.last:
        return np.zeros_like(tokens), np.zeros_like(tokens)
    compute = COMPUTE_BYTES[workload.precision]
    kind = model.kinds[model.pattern[-1]]
    along = np.where(table.sequence_parallel, 1.0 * table.tensor_parallel, 1.0)
    inputs_over = 1.0 if software.keeps_gathered_inputs else along
    norm = norm_bytes(kind, model.hidden_size, compute, software) / along
    tail = norm + compute * model.hidden_size / inputs_over
    logits = logits_bytes_per_token(model.vocab_size, compute, table.tensor_parallel, software)
    return tail * tokens, logits * tokens


def _pipeline_buffers(
    model: ModelSpec, table: PlanTable, rank: PipelineRank, tokens: Real, compute_bytes: float
) -> Real:
    """Received inputs, sent outputs and their gradients of the micro-batches in flight.

    A stage keeps, for each, its input (not on the first rank) and its output (not on the last).
    """
    along = np.where(table.sequence_parallel, 1.0 * table.tensor_parallel, 1.0)
    one = compute_bytes * model.hidden_size * tokens / along
    sides = float(not rank.first) + float(not rank.last)
    in_flight = in_flight_stages(table, rank.index)
    return np.where(table.pipeline_parallel > 1, sides * one * in_flight, 0.0)


def pick(columns: list[Real], index: Real) -> Real:
    """Return, row by row, the value of the column that ``index`` names."""
    stacked = np.stack([np.broadcast_to(column, np.shape(index)) for column in columns])
    picked: Real = np.take_along_axis(stacked, np.asarray(index)[None], axis=0)[0]
    return picked


def stack_ranks(per_rank: list[tuple[MemoryParts, Real]]) -> tuple[MemoryParts, Real, Real]:
    """Return the parts of the rank with the largest peak, that rank's position, its moment."""
    peaks = np.stack([parts.peak for parts, _ in per_rank])
    limiting = np.argmax(peaks, axis=0)
    chosen = {
        f.name: pick([getattr(parts, f.name) for parts, _ in per_rank], limiting)
        for f in fields(MemoryParts)
    }
    moment = pick([moment for _, moment in per_rank], limiting)
    return MemoryParts(**chosen), limiting, moment
