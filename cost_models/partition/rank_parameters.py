"""Parameters on one pipeline rank: trained and frozen, by block, and the largest layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod

import numpy as np
from msgspec import Struct

from cost_models.arrays import Count, Real, holds
from cost_models.model.parameters import block_numel, kind_numel, routed_numel
from cost_models.model.spec import LayerKind, ModelSpec, Weight
from cost_models.partition.shared_tensors import tied_weights
from cost_models.partition.stages import PipelineRank
from cost_models.plan.plan import PlanTable


class RankParameters(Struct, frozen=True):
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


def rank_parameters(model: ModelSpec, rank: PipelineRank, table: PlanTable) -> RankParameters:
    """Count the elements on a pipeline rank under each plan of a table.

    The tensors between an encoder and a decoder count as embedding or head if they are on the same
    rank; otherwise as embedding, with a copy of the tied tensor. ``model``: the whole one, or its
    trained or frozen part.
    """
    tensor, zero = table.tensor_parallel, np.zeros(len(table))
    layers = _layer_numel(model, table)
    experts = [
        routed_numel(kind, table.expert_tensor, table.expert_parallel) for kind in model.kinds
    ]
    apart = tuple(np.where(table.experts_apart, each, 0.0) for each in experts)
    present = [size for n, size in zip(rank.kind_counts, layers, strict=True) if holds(n)]
    embedding, head = _embedding_numel(model, rank, tensor), _head_numel(model, rank, table)
    return RankParameters(
        total=_sum_of_layers(rank, layers) + embedding + head,
        expert_total=_sum_of_layers(rank, apart),
        expert_layer=reduce(np.maximum, apart, zero),
        largest_layer=reduce(np.maximum, present, zero),
        largest_pair=reduce(
            np.maximum, (two_largest_numel(kind, tensor) for kind in model.kinds), zero
        ),
        embedding=zero + embedding,
        head=zero + head,
        layers=layers,
        expert_layers=apart,
    )


def _layer_numel(model: ModelSpec, table: PlanTable) -> tuple[Real, ...]:
    """Elements of one layer of each kind."""
    return tuple(kind_numel(kind, *table.cuts) for kind in model.kinds)


def _sum_of_layers(rank: PipelineRank, layers: Sequence[Real]) -> Real:
    """Sum over the layers of a rank; ``layers``: of one layer of each kind."""
    counted = zip(rank.kind_counts, layers, strict=True)
    return sum((count * each for count, each in counted), start=np.asarray(0.0))


def _embedding_numel(model: ModelSpec, rank: PipelineRank, tensor: Count) -> Real:
    """Elements of the embedding, and of the tensors between encoder and decoder."""
    found = rank.first * block_numel(model.embedding if holds(rank.first) else (), tensor)
    if rank.bridge in ("first", "between"):
        found = found + block_numel(model.bridge, tensor)
    if rank.bridge == "between" and model.tie_embeddings:
        found = found + block_numel(tied_weights(model), tensor)
    return found


def _head_numel(model: ModelSpec, rank: PipelineRank, table: PlanTable) -> Real:
    """Elements of the head; a tied projection is a copy if the embedding is on another rank."""
    tensor = table.tensor_parallel
    found = rank.last * block_numel(model.head if holds(rank.last) else (), tensor)
    if holds(rank.last) and model.tie_embeddings and model.head_multiply:
        copy = rank.last * np.multiply(1.0, model.head_multiply) / tensor
        found = found + np.where(table.pipeline_parallel > 1, copy, 0.0)
    if rank.bridge == "last":
        found = found + block_numel(model.bridge, tensor)
    return found


def two_largest_numel(kind: LayerKind, tensor_parallel: Count) -> Real:
    """Elements of a layer's two largest matrices on one tensor-parallel rank."""
    matrices = [w for w in kind.weights if w.role == "linear"]
    largest = sorted(matrices, key=lambda w: -w.numel)[:2]
    return block_numel(tuple(largest), tensor_parallel)


def last_trained_share(weights: tuple[Weight, ...]) -> float:
    """Return the last trained weight's share of a block's trained elements."""
    trained = [prod(weight.shape) for weight in weights if not weight.frozen]
    return trained[-1] / sum(trained) if trained else 0.0
