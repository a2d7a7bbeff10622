"""Low-rank adapters (LoRA: Hu et al., arXiv:2106.09685) in checkpoints and Hugging Face folders.

A checkpoint stores them next to the frozen matrices, as NAME.lora_A.weight (rank, in) and
NAME.lora_B.weight (out, rank). An export merges them into the matrix, W + alpha / rank x B A, so
that the result is an ordinary model.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from cost_models.model.adapter_methods import FIRST, SECOND
from cost_models.model.lora import adapter_names
from executor.checkpoint.format.pieces import whole_tensor
from executor.checkpoint.loading.checkpoint_reader import Checkpoint

_STORED_IN_OUT: Final = ("gpt2",)  # families whose matrices are stored (in, out)


def is_adapter(name: str) -> bool:
    """Return whether a parameter is a LoRA matrix."""
    return name.endswith((FIRST, SECOND))


def merged_matrix(checkpoint: Checkpoint, family: str, name: str) -> Tensor | None:
    """Return a whole matrix with its adapters merged; None if it has none."""
    tensors = checkpoint.index.tensors
    small, wide = adapter_names(name)
    if not name.endswith(".weight") or small not in tensors:
        return None
    workload = checkpoint.index.about["workload"]
    matrix, first, second = (
        checkpoint.weights(key, whole_tensor(tensors[key].shape)) for key in (name, small, wide)
    )
    product = second @ first
    if family in _STORED_IN_OUT:
        product = product.t()
    return matrix.add(product, alpha=workload["adapter_alpha"] / workload["adapter_rank"])
