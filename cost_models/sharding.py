"""Along which dimension tensor parallelism cuts a tensor, and how much of it a rank then holds.

Symbols   t tensor_parallel   d ranks that ZeRO shards over   n rows (first dimension)
Units     elements; ``tensor_parallel`` and ``shard_ranks`` are numbers or columns of a table.

Shares are those of the first rank: ceil(length / ranks), of which the last rank may have less.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.model import Weight


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


def ceil_share(length: Count, ranks: Count) -> Real:
    """Largest share of a length over ranks: ceil(length / ranks).

    >>> float(ceil_share(50257, 8))
    6283.0
    """
    return np.ceil(np.multiply(1.0, length) / ranks)


def tensor_shape(weight: Weight, tensor_parallel: Count) -> tuple[Real, Real]:
    """Rows, and elements of a row, that a tensor-parallel rank holds.

    n / t or n     rows, by the dimension of the cut
    """
    cut = cut_dim(weight)
    rows, *others = weight.shape
    width: Real = np.ones_like(np.multiply(1.0, tensor_parallel))
    for dim, length in enumerate(others, start=1):
        width = width * (ceil_share(length, tensor_parallel) if dim == cut else float(length))
    return ceil_share(rows, tensor_parallel) if cut == 0 else rows + 0.0 * width, width


def data_shard(weight: Weight, tensor_parallel: Count, shard_ranks: Count) -> Real:
    """Elements that one data-parallel rank keeps of its slice: ceil(n / d) whole rows.

    Where ranks outnumber experts, the rows inside the experts are shared out.

    Source: torch.distributed.fsdp.fully_shard (torch 2.13), Shard(0) with padding at the end;
    torchtitan's expert parallelism, Shard(1) where there are fewer experts than shards.
    """
    rows, width = tensor_shape(weight, tensor_parallel)
    if weight.role == "expert" and len(weight.shape) > 2:
        inner = np.where(np.greater(shard_ranks, weight.shape[0]), float(weight.shape[1]), 1.0)
        rows, width = rows * inner, width / inner
    return ceil_share(rows, shard_ranks) * width  # type: ignore[arg-type]
