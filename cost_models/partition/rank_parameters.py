"""What a pipeline rank holds of the parameters: all that is trained, what is frozen, its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from cost_models.arrays import Count, Flag, Real
from cost_models.model.lora import (
    STORED_BYTES,
    UNPACKED_AT_ONCE,
    frozen_part,
    has_frozen,
)
from cost_models.model.parameters import kind_numel, routed_numel, shard_numel
from cost_models.model.spec import LayerKind, ModelSpec, Weight
from cost_models.partition.shared_tensors import tied_weights
from cost_models.partition.stages import PipelineRank
from cost_models.plan.plan import PlanTable
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import SoftwareProfile


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Elements on one tensor-parallel rank of one pipeline rank (columns over plans)."""

    total: Real
    apart: Real  # of these, routed experts that are shared out among other ranks than the rest
    apart_layer: Real  # the same of one layer
    largest_layer: Real
    largest_pair: Real  # its two largest matrices
    embedding: Real
    head: Real
    layers: tuple[Real, ...]  # one layer of each of the model's kinds
    apart_layers: tuple[Real, ...]  # and its experts that are apart


def block_numel(weights: tuple[Weight, ...], tensor_parallel: Count) -> Real:
    """Elements of some tensors on one tensor-parallel rank."""
    return sum((shard_numel(w, tensor_parallel) for w in weights), start=np.asarray(0.0))


def rank_parameters(
    model: ModelSpec,
    rank: PipelineRank,
    tensor_parallel: Count,
    pipeline_parallel: Count,
    *,
    expert_tensor: Count | None = None,
    expert_parallel: Count = 1,
    experts_apart: Flag = False,
) -> RankParameters:
    """Count what a pipeline rank holds; a tied projection is a second copy only on another rank.

    What lies between an encoder and a decoder counts as embedding or head, where it is with one of
    them; else as embedding, with a copy of the tied one.
    """
    cut = tensor_parallel if expert_tensor is None else expert_tensor
    kinds = [
        kind_numel(kind, tensor_parallel, expert_tensor=cut, expert_parallel=expert_parallel)
        for kind in model.kinds
    ]
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
    if rank.bridge in ("first", "between"):
        embedding = embedding + block_numel(model.bridge, tensor_parallel)
    if rank.bridge == "between" and model.tie_embeddings:
        embedding = embedding + block_numel(tied_weights(model), tensor_parallel)
    if rank.bridge == "last":
        head = head + block_numel(model.bridge, tensor_parallel)
    largest = present[0] if present else zero
    for size in present[1:]:
        largest = np.maximum(largest, size)
    pairs = [pair_numel(kind, tensor_parallel) for kind in model.kinds]
    pair = np.max(np.stack([np.broadcast_to(p, np.shape(zero)) for p in pairs]), axis=0)
    experts = sum(
        (
            n * routed_numel(kind, cut, expert_parallel)
            for n, kind in zip(rank.kind_counts, model.kinds, strict=True)
        ),
        start=zero,
    )
    apart = np.where(experts_apart, experts, 0.0)
    routed = [routed_numel(kind, cut, expert_parallel) for kind in model.kinds]
    most = np.max(np.stack([np.broadcast_to(r, np.shape(zero)) for r in routed]), axis=0)
    apart_layer = np.where(experts_apart, most, 0.0)
    total = layers + embedding + head
    parts = total, apart, apart_layer, largest, pair, embedding, head
    return RankParameters(
        *parts, tuple(kinds), tuple(np.where(experts_apart, each, 0.0) for each in routed)
    )


def frozen_bytes(
    model: ModelSpec,
    rank: PipelineRank,
    table: PlanTable,
    workload: Workload,
    software: SoftwareProfile,
) -> Real:
    """Bytes of frozen weights: c P, or few bits and scales; a share where ZeRO-3 shards them too.

    nf4          0.5 + 4/64 bytes an element (4.5 bits)
    nf4_double   0.5 + 1/64 + 4/(64 · 256)    (4.127 bits)
    int8         1 byte, and 4 bytes for each output of a matrix
    int4         0.5 + 2.5/128                (4.156 bits)
    """
    if not has_frozen(model):
        return np.zeros(len(table))
    plain = table_parameters(frozen_part(model, quantised=False), rank, table)
    element, row = STORED_BYTES[workload.quantisation]
    stored: Real = np.zeros(len(table))
    for count, kind in zip(rank.kind_counts, model.kinds, strict=True):
        for weight in kind.weights:
            if not weight.quantised:
                continue
            numel = shard_numel(weight, table.tensor_parallel)
            outputs = float(weight.shape[-1] if weight.transposed else weight.shape[0])
            rows = outputs / (table.tensor_parallel if weight.cut == "column" else 1)
            stored = stored + count * (element * numel + row * rows)
    whole = workload.compute_bytes * plain.total + stored
    shared = software.sharding.frozen_weights & (table.zero_stage >= 3)
    return whole / np.where(shared, np.multiply(1.0, table.shard_ranks), 1.0)


def unpacked_bytes(
    model: ModelSpec, rank: PipelineRank, table: PlanTable, compute_bytes: float
) -> tuple[Real, Real]:
    """Bytes while a layer uses its largest matrix in 4 bits: c of an element, and what helps.

    That is, of the elements that are unpacked at once, half an int32 index each, and the value in
    fp32 where the compute precision is less.
    """
    largest = np.zeros(len(table))
    for count, kind in zip(rank.kind_counts, model.kinds, strict=True):
        for weight in kind.weights:
            if count and weight.quantised:
                largest = np.maximum(largest, shard_numel(weight, table.tensor_parallel))
    beside = 2.0 + (4.0 if compute_bytes < 4.0 else 0.0)
    return compute_bytes * largest, beside * np.minimum(largest, UNPACKED_AT_ONCE)


def table_parameters(model: ModelSpec, rank: PipelineRank, table: PlanTable) -> RankParameters:
    """Count what a pipeline rank holds under each plan."""
    return rank_parameters(
        model,
        rank,
        table.tensor_parallel,
        table.pipeline_parallel,
        expert_tensor=table.expert_tensor,
        expert_parallel=table.expert_parallel,
        experts_apart=table.experts_apart,
    )


def pair_numel(kind: LayerKind, tensor_parallel: Count) -> Real:
    """Elements of a layer's two largest matrices on one tensor-parallel rank."""
    matrices = [w for w in kind.weights if w.role == "linear"]
    largest = sorted(matrices, key=lambda w: -w.numel)[:2]
    return block_numel(tuple(largest), tensor_parallel)


def last_share(weights: tuple[Weight, ...]) -> float:
    """Return the share of the last trained weight in the elements of a block."""
    trained = [prod(weight.shape) for weight in weights if not weight.frozen]
    return trained[-1] / sum(trained) if trained else 0.0
