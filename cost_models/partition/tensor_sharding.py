"""The dimension along which tensor parallelism shards a tensor, and the size of a rank's shard.

Symbols   t tensor_parallel   d ranks that ZeRO shards over   n rows (first dimension) Units
elements; ``tensor_parallel`` and ``shard_ranks`` are numbers or columns of a table.

Shards are those of the first rank: ceil(length / ranks); the last rank may have less.

Leaves out: ranks with a smaller shard, where a length does not divide evenly.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Count, Flag, Real
from cost_models.model.spec import Weight


def shard_dim(weight: Weight) -> int | None:
    """Return the dimension that tensor parallelism shards, or None.

    Matrices are stored (out, in), transposed ones (in, out); experts have one more leading
    dimension. Biases are sharded along their outputs, tables along the vocabulary or their columns,
    norms over all heads along the heads.

    >>> shard_dim(Weight("mlp.down_proj.weight", (64, 256), "linear", "row"))
    1
    """
    if weight.sharding == "replicate":
        return None
    last = len(weight.shape) - 1
    if weight.is_matrix:
        along_input = weight.sharding == "row"
        return last - 1 + int(along_input != weight.transposed)
    return 0 if weight.sharding in ("vocab", "heads") else last


def cut_ranks(weight: Weight, tensor_parallel: Count) -> Real:
    """Tensor-parallel ranks among which a tensor is cut: t, or 1 where each rank has it whole."""
    return np.multiply(1.0, 1 if shard_dim(weight) is None else tensor_parallel)


def sequence_shards(tensor_parallel: Count, sequence_parallel: Flag) -> Real:
    """Ranks that norms and dropouts are sharded over: t with sequence parallelism, else 1."""
    return np.where(sequence_parallel, np.multiply(1.0, tensor_parallel), 1.0)


def ceil_share(length: Real | Count, ranks: Count) -> Real:
    """Largest shard of a length: ceil(length / ranks).

    >>> float(ceil_share(50257, 8))
    6283.0
    """
    return np.ceil(np.multiply(1.0, length) / ranks)


def tensor_parallel_shape(
    weight: Weight, tensor_parallel: Count, expert_parallel: Count = 1
) -> tuple[Real, Real]:
    """Rows, and elements of a row, on one tensor-parallel rank.

    n / t or n     rows, depending on the sharded dimension; n / ep for experts

    Source: Shoeybi et al. (arXiv:1909.08053), sec. 3: the first matrix of a block is cut along its
    outputs, the second along its inputs; DTensor's Shard(dim).
    """
    cut = shard_dim(weight)
    rows, *others = weight.shape
    width: Real = np.ones_like(np.multiply(1.0, tensor_parallel))
    for dim, length in enumerate(others, start=1):
        width = width * (ceil_share(length, tensor_parallel) if dim == cut else float(length))
    if weight.is_routed_expert:
        rows = np.multiply(1.0, rows) / expert_parallel
    return ceil_share(rows, tensor_parallel) if cut == 0 else rows + 0.0 * width, width


def shards_within_experts(experts: Real, rows: Real, shard_ranks: Count | Real) -> Flag:
    """Whether data ranks shard the rows within experts, because there are fewer experts than ranks.

    Only if the rows divide evenly: FSDP2 pads the first dimension only.

    Source: torchtitan's expert parallelism, Shard(1) if there are fewer experts than shards.
    """
    fewer: Flag = np.greater(shard_ranks, experts) & (np.mod(rows, shard_ranks) == 0)
    return fewer


def data_shard(
    weight: Weight, tensor_parallel: Count, shard_ranks: Count, expert_parallel: Count = 1
) -> Real:
    """Elements of a tensor-parallel rank's shard on one data-parallel rank: ceil(n / d) rows.

    Source: torch.distributed.fsdp.fully_shard (torch 2.13), Shard(0) with padding at the end; for
    experts ``shards_within_experts``.
    """
    rows, width = tensor_parallel_shape(weight, tensor_parallel, expert_parallel)
    if weight.role == "expert":
        inside = np.multiply(1.0, weight.shape[1])
        if shard_dim(weight) == 1:
            inside = inside / tensor_parallel
        inner = np.where(shards_within_experts(rows, inside, shard_ranks), inside, 1.0)
        rows, width = rows * inner, width / inner
    return ceil_share(rows, shard_ranks) * width
