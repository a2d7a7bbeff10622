"""FITS, TIGHT or DOES NOT FIT: the interval of the predicted peak against the budget."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from cost_models.uncertainty import MEMORY
from hardware_profiles.schema import Cluster

Verdict = Literal["fits", "tight", "does_not_fit"]
VERDICTS: Final[tuple[Verdict, ...]] = ("fits", "tight", "does_not_fit")
WORDS: Final = {"fits": "FITS", "tight": "TIGHT", "does_not_fit": "DOES NOT FIT"}
# What a process may use of a CPU machine's memory: the rest is the system's and the file cache's.
CPU_SHARE: Final = 0.9


def budget_bytes(cluster: Cluster) -> float:
    """Bytes that a plan may use on one accelerator: all that the driver reports; 90 % on a CPU."""
    share = CPU_SHARE if cluster.accelerator.device == "cpu" else 1.0
    return share * cluster.accelerator.memory_capacity.value


def verdict_codes(peak: NDArray[np.float64], budget: float) -> NDArray[np.int8]:
    """Return positions in VERDICTS: upper end within, interval astride, lower end above."""
    fits = peak * (1.0 + MEMORY.value) <= budget
    over = peak * (1.0 - MEMORY.value) > budget
    return np.where(fits, 0, np.where(over, 2, 1)).astype(np.int8)


def verdict(peak: float, budget: float) -> Verdict:
    """Return the verdict on one plan."""
    return VERDICTS[int(verdict_codes(np.array([peak]), budget)[0])]
