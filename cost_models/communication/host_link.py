"""Seconds of offload: transfers over the host's link, the update on its cores, paged states.

Units: seconds and bytes; every function broadcasts over plan columns. On a CPU host memory is the
device's memory, so offload changes neither memory nor time. Host memory used: ``memory.host``.

Leaves out: other programs that use the host's link, memory or cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from cost_models.arrays import Real, holds
from cost_models.plan.plan import PlanTable
from hardware_profiles.cluster.schema import Accelerator, Cluster
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import SoftwareProfile

# Convention, not a measurement: eight channels of DDR4-3200 of 25.6 GB/s (JESD79-4), shared by all
# ranks of a node
HOST_MEMORY_BANDWIDTH: Final = 204.8e9
# The same of a machine with one card: two channels of DDR5-5600 (JESD79-5)
DESKTOP_MEMORY_BANDWIDTH: Final = 89.6e9
# The same of both sockets of servers whose accelerators have links of their own, as in NVIDIA's:
# DGX-1 (Xeon E5-2698 v4, four channels of DDR4-2400 each), DGX A100 (EPYC 7742, eight of
# DDR4-3200), DGX H100 (Xeon 8480C, eight of DDR5-4800), DGX B200 (Xeon 8570, eight of DDR5-5600),
# or AMD's with the processors of their years: EPYC 9004 (twelve of DDR5-4800) with CDNA 3, EPYC
# 9005 (twelve of DDR5-6000) with CDNA 4
SERVER_MEMORY_BANDWIDTH: Final[Mapping[str, float]] = {
    "Volta": 153.6e9,
    "Ampere": 409.6e9,
    "Hopper": 614.4e9,
    "Blackwell": 716.8e9,
    "Blackwell Ultra": 716.8e9,
    "CDNA3": 921.6e9,
    "CDNA4": 1152e9,
}
# What updates reach of it: STREAM's triad, 250 of 307 GB/s (EPYC 7601), 199 of 256 (Xeon 8176) and
# 128 of 154 (Xeon E5-2699 v4; AnandTech, Sizing up servers, 2017)
STREAM_SHARE: Final = 0.8
# Of each Grace: LPDDR5X of up to 512 GB/s, and 450 GB/s one way of NVLink-C2C to its one or two
# accelerators (NVIDIA, data sheets of the Grace Hopper and Grace Blackwell superchips)
GRACE_MEMORY_BANDWIDTH: Final = 512e9
GRACE_LINK_BANDWIDTH: Final = 450e9
PCIE_6_BANDWIDTH: Final = 128e9  # 16 lanes one way: what is faster is no PCIe
# bytes/s that one core reads, as torch's norm of a tensor does (aten/src/ATen/native/cpu/Reduce.h,
# binary_kernel_reduce_lastdim: threads share norms, not their elements); measured, 16 to 18 GB/s in
# fp32 and 11 to 13 in bf16 (python -m benchmarks.step_time.host_updates)
CORE_BANDWIDTH: Final = 14e9
# bytes/s of a copy between the device and pageable memory, which a core moves from or to a pinned
# buffer: 10.0 and 10.8 of 25.7 GB/s on a DGX A100, 3.3 and 8.5 of 24.6 on a server with A100-PCIe
# (CUDA samples, bandwidthTest)
PAGEABLE_BANDWIDTH: Final = 10e9
# Convention, not a measurement: all drives of a node, in each direction (eight of 3.2 GB/s)
NVME_BANDWIDTH: Final = 25.6e9


def without_offload(table: PlanTable) -> PlanTable:
    """Return the same plans without offload: the equivalent on a CPU."""
    zeros = np.zeros_like(table.offload)
    return replace(table, offload=zeros, offload_device=zeros)


def host_link(cluster: Cluster, table: PlanTable, software: SoftwareProfile) -> float:
    """Return bytes/s one way between accelerator and host; an error if needed and unknown.

    Accelerators behind one PCIe switch share its link to the host (``Node.host_links``).
    """
    accelerator = cluster.accelerator
    figure = accelerator.host_bandwidth
    if figure is not None:
        share = min(1.0, cluster.host_links / cluster.gpus_per_node) if cluster.host_links else 1.0
        return float(figure.value) * software.communication.bus_efficiency * share
    if holds(table.offload > 0):
        raise InputError(
            f"{accelerator.name}: offload needs host_bandwidth, which is not known (set it "
            "in the cluster's file)"
        )
    return float("inf")


def states_link(link: float, software: SoftwareProfile) -> float:
    """Return bytes/s one way of offloaded weights, gradients and states.

    >>> from hardware_profiles.software.trainer import software_profile
    >>> names = "hf-trainer+deepspeed-zero3", "hf-trainer+deepspeed-zero3+pageable-host-memory"
    >>> [states_link(25e9, software_profile(name)) for name in names]
    [25000000000.0, 10000000000.0]
    """
    return link if software.communication.pinned_host_memory else min(link, PAGEABLE_BANDWIDTH)


def host_memory_bandwidth(cluster: Cluster) -> float:
    """Return bytes/s that updates move in the memory of a node's host.

    >>> from hardware_profiles.cluster.parse import parse_cluster
    >>> clusters = map(parse_cluster, ("8xH100-SXM", "8xL4", "1xL4"))
    >>> [host_memory_bandwidth(cluster) / 1e9 for cluster in clusters]
    [491.52, 164.0, 71.68]
    >>> graces = map(parse_cluster, ("1xGH200", "1x4xGH200", "1x4xGB200"))
    >>> [host_memory_bandwidth(cluster) / 1e9 for cluster in graces]
    [409.6, 1638.4, 819.2]
    """
    chip, stated = cluster.accelerator, cluster.accelerator.host_memory_bandwidth
    link = chip.host_bandwidth.value if chip.host_bandwidth is not None else 0.0
    if chip.link.startswith("NVLink") and link > PCIE_6_BANDWIDTH:
        usual = GRACE_MEMORY_BANDWIDTH * cluster.gpus_per_node * link / GRACE_LINK_BANDWIDTH
    elif stated is not None and cluster.gpus_per_node > 1:
        usual = stated.value
    elif chip.link.startswith(("NVLink", "xGMI")):
        usual = SERVER_MEMORY_BANDWIDTH.get(chip.architecture, HOST_MEMORY_BANDWIDTH)
    else:
        usual = DESKTOP_MEMORY_BANDWIDTH if cluster.gpus_per_node == 1 else HOST_MEMORY_BANDWIDTH
    return STREAM_SHARE * usual


def activation_offload_seconds(
    saved: Real, forward: Real, backward: Real, link: float, *, prefetched: bool = False
) -> tuple[Real, Real]:
    """Seconds that offloading a micro-batch's activations adds to its forward and backward pass.

        forward   max(0, bytes / link - forward)    overlapped with the next layers' computation
        backward  bytes / link                      each layer waits for its own activations
                  max(0, bytes / link - backward)   ``prefetched``: overlapped as well

    Source: derived; the executor's copies (executor/ops/offload_activations.py) are not prefetched,
    those of trainers whose profile says so are.

    >>> [float(x) for x in activation_offload_seconds(8e9, 0.25, 1.0, 16e9)]
    [0.25, 0.5]
    >>> [float(x) for x in activation_offload_seconds(8e9, 0.25, 0.25, 16e9, prefetched=True)]
    [0.25, 0.25]
    """
    transfer = np.multiply(1.0, saved) / link
    hidden = backward if prefetched else 0.0
    return np.maximum(0.0, transfer - forward), np.maximum(0.0, transfer - hidden)


def host_update_seconds(
    parameters: Real,
    master_bytes: float,
    link: float,
    ranks_of_host: int,
    accesses: float,
    memory: float,
    on_one_core: float = 0.0,
    cast_bytes: float = 0.0,
) -> Real:
    """Seconds of the optimizer on the host: gradients down, norm, the update, new weights up.

        2 w P / link + ranks of a host x (bytes that the update moves) P / host memory bandwidth
        + (bytes that one core reads) P / 14 GB/s

    Weights that were cast on the host go up from pageable memory, ``cast_bytes`` of each instead of
    w. ``parameters``: elements that a rank updates; ``accesses``, ``on_one_core``: bytes for each
    (``step_time.optimizer_update``); ``memory``: bytes/s of the host's. No phases overlap. Source:
    ZeRO-Offload (arXiv:2101.06840), sec. 4.1, without its overlap, and with fp32 in both directions
    unless cast. Leaves out: ranks with one thread (torchrun's default) or on one processor's cores.

    >>> float(host_update_seconds(4e9, 2.0, 344e9, 1, 76.0, 409.6e9, 2.0))
    1.3601...
    """
    moved = accesses * ranks_of_host / memory + on_one_core / CORE_BANDWIDTH
    up = cast_bytes / min(link, PAGEABLE_BANDWIDTH) if cast_bytes else master_bytes / link
    return parameters * (master_bytes / link + up + moved)


def host_accumulation_seconds(
    parameters: Real, gradient_bytes: float, link: float, microbatches: Real
) -> Real:
    """Seconds in which sums of gradients come from the host and go back, once more and later.

        2 g P (m - 1) / link

    ``parameters``: elements that a rank updates; m micro-batches of a step. One stream copies, adds
    and copies back. Source: DeepSpeed's ZeRO-2 and 3 (stage_1_and_2.py, stage3.py). Leaves out:
    what a backward pass hides where this stream is not its own, and ZeRO-3's way back of the first.

    >>> float(host_accumulation_seconds(4e9, 2.0, 10e9, 8))
    11.2
    """
    return 2.0 * gradient_bytes * np.multiply(1.0, parameters) * (microbatches - 1.0) / link


def nvme_seconds(stored: Real) -> Real:
    """Seconds in which a node's drives read and write the optimizer states that they store.

    2 bytes / bandwidth; the update reads and writes all of them, one after the other.
    """
    return 2.0 * np.multiply(1.0, stored) / NVME_BANDWIDTH


def weight_fetch_seconds(
    shard: Real, forward: Real, backward: Real, link: float
) -> tuple[Real, Real]:
    """Seconds that fetching a rank's shard of the weights adds to a forward and a backward pass.

        max(0, bytes / link - pass)    the next layer's weights arrive while one layer computes

    Source: ZeRO-Infinity (arXiv:2104.07857), sec. 6.2: prefetching.
    """
    transfer = np.multiply(1.0, shard) / link
    return np.maximum(0.0, transfer - forward), np.maximum(0.0, transfer - backward)


def usable_bytes(accelerator: Accelerator) -> float:
    """Return the memory of an accelerator that a process can allocate; its capacity if unknown."""
    capacity, usable = accelerator.memory_capacity, accelerator.usable_memory
    return capacity.value if usable is None else min(usable.value, capacity.value)


def paged_seconds(paged: Real, peak: Real, usable: float, link: float) -> Real:
    """Seconds a step of paging optimizer states that exceed the free device memory.

        2 min(paged, max(0, paged + peak - usable)) / link

    ``peak``: bytes of everything else. A block is fetched when its update runs and replaces another
    one, without overlapping computation. Source: bitsandbytes, optim/optimizer.py: ``step`` fetches
    the states of one tensor, updates it, and waits for the device before the next.

    >>> [float(x) for x in paged_seconds(np.array([4e9, 12e9]), 16e9, 24e9, 16e9)]
    [0.0, 0.5]
    """
    moved = np.clip(np.add(paged, peak) - usable, 0.0, paged)
    return 2.0 * moved / link
