"""Along which dimension tensor parallelism cuts a tensor, and how much of it a rank then holds.

Symbols   t tensor_parallel   d ranks that ZeRO shards over   n rows (first dimension)
Units     elements; ``tensor_parallel`` and ``shard_ranks`` are numbers or columns of a table.

Shares are those of the first rank: ceil(length / ranks), of which the last rank may have less.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Count, Flag, Real
from cost_models.model.spec import Weight


def cut_dim(weight: Weight) -> int | None:
    """Return the dimension that the tensor-parallel ranks share out, or None.

    Matrices are stored (out, in), transposed ones (in, out); experts carry one dimension more in
    front. Biases are cut along their outputs, tables along the vocabulary or their columns, norms
    over all heads along the heads.

    >>> cut_dim(Weight("mlp.down_proj.weight", (64, 256), "linear", "row"))
    1
    """
    if weight.cut == "replicate":
        return None
    last = len(weight.shape) - 1
    if weight.role in ("linear", "expert"):
        along_input = weight.cut == "row"
        return last - 1 + int(along_input != weight.transposed)
    return 0 if weight.cut in ("vocab", "heads") else last


def ceil_share(length: Real | Count, ranks: Count) -> Real:
    """Largest share of a length over ranks: ceil(length / ranks).

    >>> float(ceil_share(50257, 8))
    6283.0
    """
    return np.ceil(np.multiply(1.0, length) / ranks)


def tensor_shape(
    weight: Weight, tensor_parallel: Count, expert_parallel: Count = 1
) -> tuple[Real, Real]:
    """Rows, and elements of a row, that a tensor-parallel rank holds.

    n / t or n     rows, by the dimension of the cut; n / ep experts
    """
    cut = cut_dim(weight)
    rows, *others = weight.shape
    width: Real = np.ones_like(np.multiply(1.0, tensor_parallel))
    for dim, length in enumerate(others, start=1):
        width = width * (ceil_share(length, tensor_parallel) if dim == cut else float(length))
    if weight.is_routed_expert:
        rows = np.multiply(1.0, rows) / expert_parallel
    return ceil_share(rows, tensor_parallel) if cut == 0 else rows + 0.0 * width, width


def shards_inside(experts: Real, rows: Real, shard_ranks: Count | Real) -> Flag:
    """Whether ranks share out the rows inside experts, of which there are fewer than ranks.

    Only rows that divide evenly: FSDP2 pads the first dimension only.

    Source: torchtitan's expert parallelism, Shard(1) where there are fewer experts than shards.
    """
    fewer: Flag = np.greater(shard_ranks, experts) & (np.mod(rows, shard_ranks) == 0)
    return fewer


def data_shard(
    weight: Weight,
    tensor_parallel: Count,
    shard_ranks: Count,
    expert_parallel: Count = 1,
) -> Real:
    """Elements that one data-parallel rank keeps of its slice: ceil(n / d) whole rows.

    Source: torch.distributed.fsdp.fully_shard (torch 2.13), Shard(0) with padding at the end;
    for experts ``shards_inside``.
    """
    rows, width = tensor_shape(weight, tensor_parallel, expert_parallel)
    if weight.role == "expert":
        inside = np.multiply(1.0, weight.shape[1])
        if cut_dim(weight) == 1:
            inside = inside / tensor_parallel
        inner = np.where(shards_inside(rows, inside, shard_ranks), inside, 1.0)
        rows, width = rows * inner, width / inner
    return ceil_share(rows, shard_ranks) * width
