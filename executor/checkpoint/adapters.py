"""Low-rank adapters (LoRA: Hu et al., arXiv:2106.09685) in checkpoints and Hugging Face folders.

A checkpoint holds them beside the frozen matrices, as NAME.lora_A.weight (rank, in) and
NAME.lora_B.weight (out, rank). An export adds them up with the matrix, W + alpha / rank x B A, so
that it is a model like any other.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from cost_models.model.lora import FIRST, SECOND, adapter_names
from executor.checkpoint.pieces import whole
from executor.checkpoint.reader import Checkpoint

_STORED_IN_OUT: Final = ("gpt2",)  # families whose matrices are stored (in, out)


def is_adapter(name: str) -> bool:
    """Return whether a parameter is one of the small matrices."""
    return name.endswith((FIRST, SECOND))


def merged(checkpoint: Checkpoint, family: str, name: str) -> Tensor | None:
    """Return a whole matrix with its adapters added; None if it has none."""
    tensors = checkpoint.index.tensors
    small, wide = adapter_names(name)
    if not name.endswith(".weight") or small not in tensors:
        return None
    workload = checkpoint.index.about["workload"]
    matrix, first, second = (
        checkpoint.weights(key, whole(tensors[key].shape)) for key in (name, small, wide)
    )
    product = second @ first
    if family in _STORED_IN_OUT:
        product = product.t()
    return matrix.add(product, alpha=workload["adapter_alpha"] / workload["adapter_rank"])
