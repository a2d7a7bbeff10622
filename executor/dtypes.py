"""Precisions as torch dtypes, and the local part of a tensor."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from cost_models.plan.workload import Precision, Workload

MASTER_DTYPE: Final[dict[Precision, torch.dtype]] = {
    "bf16": torch.float32,
    "fp16": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8": torch.float32,
}


COMPUTE_DTYPE: Final[dict[Precision, torch.dtype]] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8": torch.bfloat16,  # outside matmuls
}


def master_dtype(workload: Workload) -> torch.dtype:
    """Return the precision of the weights that the optimizer updates."""
    table = MASTER_DTYPE if workload.master_weights else COMPUTE_DTYPE
    return table[workload.precision]


class ParameterSlice(NamedTuple):
    """A data rank's part of its slice of a parameter: [start, stop) of one dimension."""

    dim: int
    start: int
    stop: int


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that data-parallel ranks may share."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
