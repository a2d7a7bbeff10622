"""Device values that the host reads during a step; each read synchronises with the device.

Fake tensors (``benchmarks.memory_truth``) have no values: a run on them replaces these functions,
among them by one that spreads rows evenly over the experts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def read_values(values: Tensor) -> list[Any]:
    """Return the values of a tensor."""
    found: list[Any] = values.tolist()
    return found


def read_counts(values: Tensor, total: int) -> list[Any]:
    """Return the row counts per destination (last dimension), which sum to ``total``."""
    found: list[Any] = values.tolist()
    return found
