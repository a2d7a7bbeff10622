"""The executor's measurement of this machine, and its file in the user's cache.

``python -m executor measure --processes N --json`` prints one such document; ``here.py`` turns it
into a cluster. All rates are those of one process while every process works at the same time, so
shared caches, memory channels and clock limits are already in them.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct
from msgspec.structs import asdict

from hardware_profiles.errors import InputError
from hardware_profiles.fields import convert, read_json, write_text_atomically

SCHEMA_VERSION: Final = 2
GemmPrecision = Literal["fp64", "fp32", "bf16", "fp16"]
MAX_PROCESSES: Final = 128  # on one machine without GPUs
_MEMORY_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),  # version 2
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # version 1; huge where there is none
)
# a rate or a time below 1e-12 was not measured but failed
Rate = Annotated[float, Meta(ge=1e-12, le=1e18)]
Duration = Annotated[float, Meta(ge=1e-12, le=1e3)]
Cores = Annotated[int, Meta(ge=1, le=10**6)]
TotalBytes = Annotated[int, Meta(ge=1, le=10**18)]
Latency = Annotated[float, Meta(ge=0.0, le=1e3)]
COMMUNICATION: Final = (
    "collective_bandwidth",
    "collective_latency",
    "p2p_bandwidth",
    "p2p_latency",
)


class MachineMeasurement(Struct, frozen=True, forbid_unknown_fields=True):
    """One measurement of one machine with ``processes`` CPU processes at work.

    A collective of ``n`` processes takes ``2 (n-1)/n bytes/bandwidth + 2 (n-1) latency`` seconds
    when it is an all-reduce (ring), half of it when it is an all-gather; the latency is that of
    processes that compute between their collectives. With one process there is nothing to measure:
    the four communication fields are None.
    """

    host: str
    cpu_model: str
    num_cores: Cores  # that this process may use, see ``available_cores``
    total_memory_bytes: TotalBytes  # of the machine, or the limit of the container
    available_memory_bytes: Annotated[int, Meta(ge=0, le=10**18)]  # when the measurement began
    processes: Annotated[int, Meta(ge=1, le=MAX_PROCESSES)]
    torch_version: str
    date: str  # ISO 8601, e.g. "2026-05-04"
    gemm_flops: Mapping[GemmPrecision, Rate]  # FLOP/s per process by precision
    memory_bandwidth: Rate  # bytes/s per process, read and written bytes both counted
    operator_seconds: Duration  # host seconds of one small torch operator
    score_seconds: Duration  # one attention score, forward, without its matmuls
    collective_bandwidth: Rate | None = None  # bytes/s per process of a gloo ring
    collective_latency: Latency | None = None  # seconds per step of a gloo ring
    p2p_bandwidth: Rate | None = None  # bytes/s one way, process to process
    p2p_latency: Latency | None = None  # seconds per message
    schema_version: Literal[2] = SCHEMA_VERSION

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def measurement_of(document: Mapping[str, Any], where: str) -> MachineMeasurement:
    """Read and check a measurement; several processes need the four communication fields."""
    found = convert(document, MachineMeasurement, where)
    if "fp32" not in found.gemm_flops:
        raise InputError(f"{where}: gemm_flops: fp32 is missing")
    for name in COMMUNICATION if found.processes > 1 else ():
        if getattr(found, name) is None:
            raise InputError(f"{where}: {name} is missing ({found.processes} processes)")
    return found


def cache_folder() -> Path:
    """Return ``$SHARDPLAN_CACHE``, ``$XDG_CACHE_HOME/shardplan`` or ``~/.cache/shardplan``."""
    if named := os.environ.get("SHARDPLAN_CACHE"):
        return Path(named)
    if parent := os.environ.get("XDG_CACHE_HOME"):
        return Path(parent) / "shardplan"
    return Path.home() / ".cache" / "shardplan"


def cache_path(processes: int) -> Path:
    """Return the path of the measurement with ``processes`` processes."""
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
    """Return the cached measurement of this machine with ``processes`` processes, or None.

    A file of another host, number of cores or schema, or an unreadable one, is ignored: the machine
    is measured again and the file replaced.
    """
    path = cache_path(processes)
    if not path.is_file():
        return None
    try:
        found = measurement_of(read_json(path, "a measurement"), str(path))
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
