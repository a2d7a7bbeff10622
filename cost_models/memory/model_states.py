"""Bytes of weights, gradients and optimizer state on one accelerator.

Symbols   P num_params [parameters on this rank: its pipeline stages, its tensor-parallel share]
          d shard_ranks, over which ZeRO shards   z zero_stage {0..3}   m num_microbatches
          c compute_bytes, w master_bytes [bytes of an element]
          g gradient_bytes [of an element]
Units     every function returns bytes; every argument is one number or one column of a plan table.

States of the optimizer: ``optimizer_states``.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from cost_models.arrays import Count, Flag, Real


class ModelStates(Struct, frozen=True):
    """Named terms of the model states of one accelerator, in bytes."""

    weights: Real
    gradients: Real
    optimizer: Real

    @property
    def total(self) -> Real:
        """All three."""
        return self.weights + self.gradients + self.optimizer


def adam_mixed_precision(num_params: Real, data_parallel: Count, zero_stage: Count) -> ModelStates:
    """Mixed-precision Adam under ZeRO as in the paper: 16 bytes a parameter, shared out by stage.

        weights    2 P / (d if z >= 3)
        gradients  2 P / (d if z >= 2)
        optimizer 12 P / (d if z >= 1)      fp32 master weights, momentum, variance

    Source: Rajbhandari et al., ZeRO (arXiv:1910.02054), sec. 3.1 and fig. 1, K = 12.
    Leaves out: gathered layers under z = 3, communication buffers; see ``sharded_states``.

    >>> float(adam_mixed_precision(7.5e9, 64, 3).total) / 1e9
    1.875
    """
    shards = np.multiply(1.0, data_parallel)
    return ModelStates(
        weights=2.0 * num_params / np.where(np.greater_equal(zero_stage, 3), shards, 1.0),
        gradients=2.0 * num_params / np.where(np.greater_equal(zero_stage, 2), shards, 1.0),
        optimizer=12.0 * num_params / np.where(np.greater_equal(zero_stage, 1), shards, 1.0),
    )


def weight_bytes(
    num_params: Real,
    shard_ranks: Count,
    zero_stage: Count,
    compute_bytes: float,
    master_bytes: float,
) -> Real:
    """Weights in the precision of the matmuls, whole below ZeRO-3; under ZeRO-3 the fp32 shards.

        c P   (z <= 2)      w P / d   (z = 3)

    Source: ZeRO sec. 5 (P_os+g+p); FSDP keeps the shards in master precision and casts when it
    gathers
    (Zhao et al., arXiv:2304.11277, sec. 4.4).
    """
    whole = compute_bytes * np.multiply(1.0, num_params)
    shard = master_bytes * np.multiply(1.0, num_params) / shard_ranks
    return np.where(np.greater_equal(zero_stage, 3), shard, whole)


def master_copy_bytes(
    num_params: Real,
    shard_ranks: Count,
    zero_stage: Count,
    compute_bytes: float,
    master_bytes: float,
) -> Real:
    """Master weights stored separately from the weights: w [apart] P / (d if z >= 1).

    Separate in mixed precision: a shard next to whole weights. Under ZeRO-3 the shards are the
    weights themselves (``weight_bytes``).
    """
    replicas = float(compute_bytes != master_bytes)
    sharded = np.where(np.less(zero_stage, 3), 1.0, 0.0)
    apart = np.where(np.equal(zero_stage, 0), replicas, sharded)
    return master_bytes * apart * num_params / optimizer_shards(shard_ranks, zero_stage)


def optimizer_shards(shard_ranks: Count | Real, zero_stage: Count) -> Real:
    """Ranks that share the optimizer's work: d from ZeRO-1 on, else 1."""
    return np.where(np.greater_equal(zero_stage, 1), np.multiply(1.0, shard_ranks), 1.0)


def accumulated_gradient_bytes(
    num_params: Real,
    shard_ranks: Count,
    zero_stage: Count,
    gradient_bytes: float,
    *,
    accumulates: Flag,
    defers_reduction: Flag,
) -> Real:
    """Gradients that earlier micro-batches have left when the last one starts its backward pass.

        0                        one micro-batch
        g P                      z <= 1, or where the trainer reduces at the last micro-batch only
        g P / d                  z >= 2

    torch's pipeline stages reduce at the last micro-batch whatever the ZeRO stage
    (``defers_reduction``; torch 2.13, distributed/pipelining/stage.py, REDUCE_GRAD).
    """
    sharded = np.logical_and(np.greater_equal(zero_stage, 2), np.logical_not(defers_reduction))
    shards = np.where(sharded, np.multiply(1.0, shard_ranks), 1.0)
    return np.where(accumulates, gradient_bytes * np.multiply(1.0, num_params) / shards, 0.0)


def reduced_gradient_bytes(
    num_params: Real, shard_ranks: Count, zero_stage: Count, gradient_bytes: float
) -> Real:
    """Gradients that the optimizer reads: g P, or its shard from ZeRO-1 on."""
    shards = optimizer_shards(shard_ranks, zero_stage)
    return gradient_bytes * np.multiply(1.0, num_params) / shards
