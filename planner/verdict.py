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
# What CUDA gives to processes of the total that the driver reports: the smallest share among the
# capacities in torch's out-of-memory messages, 23.64 of 23.99 GiB on an RTX 4090
# (github.com/3DTopia/Phidias-Diffusion/issues/8); 79.11 of 79.65 on an H100
# (vllm-project/vllm/issues/27508), 79.25 of 80 on an A100 (levihsu/OOTDiffusion/issues/235).
GPU_SHARE: Final = 0.985


def budget_bytes(cluster: Cluster) -> float:
    """Bytes that a plan may use on one accelerator, of those that the driver reports."""
    share = CPU_SHARE if cluster.accelerator.device == "cpu" else GPU_SHARE
    return share * cluster.accelerator.memory_capacity.value


def verdict_codes(peak: NDArray[np.float64], budget: float) -> NDArray[np.int8]:
    """Return positions in VERDICTS: upper end within, interval astride, lower end above."""
    fits = peak * (1.0 + MEMORY.above) <= budget
    over = peak * (1.0 - MEMORY.below) > budget
    return np.where(fits, 0, np.where(over, 2, 1)).astype(np.int8)


def verdict(peak: float, budget: float) -> Verdict:
    """Return the verdict on one plan."""
    return VERDICTS[int(verdict_codes(np.array([peak]), budget)[0])]
