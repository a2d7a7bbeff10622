"""Seconds that host memory costs: transfers over the host's link, and the update on its cores.

Units: seconds and bytes; every function broadcasts over plan columns. On a CPU host memory is the
device's: offload changes nothing there, neither memory nor time.

What it takes of the host's memory: ``host_memory``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from cost_models.arrays import Real
from cost_models.plan.plan import PlanTable
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import SoftwareProfile

# Convention, not a measurement: eight channels of DDR4-3200 of 25.6 GB/s (JESD79-4), shared by all
# ranks of a node
HOST_MEMORY_BANDWIDTH: Final = 204.8e9
# Convention, not a measurement: drives of a node together, each way (eight of 3.2 GB/s)
NVME_BANDWIDTH: Final = 25.6e9


def without_offload(table: PlanTable) -> PlanTable:
    """Return the same plans with nothing in host memory: what offload comes to on a CPU."""
    zeros = np.zeros_like(table.offload)
    return replace(table, offload=zeros, offload_device=zeros)


def host_link(cluster: Cluster, table: PlanTable, software: SoftwareProfile) -> float:
    """Return bytes/s one way between accelerator and host; unknown is an error where it counts.

    Accelerators behind one PCIe switch share its link to the host (``Node.host_links``).
    """
    accelerator = cluster.accelerator
    figure = accelerator.host_bandwidth
    if figure is not None:
        share = min(1.0, cluster.host_links / cluster.gpus_per_node) if cluster.host_links else 1.0
        return float(figure.value) * software.communication.bus_efficiency * share
    if np.any(table.offload > 0):
        raise InputError(
            f"{accelerator.name}: offload needs host_bandwidth, which is not known (it can be set "
            "in the cluster's file)"
        )
    return float("inf")


def activation_seconds(
    saved: Real, forward: Real, backward: Real, link: float, *, prefetched: bool = False
) -> tuple[Real, Real]:
    """Seconds that a micro-batch's saved activations add to its forward and its backward pass.

        forward   max(0, bytes / link - forward)    they leave while the next layers compute
        backward  bytes / link                      each layer waits for its own
                  max(0, bytes / link - backward)   ``prefetched``: they come while one computes

    >>> [float(x) for x in activation_seconds(8e9, 0.25, 1.0, 16e9)]
    [0.25, 0.5]
    >>> [float(x) for x in activation_seconds(8e9, 0.25, 0.25, 16e9, prefetched=True)]
    [0.25, 0.25]
    """
    transfer = np.multiply(1.0, saved) / link
    hidden = backward if prefetched else 0.0
    return np.maximum(0.0, transfer - forward), np.maximum(0.0, transfer - hidden)


def update_seconds(
    parameters: Real,
    master_bytes: float,
    link: float,
    ranks_of_host: int,
    accesses: float,
) -> Real:
    """Seconds of the optimizer on the host: gradients down, the update, new weights up.

        2 w P / link + ranks of a host x (bytes that the update moves) P / host memory bandwidth

    ``parameters``: that a rank updates; ``accesses``: bytes that the update moves for each. The
    three follow one another. Source: ZeRO-Offload (arXiv:2101.06840), sec. 4.1, without its overlap
    and with fp32 both ways.
    """
    moved = accesses * ranks_of_host / HOST_MEMORY_BANDWIDTH
    return parameters * (2.0 * master_bytes / link + moved)


def drive_seconds(stored: Real) -> Real:
    """Seconds in which a node's drives give and take back what they store of the optimizer.

    2 bytes / bandwidth; the update reads and writes all of it, one after the other.
    """
    return 2.0 * np.multiply(1.0, stored) / NVME_BANDWIDTH


def weight_seconds(shard: Real, forward: Real, backward: Real, link: float) -> tuple[Real, Real]:
    """Seconds that fetching a rank's shard of the weights adds to a forward and a backward pass.

        max(0, bytes / link - pass)    the next layer's come while one computes

    Source: ZeRO-Infinity (arXiv:2104.07857), sec. 6.2: prefetching.
    """
    transfer = np.multiply(1.0, shard) / link
    return np.maximum(0.0, transfer - forward), np.maximum(0.0, transfer - backward)
