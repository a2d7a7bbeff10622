"""Verdict FITS, TIGHT or DOES NOT FIT: the interval of the predicted peak against the budget."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.scenario import Scenario
from cost_models.uncertainty import Spread, verdict_spread
from cost_models.units import GIB
from hardware_profiles.cluster.schema import Accelerator, Cluster, Kind

Verdict = Literal["fits", "tight", "does_not_fit"]
VERDICTS: Final[tuple[Verdict, ...]] = ("fits", "tight", "does_not_fit")
WORDS: Final = {"fits": "FITS", "tight": "TIGHT", "does_not_fit": "DOES NOT FIT"}
# Share of a CPU machine's memory for the processes; the operating system and caches use the rest.
CPU_SHARE: Final = 0.9
# Memory that CUDA reserves of the capacity that the driver reports, for accelerators without a
# published ``Accelerator.usable_memory``: the largest published value, in bytes and as a share
# (79.25 of 80 GiB on an A100; 14.56 of 15 GiB on a T4).
MOST_KEPT: Final = 0.75 * GIB
LARGEST_SHARE_KEPT: Final = 0.03
NEAR: Final = 1.5  # budgets: no stages are chosen for plans with larger peaks


class Budget(Struct, frozen=True):
    """Memory that a plan may use on one accelerator, with its source."""

    size: float  # bytes
    capacity: float  # bytes that the driver reports
    kind: Kind
    source: str

    @property
    def reason(self) -> str:
        """Kind and source of the size."""
        return f"{self.kind}: {self.source}"


def memory_budget(accelerator: Accelerator) -> Budget:
    """Return the memory that a plan may use: as published, else the capacity less CUDA's share.

    >>> from hardware_profiles.cluster.catalogue import find_accelerator
    >>> memory_budget(find_accelerator("A100-SXM-80GB")).size / GIB
    79.25
    """
    capacity, usable = accelerator.memory_capacity, accelerator.usable_memory
    if accelerator.device == "cpu":
        why = f"{100 * CPU_SHARE:g} % of a process's share; the rest is the system's (a convention)"
        return Budget(CPU_SHARE * capacity.value, capacity.value, "assumed", why)
    if usable is not None and usable.value <= capacity.value:
        return Budget(usable.value, capacity.value, usable.kind, usable.source)
    kept = min(MOST_KEPT, LARGEST_SHARE_KEPT * capacity.value)
    why = "the capacity less the most that CUDA keeps on cards where that is known"
    return Budget(capacity.value - kept, capacity.value, "assumed", why)


def budget_bytes(cluster: Cluster) -> float:
    """Return the bytes that a plan may use on one accelerator."""
    return memory_budget(cluster.accelerator).size


def near_budget(cluster: Cluster) -> float:
    """Return the peak in bytes up to which stages are chosen; larger peaks need not be exact."""
    return NEAR * budget_bytes(cluster)


def plan_verdict_spread(scenario: Scenario) -> Spread:
    """Return how far the verdict on a plan looks, all settings of which are known."""
    return verdict_spread(scenario.software.name, experts=scenario.model.has_experts)


def verdict_codes(
    low: NDArray[np.float64], high: NDArray[np.float64], budget: float
) -> NDArray[np.int8]:
    """Return positions in VERDICTS, for the ends of intervals in bytes (``peak_interval``).

    Fits: the whole interval is below the budget; tight: the interval contains the budget.
    """
    return np.where(high <= budget, 0, np.where(low > budget, 2, 1)).astype(np.int8)


def most_bytes(budget: float, spread: Spread, code: int) -> float:
    """Return the largest peak in bytes with which any plan fits (code 0) or is tight (code 1).

    A tight plan may have a larger peak, by at most ``most_over_typical``.
    """
    return budget / (1.0 + spread.above) if code == 0 else budget / (1.0 - spread.below)


def verdict(low: float, high: float, budget: float) -> Verdict:
    """Return the verdict on one plan."""
    return VERDICTS[int(verdict_codes(np.array(low), np.array(high), budget))]
