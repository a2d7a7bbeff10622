"""Parameters on one pipeline rank: trained and frozen, by block, and the largest layer."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from cost_models.arrays import Count, Flag, Real
from cost_models.model.lora import (
    DEQUANTISED_AT_ONCE,
    STORED_BYTES,
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
    expert_total: Real  # routed experts, if they are sharded over other ranks than the rest
    expert_layer: Real  # the same, of one layer
    largest_layer: Real
    largest_pair: Real  # the two largest matrices of a layer
    embedding: Real
    head: Real
    layers: tuple[Real, ...]  # one layer of each of the model's kinds
    expert_layers: tuple[Real, ...]  # and their experts, if sharded over other ranks


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
    """Count the elements on a pipeline rank; a tied projection is a copy on another rank only.

    The tensors between an encoder and a decoder count as embedding or head if they are on the same
    rank; otherwise as embedding, with a copy of the tied tensor.
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
    pairs = [two_largest_numel(kind, tensor_parallel) for kind in model.kinds]
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
    expert_layer = np.where(experts_apart, most, 0.0)
    total = layers + embedding + head
    parts = total, apart, expert_layer, largest, pair, embedding, head
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
    """Bytes of frozen weights: c P, or quantised with scales; ZeRO-3 may shard them.

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
            rows = outputs / (table.tensor_parallel if weight.sharding == "column" else 1)
            stored = stored + count * (element * numel + row * rows)
    whole = workload.compute_bytes * plain.total + stored
    shared = software.sharding.frozen_weights & (table.zero_stage >= 3)
    return whole / np.where(shared, np.multiply(1.0, table.shard_ranks), 1.0)


def dequantised_bytes(
    model: ModelSpec, rank: PipelineRank, table: PlanTable, compute_bytes: float
) -> tuple[Real, Real]:
    """Bytes of a layer's largest quantised matrix in compute precision, and of the temporaries.

    Temporaries, for each element dequantised at once: half an int32 index, and the fp32 value if
    the compute precision is less than fp32.
    """
    largest = np.zeros(len(table))
    for count, kind in zip(rank.kind_counts, model.kinds, strict=True):
        for weight in kind.weights:
            if count and weight.quantised:
                largest = np.maximum(largest, shard_numel(weight, table.tensor_parallel))
    beside = 2.0 + (4.0 if compute_bytes < 4.0 else 0.0)
    return compute_bytes * largest, beside * np.minimum(largest, DEQUANTISED_AT_ONCE)


def table_parameters(model: ModelSpec, rank: PipelineRank, table: PlanTable) -> RankParameters:
    """Count the elements on a pipeline rank under each plan of a table."""
    return rank_parameters(
        model,
        rank,
        table.tensor_parallel,
        table.pipeline_parallel,
        expert_tensor=table.expert_tensor,
        expert_parallel=table.expert_parallel,
        experts_apart=table.experts_apart,
    )


def two_largest_numel(kind: LayerKind, tensor_parallel: Count) -> Real:
    """Elements of a layer's two largest matrices on one tensor-parallel rank."""
    matrices = [w for w in kind.weights if w.role == "linear"]
    largest = sorted(matrices, key=lambda w: -w.numel)[:2]
    return block_numel(tuple(largest), tensor_parallel)


def last_trained_share(weights: tuple[Weight, ...]) -> float:
    """Return the last trained weight's share of a block's trained elements."""
    trained = [prod(weight.shape) for weight in weights if not weight.frozen]
    return trained[-1] / sum(trained) if trained else 0.0
