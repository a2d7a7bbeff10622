"""Describe this machine as a cluster: GPUs as nvidia-smi lists them, or CPU processes.

GPUs are matched with the catalogue by name; their memory is what the driver reports. Links inside
the machine are those of the usual node of that GPU, which a note says.

Without a GPU, each process is one accelerator of device "cpu" with an equal share of the memory.
Its rates come from the measurement in the user's cache (``measurement.py``), taken with that many
processes at work; without one ``NeedsMeasurement`` is raised, and the caller starts to measure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from typing import Final

from hardware_profiles.cluster.build import build_cluster
from hardware_profiles.cluster.calibration import calibrated, load_calibration
from hardware_profiles.cluster.catalogue import match_accelerator
from hardware_profiles.cluster.measurement import (
    MachineMeasurement,
    available_cores,
    load_cached,
    machine_memory_bytes,
)
from hardware_profiles.cluster.schema import Accelerator, Cluster, Figure, Tier
from hardware_profiles.errors import InputError, NeedsMeasurement

NVIDIA_SMI: Final = "nvidia-smi"
TIMEOUT_SECONDS: Final = 20.0
_QUERY: Final = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_MIB: Final = 2.0**20
_OWN_FILE: Final = (
    "describe the machine in a TOML file (see hardware_profiles/cluster/cluster_file.py)"
)


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """One GPU as nvidia-smi lists it."""

    name: str
    memory_bytes: float | None  # None where the driver does not say
    driver: str


def describe_here(processes: int | None) -> Cluster:
    """Return this machine with ``processes`` of its GPUs or CPU processes.

    Default: every visible GPU; without any, one process for each core that may be used.
    """
    cluster = uncalibrated_here(processes)
    calibration = load_calibration(cluster.accelerator.name, cluster.num_gpus)
    return cluster if calibration is None else calibrated(cluster, calibration)


def uncalibrated_here(processes: int | None) -> Cluster:
    """Return this machine as the driver and the measurement describe it, without calibration."""
    gpus = visible_gpus()
    if gpus:
        return _gpu_cluster(gpus, processes)
    wanted = processes or available_cores()
    measurement = load_cached(wanted)
    if measurement is None:
        raise NeedsMeasurement(wanted)
    return cpu_cluster(measurement)


def visible_gpus() -> list[FoundGpu]:
    """Return the GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves; none without it."""
    command = shutil.which(NVIDIA_SMI)
    if command is None:
        return []
    try:
        answer = subprocess.run(
            (command, *_QUERY), capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"here: {NVIDIA_SMI} does not answer ({error}); {_OWN_FILE}") from None
    if answer.returncode != 0:  # installed, but no device or no driver
        return []
    return _chosen([_gpu(line) for line in answer.stdout.splitlines() if line.strip()])


def _gpu(line: str) -> FoundGpu:
    """Read a line such as ``NVIDIA H200, 143771, 550.90.07``."""
    name, memory, driver = ([part.strip() for part in line.split(",")] + ["", ""])[:3]
    digits = memory.removesuffix("MiB").strip()
    return FoundGpu(name, float(digits) * _MIB if digits.isdigit() else None, driver)


def _chosen(gpus: list[FoundGpu]) -> list[FoundGpu]:
    """Keep what CUDA_VISIBLE_DEVICES names by number; names of other kinds only count."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    names = [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    if all(name.isdigit() for name in names):
        return [gpus[int(name)] for name in names if int(name) < len(gpus)]
    return gpus[: len(names)]


def _gpu_cluster(gpus: list[FoundGpu], wanted: int | None) -> Cluster:
    count = wanted or len(gpus)
    if count > len(gpus):
        raise InputError(
            f"here:{count}: this machine has {len(gpus)} visible GPU{'s' if len(gpus) > 1 else ''}"
        )
    names = sorted({gpu.name for gpu in gpus[:count]})
    if len(names) > 1:
        raise InputError(
            f"here: different GPUs ({', '.join(names)}) are not one cluster; {_OWN_FILE}"
        )
    try:
        found = match_accelerator(names[0]).entry
    except InputError:
        raise InputError(f"here: the GPU {names[0]} is not in the catalogue; {_OWN_FILE}") from None
    accelerator = _with_memory(found, gpus[:count])
    note = f"links of this machine as in the usual node of {accelerator.name}, not measured"
    return build_cluster(
        accelerator,
        num_nodes=1,
        gpus_per_node=count,
        name="here" if wanted is None else f"here:{wanted}",
        notes=(note,) if count > 1 else (),
    )


def _with_memory(accelerator: Accelerator, gpus: list[FoundGpu]) -> Accelerator:
    """Return the accelerator with the least memory that the driver reports for the GPUs."""
    known = [gpu.memory_bytes for gpu in gpus if gpu.memory_bytes]
    if not known:
        return accelerator
    source = f"{NVIDIA_SMI} on this machine, driver {gpus[0].driver or 'unknown'}"
    capacity = Figure(float(min(known)), "measured", source)
    usable = accelerator.usable_memory
    if usable is not None and usable.value > capacity.value:  # another card of that name
        usable = None
    return replace(accelerator, memory_capacity=capacity, usable_memory=usable)


def cpu_cluster(measurement: MachineMeasurement) -> Cluster:
    """Return the CPU processes of this machine as a cluster of one node."""
    source = f"measured on this machine, {measurement.date}, torch {measurement.torch_version}"

    def measured(value: float) -> Figure:
        return Figure(float(value), "measured", source)

    processes = measurement.processes
    memory = min(measurement.total_memory_bytes, machine_memory_bytes()) / processes
    rates: dict[str, Figure] = {p: measured(rate) for p, rate in measurement.gemm_flops.items()}
    tier = _gloo_tier(measurement, source)
    accelerator = Accelerator(
        name=measurement.cpu_model,
        device="cpu",
        architecture="cpu",
        memory_capacity=measured(memory),
        memory_bandwidth=measured(measurement.memory_bandwidth),
        peak_flops=rates,
        achievable_flops=rates,
        link=tier.name,
        link_bandwidth=tier.bandwidth,
        kernel_launch=measured(measurement.operator_seconds),
        score_seconds=measured(measurement.score_seconds),
        core_share=measured(min(1.0, measurement.num_cores / processes)),
    )
    return Cluster(
        name=f"here:{processes}",
        accelerator=accelerator,
        num_nodes=1,
        gpus_per_node=processes,
        tiers=(tier,),
        notes=(f"memory of this machine shared by {processes} processes",) if processes > 1 else (),
    )


def _gloo_tier(measurement: MachineMeasurement, source: str) -> Tier:
    """Return the tier of gloo; one process alone sends nothing, so that its link is its memory."""
    if measurement.collective_bandwidth is None or measurement.collective_latency is None:
        alone = "one process sends nothing: its memory bandwidth stands in"
        link = Figure(measurement.memory_bandwidth, "assumed", alone)
        return Tier("gloo", measurement.processes, link, Figure(0.0, "assumed", alone))
    peer, peer_latency = measurement.p2p_bandwidth, measurement.p2p_latency
    return Tier(
        name="gloo",
        domain_size=measurement.processes,
        bandwidth=Figure(measurement.collective_bandwidth, "measured", source),
        latency=Figure(measurement.collective_latency, "measured", source),
        peer_bandwidth=None if peer is None else Figure(peer, "measured", source),
        peer_latency=None if peer_latency is None else Figure(peer_latency, "measured", source),
    )
