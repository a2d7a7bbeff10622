"""Check of the offloaded bytes of a plan against the host memory and NVMe drives of a node."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from cost_models.communication.host_link import NVME_BANDWIDTH, host_memory_bandwidth
from cost_models.memory.host import HostBytes
from cost_models.plan.plan import Plan
from cost_models.pricing.estimate import PredictionTable
from cost_models.scenario import Scenario
from cost_models.units import format_bytes
from hardware_profiles.cluster.schema import Cluster, Figure
from hardware_profiles.record import Record
from planner.assessment.verdict import CPU_SHARE

HOST_SHARE: Final = CPU_SHARE  # usable; the operating system keeps the rest, as on CPU machines
WORDS: Final = {"memory": "host memory", "nvme": "NVMe drives"}
SURE: Final = {"memory": 2.0**30, "nvme": 0.0}  # bytes that every node has
TOO_LARGE: Final = 2  # position in VERDICTS


def host_codes(cluster: Cluster, host: HostBytes) -> NDArray[np.int8]:
    """Return positions in VERDICTS: fits or does_not_fit; unknown capacities are not checked."""
    short = np.zeros(np.shape(host.memory), dtype=bool)
    for needed, room in ((host.memory, cluster.host_memory), (host.nvme, cluster.nvme)):
        if room is not None:
            share = HOST_SHARE if room is cluster.host_memory else 1.0
            short = short | np.greater(needed, share * room.value)
    return np.where(short, TOO_LARGE, 0).astype(np.int8)


class HostMemory(Record, frozen=True):
    """Host memory and NVMe space that a plan needs and that a node has, in bytes."""

    memory_bytes: float
    memory_budget_bytes: float | None  # None: unknown, not checked
    nvme_bytes: float
    nvme_budget_bytes: float | None
    short_of: Literal["memory", "nvme"] | None

    @property
    def amounts(self) -> tuple[tuple[str, float, float | None], ...]:
        """Name, needed bytes and available bytes of host memory and of drives."""
        return (
            ("memory", self.memory_bytes, self.memory_budget_bytes),
            ("nvme", self.nvme_bytes, self.nvme_budget_bytes),
        )

    @property
    def unchecked(self) -> str:
        """What a node must have although nobody knows whether it has; empty: nothing.

        >>> HostMemory(2.0**37, None, 0.0, None, None).unchecked
        '128 GiB host memory'
        >>> HostMemory(2.0**25, None, 0.0, None, None).unchecked  # paged states of an adapter
        ''
        """
        unknown = ((name, needed) for name, needed, room in self.amounts if room is None)
        return " and ".join(
            f"{format_bytes(n)} {WORDS[name]}" for name, n in unknown if n > SURE[name]
        )


def host_memory(scenario: Scenario, priced: PredictionTable) -> HostMemory:
    """Return the host memory and NVMe space of a table's first plan, with the budgets of a node."""
    cluster, host = scenario.cluster, priced.host
    memory, nvme = float(np.ravel(host.memory)[0]), float(np.ravel(host.nvme)[0])
    room = None if cluster.host_memory is None else HOST_SHARE * cluster.host_memory.value
    drives = None if cluster.nvme is None else cluster.nvme.value
    short: Literal["memory", "nvme"] | None = None
    if room is not None and memory > room:
        short = "memory"
    elif drives is not None and nvme > drives:
        short = "nvme"
    return HostMemory(memory, room, nvme, drives, short)


def host_text(host: HostMemory) -> str | None:
    """Return one line about the host of a node; None if the plan offloads nothing."""
    parts = []
    for name, needed, room in host.amounts:
        if needed > 0.0:
            words = f"{format_bytes(needed)} {WORDS[name]} of a node, whose size is not known"
            if room is not None:
                words = f"{format_bytes(needed)} of {format_bytes(room)} {WORDS[name]} of a node"
            if room is not None and needed > room:
                words += f", short by {format_bytes(needed - room)}"
            parts.append(words)
    return "; ".join(parts) or None


def host_assumptions(scenario: Scenario, plan: Plan, host: HostMemory) -> list[str]:
    """Return the assumptions behind the check of a node's host."""
    cluster, notes = scenario.cluster, []
    for what, needed, figure, usable in (
        ("host memory", host.memory_bytes, cluster.host_memory, HOST_SHARE),
        ("NVMe drives", host.nvme_bytes, cluster.nvme, 1.0),
    ):
        if needed > 0.0:
            share = f", {100 * usable:.0f} % of it usable" if usable < 1.0 and figure else ""
            notes.append(f"{what} of a node: {_known(figure)}{share}")
    if plan.offloads_activations or plan.offloads_optimizer:
        notes.append("offload times are not validated by measurements")
    return notes


def _known(figure: Figure | None) -> str:
    if figure is None:
        return "not known, so not checked (set [host] in the cluster's file)"
    return f"{format_bytes(figure.value)} ({figure.kind}: {figure.source})"


def about_offload(scenario: Scenario, plan: Plan, host: HostMemory) -> list[str]:
    """Return the assumptions behind the price of offload."""
    notes = host_assumptions(scenario, plan, host)
    if plan.offload == "none":
        return notes
    if not scenario.on_gpu:
        return [f"offload {plan.offload} saves nothing: processes own the host's memory"]
    if plan.offloads_optimizer:
        rate = host_memory_bandwidth(scenario.cluster) / 1e9
        drives = NVME_BANDWIDTH / 1e9
        notes.append(
            f"a host's cores update at {rate:.1f} GB/s, shared by its ranks (a convention)"
        )
        if plan.offload_device == "nvme":
            notes.append(f"drives of a node move {drives:.1f} GB/s each way (a convention)")
    return notes
