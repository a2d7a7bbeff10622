"""Recomputation: drop what the forward pass saved, and compute it again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *arguments: Any, random: bool) -> Tensor:
    """Call ``function``, keep only its arguments, call it again when the backward pass needs it.

    Non-reentrant, so that the second call stops as soon as the last tensor that the backward pass
    needs is there. ``random``: the random state is restored too (dropout).
    """
    result: Tensor = checkpoint(
        function, *arguments, use_reentrant=False, preserve_rng_state=random
    )
    return result
