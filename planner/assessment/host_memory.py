"""Whether a node's host memory and drives hold what a plan puts there."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.communication.host_link import HOST_MEMORY_BANDWIDTH, NVME_BANDWIDTH
from cost_models.memory.host import HostBytes
from cost_models.plan.plan import Plan
from cost_models.pricing.estimate import PredictionTable
from cost_models.scenario import Scenario
from cost_models.units import format_bytes
from hardware_profiles.cluster.schema import Cluster, Figure
from planner.assessment.verdict import CPU_SHARE

HOST_SHARE: Final = CPU_SHARE  # the rest is the system's, here as on a CPU machine
TOO_LARGE: Final = 2  # position in VERDICTS


def host_codes(cluster: Cluster, host: HostBytes) -> NDArray[np.int8]:
    """Return positions in VERDICTS: fits, or does not; what is unknown is not checked."""
    short = np.zeros(np.shape(host.memory), dtype=bool)
    for needed, room in ((host.memory, cluster.host_memory), (host.nvme, cluster.nvme)):
        if room is not None:
            share = HOST_SHARE if room is cluster.host_memory else 1.0
            short = short | np.greater(needed, share * room.value)
    return np.where(short, TOO_LARGE, 0).astype(np.int8)


def host_document(scenario: Scenario, priced: PredictionTable) -> dict[str, Any]:
    """Return what a node's host and drives hold of one plan, and have; None: unknown."""
    cluster, host = scenario.cluster, priced.host
    memory, nvme = float(np.ravel(host.memory)[0]), float(np.ravel(host.nvme)[0])
    room = None if cluster.host_memory is None else HOST_SHARE * cluster.host_memory.value
    drives = None if cluster.nvme is None else cluster.nvme.value
    short = [
        name
        for name, needed, there in (("memory", memory, room), ("nvme", nvme, drives))
        if there is not None and needed > there
    ]
    return {
        "memory_bytes": memory,
        "memory_budget_bytes": room,
        "nvme_bytes": nvme,
        "nvme_budget_bytes": drives,
        "short_of": short[0] if short else None,
    }


def host_text(host: dict[str, Any]) -> str | None:
    """Return one line about a node's host; None where nothing is there."""
    parts = []
    for name, words in (("memory", "host memory"), ("nvme", "NVMe drives")):
        needed, room = host[f"{name}_bytes"], host[f"{name}_budget_bytes"]
        if needed > 0.0:
            of = "of an unknown size" if room is None else f"of {format_bytes(room)}"
            parts.append(f"{format_bytes(needed)} {of} {words} of a node")
    if not parts:
        return None
    short = host["short_of"]
    what = {"memory": "the host is too small", "nvme": "the drives are too small"}
    return "; ".join(parts) + (f": {what[short]}" if short else "")


def host_assumptions(scenario: Scenario, plan: Plan, host: dict[str, Any]) -> list[str]:
    """Say what the check of a node's host stands on."""
    cluster, said = scenario.cluster, []
    for name, what, figure in (
        ("memory", "host memory", cluster.host_memory),
        ("nvme", "NVMe drives", cluster.nvme),
    ):
        if host[f"{name}_bytes"] <= 0.0:
            continue
        usable = f", {100 * HOST_SHARE:.0f} % of it usable" if name == "memory" and figure else ""
        said.append(f"{what} of a node: {_known(figure)}{usable}")
    if plan.offloads_activations or plan.offloads_optimizer:
        said.append("seconds of offload were never measured")
    return said


def _known(figure: Figure | None) -> str:
    if figure is None:
        return "not known, so not checked (set [host] in the cluster's file)"
    return f"{format_bytes(figure.value)} ({figure.kind}: {figure.source})"


def about_offload(scenario: Scenario, plan: Plan, host: dict[str, Any]) -> list[str]:
    """Say what offload stands on."""
    said = host_assumptions(scenario, plan, host)
    if plan.offload == "none":
        return said
    if not scenario.on_gpu:
        return [f"offload {plan.offload} saves nothing: processes own the host's memory"]
    if plan.offloads_optimizer:
        rate, drives = HOST_MEMORY_BANDWIDTH / 1e9, NVME_BANDWIDTH / 1e9
        said.append(f"a host's cores update at {rate:.1f} GB/s, shared by its ranks (a convention)")
        if plan.offload_device == "nvme":
            said.append(f"drives of a node move {drives:.1f} GB/s each way (a convention)")
    return said
