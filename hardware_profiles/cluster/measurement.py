"""What the executor measured on this machine, and the file in the user's cache that keeps it.

``python -m executor measure --processes N --json`` prints one such document; ``here.py`` turns it
into a cluster. All rates are those of one process while every process works at the same time, so
shared caches, memory channels and clock limits are already in them.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from hardware_profiles.errors import InputError
from hardware_profiles.fields import Fields, read_json, write_text_atomically

SCHEMA_VERSION: Final = 2
GEMM_PRECISIONS: Final = ("fp64", "fp32", "bf16", "fp16")
MAX_PROCESSES: Final = 128  # on one machine without GPUs
_MEMORY_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),  # version 2
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # version 1; huge where there is none
)
_SMALLEST: Final = 1e-12  # a rate or a time below this was not measured but failed


@dataclass(frozen=True, slots=True)
class MachineMeasurement:
    """One measurement of one machine with ``processes`` CPU processes at work.

    A collective of ``n`` processes takes ``2 (n-1)/n bytes/bandwidth + 2 (n-1) latency`` seconds
    when it is an all-reduce (ring), half of it when it is an all-gather; the latency is that of
    processes that compute between their collectives. With one process there is nothing to measure:
    the four communication fields are None.
    """

    host: str
    cpu_model: str
    num_cores: int  # cores that this process may use, see ``available_cores``
    total_memory_bytes: int  # of the machine, or the limit of the container
    available_memory_bytes: int  # when the measurement began
    processes: int
    torch_version: str
    date: str  # ISO 8601, e.g. "2026-05-04"
    gemm_flops: Mapping[str, float]  # FLOP/s per process by precision (fp64 fp32 bf16 fp16)
    memory_bandwidth: float  # bytes/s per process, read and written bytes both counted
    operator_seconds: float  # host seconds of one small torch operator
    score_seconds: float  # one attention score, forward: exponential, scale, ... beside the matmuls
    collective_bandwidth: float | None = None  # bytes/s per process of a gloo ring
    collective_latency: float | None = None  # seconds per step of a gloo ring
    p2p_bandwidth: float | None = None  # bytes/s one way, process to process
    p2p_latency: float | None = None  # seconds per message
    schema_version: int = SCHEMA_VERSION

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_fields(cls, source: Fields) -> MachineMeasurement:
        """Read and check a measurement; unknown keys are refused."""
        source.refuse_unknown(field.name for field in fields(cls))
        source.integer("schema_version", low=SCHEMA_VERSION, high=SCHEMA_VERSION)
        processes = source.integer("processes", low=1, high=MAX_PROCESSES)
        rate = {"low": _SMALLEST, "high": 1e18}
        link: dict[str, Any] = {"default": None} if processes == 1 else {}
        return cls(
            host=source.text("host"),
            cpu_model=source.text("cpu_model"),
            num_cores=source.integer("num_cores", low=1, high=10**6),
            total_memory_bytes=source.integer("total_memory_bytes", low=1, high=10**18),
            available_memory_bytes=source.integer("available_memory_bytes", low=0, high=10**18),
            processes=processes,
            torch_version=source.text("torch_version"),
            date=source.text("date"),
            gemm_flops=_gemm_flops(source.sub("gemm_flops")),
            memory_bandwidth=source.number("memory_bandwidth", **rate),
            operator_seconds=source.number("operator_seconds", low=_SMALLEST, high=1e3),
            score_seconds=source.number("score_seconds", low=_SMALLEST, high=1e3),
            collective_bandwidth=source.number("collective_bandwidth", **link, **rate),
            collective_latency=source.number("collective_latency", **link, low=0.0, high=1e3),
            p2p_bandwidth=source.number("p2p_bandwidth", **link, **rate),
            p2p_latency=source.number("p2p_latency", **link, low=0.0, high=1e3),
        )


def _gemm_flops(source: Fields) -> dict[str, float]:
    source.refuse_unknown(GEMM_PRECISIONS)
    measured = {
        precision: source.number(precision, low=_SMALLEST, high=1e18)
        for precision in GEMM_PRECISIONS
        if precision in source
    }
    if "fp32" not in measured:
        raise InputError(f"{source.where}: fp32 is missing")
    return measured


def cache_folder() -> Path:
    """Return ``$SHARDPLAN_CACHE``, ``$XDG_CACHE_HOME/shardplan`` or ``~/.cache/shardplan``."""
    if named := os.environ.get("SHARDPLAN_CACHE"):
        return Path(named)
    if parent := os.environ.get("XDG_CACHE_HOME"):
        return Path(parent) / "shardplan"
    return Path.home() / ".cache" / "shardplan"


def cache_path(processes: int) -> Path:
    """Return where the measurement with so many processes is kept."""
    return cache_folder() / f"machine-{processes}.json"


def save(measurement: MachineMeasurement) -> Path:
    """Write a measurement to the cache, in place of an older one, and return where it is."""
    return write_to_cache(cache_path(measurement.processes), measurement.to_dict())


def write_to_cache(path: Path, document: Mapping[str, Any]) -> Path:
    """Write a JSON document into the user's cache, in place of an older one; return its path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{path.parent}: cannot be made: {error.strerror or error}. "
            "Set SHARDPLAN_CACHE to a folder that can be written"
        ) from None
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    write_text_atomically(path, text, force=True)
    return path


def load_cached(processes: int) -> MachineMeasurement | None:
    """Return the cached measurement of this machine with so many processes, or None.

    A file of another host, another number of cores or another schema does not count, nor does one
    that cannot be read: it is measured anew and replaced.
    """
    path = cache_path(processes)
    if not path.is_file():
        return None
    try:
        found = MachineMeasurement.from_fields(Fields(read_json(path, "a measurement"), str(path)))
    except InputError:
        return None
    same = (found.host, found.num_cores, found.processes)
    return found if same == (this_host(), available_cores(), processes) else None


def this_host() -> str:
    """Return the name of this machine."""
    return platform.node()


def available_cores() -> int:
    """Return how many processors this process may run on (affinity and container quota counted).

    Logical processors, as the operating system numbers them: where two share a physical core, the
    measured rates show it.
    """
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = _cgroup_cores(Path("/sys/fs/cgroup/cpu.max"))
    return max(1, min(allowed, allowed if quota is None else quota))


def _cgroup_cores(path: Path) -> int | None:
    """Return the whole cores of a cgroup v2 quota (``200000 100000``: 2); None without one."""
    try:
        quota, period = path.read_text(encoding="ascii").split()[:2]
        return int(quota) // int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no cgroup v2, or "max"
        return None


def machine_memory_bytes() -> int:
    """Return the memory of this machine, or the limit of its container where that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (cgroup_memory_limit(path) for path in _MEMORY_LIMITS)
    return min([total, *(limit for limit in limits if limit is not None)])


def cgroup_memory_limit(path: Path) -> int | None:
    """Return the bytes in a cgroup's limit file; None without a limit."""
    try:
        limit = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such cgroup version, or "max"
        return None
    return limit if limit > 0 else None
