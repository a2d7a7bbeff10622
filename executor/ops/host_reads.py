"""Numbers that the host reads while a step runs: there it waits for the device.

Fake tensors (``benchmarks.memory_truth``) hold no numbers: a rehearsal on them puts functions of
its own in place of these, among them one that spreads rows evenly over the experts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def numbers(values: Tensor) -> list[Any]:
    """Return the values of a tensor."""
    found: list[Any] = values.tolist()
    return found


def counts(values: Tensor, total: int) -> list[Any]:
    """Return how many of ``total`` rows go where (last dimension)."""
    found: list[Any] = values.tolist()
    return found
