"""The executor's measurement of this machine, and its file in the user's cache.

``python -m executor measure --processes N --json`` prints one such document; ``here.py`` turns it
into a cluster. All rates are those of one process while every process works at the same time, so
shared caches, memory channels and clock limits are already in them.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from hardware_profiles.errors import InputError
from hardware_profiles.fields import convert, read_json, write_text_atomically
from hardware_profiles.record import Record

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
MAX_AGE_DAYS: Final = 30  # older measurements are taken again
OLD_DAYS: Final = 7  # the age of older ones is printed
BUSY_SHARE: Final = 0.5  # runnable programs a core from which a machine is busy
MOST_DRIFT: Final = 1.5  # ratio of the probe, now and then, up to which a measurement holds
PROBES: Final = 30
PROBE_ELEMENTS: Final = 2**17
COMMUNICATION: Final = (
    "collective_bandwidth",
    "collective_latency",
    "p2p_bandwidth",
    "p2p_latency",
)


class MachineMeasurement(Record, frozen=True, forbid_unknown_fields=True):
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
    # of the machine when the measurement began; None: written by an older version
    load: Annotated[float, Meta(ge=0.0, le=1e6)] | None = None  # runnable programs, 1-minute mean
    probe_seconds: Duration | None = None  # of ``probe_seconds``
    schema_version: Literal[2] = SCHEMA_VERSION


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


def why_measure_again(found: MachineMeasurement) -> str | None:
    """Return why a cached measurement is no longer that of this machine; None: it is.

    A busy machine is not probed: it would look slower than it is.
    """
    if (age := age_in_days(found)) is not None and age > MAX_AGE_DAYS:
        return f"the measurement is {age} days old"
    if (processor := cpu_model()) != found.cpu_model:
        return f"it was measured on another processor ({found.cpu_model}, now {processor})"
    torch = _torch_version()
    if torch is not None and torch != found.torch_version.partition("+")[0]:
        return f"it was measured with torch {found.torch_version}, now {torch}"
    if busy_words():
        return None
    if found.load is not None and found.load > BUSY_SHARE * found.num_cores:
        return f"it was measured on a busy machine (load {found.load:.1f})"
    if found.probe_seconds is None:
        return None
    now = probe_seconds()
    faster = found.probe_seconds / now
    if max(faster, 1.0 / faster) <= MOST_DRIFT:
        return None
    factor, word = (faster, "fast") if faster > 1.0 else (1.0 / faster, "slow")
    return f"the machine is {factor:.1f} times as {word} as when it was measured"


def measurement_notes(found: MachineMeasurement) -> list[str]:
    """Return what limits a measurement: the load of the machine now and then, and its age."""
    notes = []
    age, busy = age_in_days(found), busy_words()
    if age is not None and age > OLD_DAYS:
        notes.append(f"this machine was measured {age} days ago (shardplan calibrate measures)")
    if found.load is not None and found.load > BUSY_SHARE * found.num_cores:
        notes.append(f"it was measured while other programs ran (load {found.load:.1f})")
    if busy:
        notes.append(f"this machine is {busy}: a run takes longer than predicted meanwhile")
    return notes


def age_in_days(found: MachineMeasurement) -> int | None:
    """Return the age of a measurement; None if its date is not one."""
    try:
        return (datetime.date.today() - datetime.date.fromisoformat(found.date)).days
    except ValueError:
        return None


def load_average() -> float | None:
    """Return the mean number of runnable programs in the last minute; None if it is not known."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # not every system counts them
        return None


def busy_words() -> str:
    """Return "busy" with the load if other programs use a good part of the processors, else ""."""
    load, cores = load_average(), available_cores()
    if load is None or load <= BUSY_SHARE * cores:
        return ""
    return f"busy (load {load:.1f} on {cores} cores)"


def probe_seconds() -> float:
    """Return the seconds of a short computation of one thread, the best of several."""
    import numpy as np

    values = np.linspace(0.0, 1.0, PROBE_ELEMENTS, dtype=np.float32)
    seconds = []
    for _ in range(PROBES):
        begin = time.perf_counter()
        np.exp(values)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name from /proc/cpuinfo, else from ``platform``."""
    try:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine() or "unknown"


def _torch_version() -> str | None:
    """Return the version of the installed torch without its build; None: not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


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
