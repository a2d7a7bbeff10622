"""Parameter counts: total, active, by part, and on one tensor-parallel rank.

Symbols   N elements of a tensor   t tensor_parallel   E num_experts   K experts_per_token Units
parameters (elements); ``tensor_parallel`` is one number or one column of a plan table.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.model.spec import LayerKind, ModelSpec, Part, Weight

PARTS: Final[tuple[Part, ...]] = (
    "embedding",
    "attention",
    "mlp",
    "experts",
    "shared_experts",
    "router",
    "norm",
    "head",
    "other",
)


def active_kind_parameters(kind: LayerKind) -> float:
    """Parameters of one layer that take part in the forward pass of one token.

        N (not routed) + N (routed experts) K / E

    Source: "active parameters" of Jiang et al., Mixtral of Experts (arXiv:2401.04088), sec. 2.
    Leaves out: nothing; every token uses the shared experts and the router.
    """
    experts = sum(w.numel for w in kind.weights if w.is_routed_expert)
    others = sum(w.numel for w in kind.weights) - experts
    if not experts:
        return float(others)
    feed_forward = kind.feed_forward
    return others + experts * (feed_forward.experts_per_token / feed_forward.num_experts)


def active_parameters(model: ModelSpec) -> float:
    """Parameters that take part in the forward pass of one token, embedding and head included.

        embedding + head + sum over layers of active_kind_parameters

    Source: as :func:`active_kind_parameters`; equal to all parameters without experts. Leaves out:
    that a look-up reads one row only (the embedding is counted in full, as published).
    """
    outside = sum(w.numel for w in model.outer)
    per_kind = [active_kind_parameters(kind) for kind in model.kinds]
    return float(outside + sum(per_kind[index] for index in model.pattern))


def parameters_by_part(model: ModelSpec) -> dict[str, int]:
    """Parameters of each part of the model; they add up to ``model.num_parameters``."""
    counts = dict.fromkeys(PARTS, 0)
    for weight in model.outer:
        counts[weight.part] += weight.numel
    for index, kind in enumerate(model.kinds):
        layers = model.pattern.count(index)
        for weight in kind.weights:
            counts[weight.part] += layers * weight.numel
    return {part: count for part, count in counts.items() if count}


def shard_numel(
    weight: Weight,
    tensor_parallel: Count,
    expert_tensor: Count | None = None,
    expert_parallel: Count = 1,
) -> Real:
    """Elements of a tensor on one tensor-parallel rank.

        N / t  if sharded (column, row, vocab)             N  if replicated
        routed experts: N / (te ep) or N / ep              te expert_tensor (default t)

    Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), sec. 3. Leaves out: padding if t does
    not divide the length (such plans are not legal).

    >>> float(shard_numel(Weight("q_proj.weight", (4096, 4096), "linear", "column"), 8))
    2097152.0
    """
    ranks = np.multiply(1.0, tensor_parallel)
    if weight.is_routed_expert and expert_tensor is not None:
        ranks = np.multiply(1.0, expert_tensor)
    divisor = ranks if weight.sharding != "replicate" else np.ones_like(ranks)
    return float(weight.numel) / (divisor * (expert_parallel if weight.is_routed_expert else 1))


def kind_numel(
    kind: LayerKind,
    tensor_parallel: Count,
    expert_tensor: Count | None = None,
    expert_parallel: Count = 1,
) -> Real:
    """Elements of one layer on one tensor-parallel rank: the sum of its shards."""
    others = tuple(w for w in kind.weights if not w.is_routed_expert)
    experts = routed_numel(
        kind, tensor_parallel if expert_tensor is None else expert_tensor, expert_parallel
    )
    return block_numel(others, tensor_parallel) + experts


def routed_numel(kind: LayerKind, expert_tensor: Count, expert_parallel: Count) -> Real:
    """Elements of a layer's routed experts on one rank."""
    experts = tuple(w for w in kind.weights if w.is_routed_expert)
    return block_numel(experts, expert_tensor) / expert_parallel


def block_numel(weights: tuple[Weight, ...], tensor_parallel: Count) -> Real:
    """Elements of some tensors on one tensor-parallel rank: the sum of their shards."""
    ranks = np.multiply(1.0, tensor_parallel)
    replicated = float(sum(w.numel for w in weights if w.sharding == "replicate"))
    sharded = float(sum(w.numel for w in weights if w.sharding != "replicate"))
    return replicated + sharded / ranks
