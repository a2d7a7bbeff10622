"""Measures this machine with N processes at work at the same time.

Everything is timed in all processes at once and with as many threads as training uses, so that
shared caches, memory channels and cores are in the numbers. The rates are those of one process.
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from hardware_profiles.measurement import (
    MachineMeasurement,
    available_cores,
    cgroup_memory_limit,
    machine_memory_bytes,
    this_host,
)

# Each rate is measured in several windows; the best one counts, so that other programs disturb
# less. A window is longer than the operating system's time slices, and its rate the mean of all
# processes, so that a process that has a core to itself for a moment does not win.
WINDOW: Final = 0.15  # seconds
WINDOWS: Final = 4
MATRIX: Final = 512  # rows and columns of the CPU's matmuls: larger ones are hardly faster
GPU_MATRIX: Final = 8192
COPY_BYTES: Final = 2**25  # larger than a core's share of the cache
CHAIN: Final = 100  # small operators in one forward and backward pass
COLLECTIVE_BYTES: Final = (2**10, 2**16, 2**20, 2**23)
MESSAGE_BYTES: Final = (2**10, 2**18, 2**22)
COLLECTIVE_SECONDS: Final = 0.1
LONGEST: Final = 120.0  # seconds until the measurement is given up


def threads_per_process(processes: int) -> int:
    """Return the threads that each of so many processes on this machine uses."""
    return max(1, available_cores() // processes)


def measure_machine(processes: int) -> MachineMeasurement:
    """Measure this machine with ``processes`` CPU processes (about 10 seconds)."""
    import torch

    from executor.forked import run_forked

    memory = free_memory_bytes()
    threads = threads_per_process(processes)
    ranks = run_forked(_measure_rank, processes, processes, timeout=LONGEST, threads=threads)

    def best(key: str) -> float:
        """Return the calls or units of work per second and process in the best window."""
        return float(np.mean([rank[key] for rank in ranks], axis=0).max())

    links: dict[str, Any] = {}
    if processes > 1:
        steps = 2 * (processes - 1)
        links["collective_bandwidth"], links["collective_latency"] = fit_link(
            [steps / processes * size for size in COLLECTIVE_BYTES],
            ranks[0]["all_reduce_seconds"],
            steps,
        )
        links["p2p_bandwidth"], links["p2p_latency"] = fit_link(
            MESSAGE_BYTES, ranks[0]["message_seconds"], 1
        )
    return MachineMeasurement(
        host=this_host(),
        cpu_model=cpu_model(Path("/proc/cpuinfo")),
        num_cores=available_cores(),
        total_memory_bytes=machine_memory_bytes(),
        available_memory_bytes=memory,
        processes=processes,
        torch_version=torch.__version__,
        date=datetime.date.today().isoformat(),
        gemm_flops={precision: best(precision) for precision in ("fp64", "fp32", "bf16")},
        memory_bandwidth=best("memory_bandwidth"),
        operator_seconds=1.0 / best("operators_per_second"),
        **links,
    )


def measure_gpu() -> dict[str, Any]:
    """Measure the matmul rate and the memory bandwidth of the first GPU."""
    import torch

    rates = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return {
        "schema_version": 1,
        "device": torch.cuda.get_device_name(0),
        "torch_version": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "gemm_flops": {
            name: max(_matmul_rates(dtype, GPU_MATRIX, "cuda")) for name, dtype in rates.items()
        },
        "memory_bandwidth": max(_copy_rates(32 * COPY_BYTES, "cuda")),
        "operator_seconds": 1.0 / max(_operator_rates("cuda")),
    }


def fit_link(
    moved: Sequence[float], seconds: Sequence[float], messages: int
) -> tuple[float, float]:
    """Return (bandwidth, latency) of ``seconds = moved / bandwidth + messages * latency``.

    Least squares of the relative errors, so that small messages weigh as much as large ones; both
    are kept from being negative.

    >>> bandwidth, latency = fit_link([1e3, 1e6], [1e3 / 1e9 + 2e-5, 1e6 / 1e9 + 2e-5], 2)
    >>> round(bandwidth), round(latency, 9)
    (1000000000, 1e-05)
    """
    from scipy.optimize import nnls

    weight = 1.0 / np.array(seconds)
    columns = np.stack([np.array(moved) * weight, messages * weight], axis=1)
    (seconds_per_byte, latency), _ = nnls(columns, np.ones(len(weight)))
    if seconds_per_byte == 0.0:  # noise: every size took the same time
        seconds_per_byte = min(np.array(seconds) / np.array(moved))
    return 1.0 / float(seconds_per_byte), float(latency)


def cpu_model(path: Path) -> str:
    """Return the processor's name from /proc/cpuinfo, or what Python knows elsewhere."""
    try:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine() or "unknown"


def free_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the memory that can still be had without swapping, the container's limit counted."""
    free = machine_memory_bytes()
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = min(free, 1024 * int(line.split()[1]))
    except OSError:  # not Linux
        return free
    limit, used = (cgroup_memory_limit(cgroup / f"memory.{name}") for name in ("max", "current"))
    return free if limit is None else min(free, max(0, limit - (used or 0)))


def _measure_rank(rank: int, processes: int) -> dict[str, Any]:
    """Measure in one process; every rank runs the same sequence at the same time."""
    import torch

    measured: dict[str, Any] = {}
    dtypes = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
    for name, dtype in dtypes.items():
        measured[name] = _matmul_rates(dtype, MATRIX, "cpu")
    measured["memory_bandwidth"] = _copy_rates(COPY_BYTES, "cpu")
    measured["operators_per_second"] = _operator_rates("cpu")
    if processes > 1:
        measured["all_reduce_seconds"] = [_all_reduce_seconds(size) for size in COLLECTIVE_BYTES]
        measured["message_seconds"] = [_message_seconds(rank, size) for size in MESSAGE_BYTES]
    return measured


def _calls_per_second(call: Callable[[], object], device: str) -> list[float]:
    """Return how often all processes together can repeat a call per second, window by window."""
    import torch
    import torch.distributed as dist

    call()
    rates = []
    for _ in range(WINDOWS):
        if dist.is_initialized():
            dist.barrier()
        begin, count, elapsed = time.perf_counter(), 0, 0.0
        while elapsed < WINDOW:
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            count += 1
            elapsed = time.perf_counter() - begin
        rates.append(count / elapsed)
    return rates


def _matmul_rates(dtype: Any, size: int, device: str) -> list[float]:
    import torch

    left, right = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    rates = _calls_per_second(lambda: torch.mm(left, right, out=out), device)
    return [2.0 * size**3 * rate for rate in rates]


def _copy_rates(size: int, device: str) -> list[float]:
    import torch

    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return [2.0 * size * rate for rate in _calls_per_second(lambda: target.copy_(source), device)]


def _operator_rates(device: str) -> list[float]:
    """Return tiny operators per second, autograd's bookkeeping included."""
    import torch

    leaf = torch.ones(8, device=device, requires_grad=True)

    def chain() -> None:
        x = leaf
        for _ in range(CHAIN):
            x = x * 1.0001
        torch.autograd.grad(x, leaf, torch.ones_like(x))

    return [2.0 * CHAIN * rate for rate in _calls_per_second(chain, device)]


def _all_reduce_seconds(size: int) -> float:
    """Return the seconds of one all-reduce of so many bytes on the slowest rank."""
    import torch
    import torch.distributed as dist

    data = torch.zeros(size // 4)
    return _together(lambda: dist.all_reduce(data))


def _message_seconds(rank: int, size: int) -> float:
    """Return the seconds of one message of so many bytes while neighbours (0-1, 2-3, ...) talk."""
    import torch
    import torch.distributed as dist

    data, peer = torch.zeros(size // 4), rank ^ 1

    def ping_pong() -> None:
        if peer >= dist.get_world_size():
            return
        first, second = (dist.send, dist.recv) if rank < peer else (dist.recv, dist.send)
        first(data, peer)
        second(data, peer)

    return _together(ping_pong) / 2


def _together(call: Callable[[], object]) -> float:
    """Return the seconds of a call that all ranks repeat together: slowest rank, best window."""
    import torch
    import torch.distributed as dist

    def timed(count: int) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        slowest = torch.tensor((time.perf_counter() - begin) / count)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    timed(1)
    count = int(COLLECTIVE_SECONDS / max(timed(3), 1e-6))
    return min(timed(max(3, min(count, 300))) for _ in range(WINDOWS))
