"""Measurement of this machine with N concurrent processes.

All processes run at the same time, each with as many threads as in training, so that contention for
caches, memory channels and cores is included. Rates are per process.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from executor.machine.probes import (
    COLLECTIVE_BYTES,
    COPY_BYTES,
    GPU_MATRIX,
    MESSAGE_BYTES,
    copy_rates,
    matmul_rates,
    measure_rank,
    operator_rates,
    score_seconds,
)
from hardware_profiles.cluster.measurement import (
    MachineMeasurement,
    available_cores,
    cgroup_memory_limit,
    cpu_model,
    load_average,
    machine_memory_bytes,
    probe_seconds,
    this_host,
)

LONGEST: Final = 120.0  # seconds, timeout of the measurement


def threads_per_process(processes: int) -> int:
    """Return the number of threads of each of ``processes`` processes on this machine."""
    return max(1, available_cores() // processes)


def measure_machine(processes: int) -> MachineMeasurement:
    """Measure this machine with ``processes`` CPU processes (about 10 seconds)."""
    import torch

    from executor.processes.fork import run_forked

    memory, load, probe = free_memory_bytes(), load_average(), probe_seconds()
    threads = threads_per_process(processes)
    ranks = run_forked(measure_rank, processes, processes, timeout=LONGEST, threads=threads)

    def best(key: str) -> float:
        """Return the rate of the best window, as a mean over the processes."""
        return float(np.mean([rank[key] for rank in ranks], axis=0).max())

    links: dict[str, Any] = {}
    if processes > 1:
        # an all-gather has half the steps of an all-reduce
        steps = [kind * (processes - 1) for kind in (2, 1) for _ in COLLECTIVE_BYTES]
        sizes = [*COLLECTIVE_BYTES, *COLLECTIVE_BYTES]
        links["collective_bandwidth"], links["collective_latency"] = fit_link(
            [n / processes * size for n, size in zip(steps, sizes, strict=True)],
            ranks[0]["all_reduce_seconds"] + ranks[0]["all_gather_seconds"],
            steps,
        )
        links["p2p_bandwidth"], links["p2p_latency"] = fit_link(
            MESSAGE_BYTES, ranks[0]["message_seconds"], [1] * len(MESSAGE_BYTES)
        )
    return MachineMeasurement(
        host=this_host(),
        cpu_model=cpu_model(),
        num_cores=available_cores(),
        total_memory_bytes=machine_memory_bytes(),
        available_memory_bytes=memory,
        processes=processes,
        torch_version=torch.__version__,
        date=datetime.date.today().isoformat(),
        gemm_flops={precision: best(precision) for precision in ("fp64", "fp32", "bf16")},
        memory_bandwidth=best("memory_bandwidth"),
        operator_seconds=1.0 / best("operators_per_second"),
        score_seconds=score_seconds(1.0 / best("attentions_per_second"), best("fp32")),
        load=load,
        probe_seconds=probe,
        **links,
    )


def measure_gpu() -> dict[str, Any]:
    """Measure the matmul rate and memory bandwidth of the first GPU."""
    import torch

    rates = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return {
        "schema_version": 1,
        "device": torch.cuda.get_device_name(0),
        "torch_version": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "gemm_flops": {
            name: max(matmul_rates(dtype, GPU_MATRIX, "cuda")) for name, dtype in rates.items()
        },
        "memory_bandwidth": max(copy_rates(32 * COPY_BYTES, "cuda")),
        "operator_seconds": 1.0 / max(operator_rates("cuda")),
    }


def fit_link(
    moved: Sequence[float], seconds: Sequence[float], messages: Sequence[int]
) -> tuple[float, float]:
    """Return (bandwidth, latency) of ``seconds = moved / bandwidth + messages * latency``.

    Non-negative least squares of the relative errors, so that small and large messages have equal
    weight.

    >>> bandwidth, latency = fit_link([1e3, 1e6], [1e3 / 1e9 + 2e-5, 1e6 / 1e9 + 2e-5], [2, 2])
    >>> round(bandwidth), round(latency, 9)
    (1000000000, 1e-05)
    """
    from scipy.optimize import nnls

    weight = 1.0 / np.array(seconds)
    columns = np.stack([np.array(moved) * weight, np.array(messages) * weight], axis=1)
    (seconds_per_byte, latency), _ = nnls(columns, np.ones(len(weight)))
    if seconds_per_byte == 0.0:  # noise: all sizes took equally long
        seconds_per_byte = min(np.array(seconds) / np.array(moved))
    return 1.0 / float(seconds_per_byte), float(latency)


def free_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the memory available without swapping, within the container's limit."""
    free = machine_memory_bytes()
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = min(free, 1024 * int(line.split()[1]))
    except OSError:  # not Linux
        return free
    limit, used = (cgroup_memory_limit(cgroup / f"memory.{name}") for name in ("max", "current"))
    return free if limit is None else min(free, max(0, limit - (used or 0)))
