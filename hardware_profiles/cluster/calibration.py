"""Calibration of a cluster with runs: factors on its measured or published rates.

A factor of 0.9 on rates: matmuls, memory and host work at 0.9 of the figure before; on links:
bandwidth at 0.9, latency at 1 / 0.9. The old value is recorded in the figure's
source. The factors of this machine are stored in the user's cache, next to its measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import tomli_w
from msgspec import Meta, Struct

from hardware_profiles.cluster.cluster_json import cluster_to_dict
from hardware_profiles.cluster.measurement import cache_folder, this_host, write_to_cache
from hardware_profiles.cluster.schema import MAX_GPUS, Accelerator, Cluster, Figure, Level, Tier
from hardware_profiles.errors import InputError
from hardware_profiles.fields import convert, read_json, write_text_atomically

SCHEMA_VERSION: Final = 1
LOWEST, HIGHEST = 0.02, 50.0  # of a factor: beyond, the run was not of this cluster
Factor = Annotated[float, Meta(ge=LOWEST, le=HIGHEST)]


@dataclass(frozen=True, slots=True)
class RunFactors:
    """Factors on the rates of a cluster from one run on it."""

    run: str  # its folder
    rates: float
    links: float | None  # None: the run did not communicate, or did not measure it


@dataclass(frozen=True, slots=True)
class Calibration:
    """Runs that calibrate a cluster; the factors are their medians."""

    host: str
    accelerator: str
    num_gpus: int
    runs: tuple[RunFactors, ...]

    @property
    def rates(self) -> float:
        """Factor on the rates of the accelerator and its host."""
        return statistics.median(run.rates for run in self.runs)

    @property
    def links(self) -> float:
        """Factor on bandwidths between accelerators."""
        known = [run.links for run in self.runs if run.links is not None]
        return statistics.median(known) if known else 1.0

    @property
    def words(self) -> str:
        """The number of runs, in words."""
        return f"{len(self.runs)} run{'s' if len(self.runs) > 1 else ''}"

    def with_run(self, run: RunFactors) -> Calibration:
        """Add a run, or put it in the place of the same run before."""
        others = tuple(other for other in self.runs if other.run != run.run)
        return replace(self, runs=(*others, run))


class _Run(Struct, frozen=True, forbid_unknown_fields=True):
    run: str
    rates: Factor
    links: Factor | None = None


class _CalibrationFile(Struct, frozen=True, forbid_unknown_fields=True):
    schema_version: Literal[1]
    host: str
    accelerator: str
    num_gpus: Annotated[int, Meta(ge=1, le=MAX_GPUS)]
    runs: tuple[_Run, ...]


def calibrated(cluster: Cluster, calibration: Calibration) -> Cluster:
    """Return the cluster as the runs showed it."""
    why = f"calibrated by {calibration.words}"
    note = (
        f"{why}: rates x {calibration.rates:.3g}, links x {calibration.links:.3g} of the figures "
        "before"
    )
    return replace(
        cluster,
        accelerator=scaled_rates(cluster.accelerator, calibration.rates, why),
        tiers=tuple(scaled_tier(tier, calibration.links, why) for tier in cluster.tiers),
        levels=tuple(scaled_level(level, calibration.links, why) for level in cluster.levels),
        notes=(*cluster.notes, note),
    )


def scaled_rates(accelerator: Accelerator, factor: float, why: str) -> Accelerator:
    """Multiply the rates that steps are timed with.

    Peaks stay, since utilisation refers to them; one below the scaled achievable rate was too low,
    and is that rate. Where no achievable matmul rate is known, the estimate takes a share of the
    peak, and so does the scaled one.
    """
    peaks, known = accelerator.peak_flops, accelerator.achievable_flops

    def has_measurement(name: str) -> bool:  # 16-bit formats of one peak share one
        twin = {"fp16": "bf16", "bf16": "fp16"}.get(name, name)
        shares = twin in known and twin in peaks and peaks[twin].value == peaks[name].value
        return name in known or shares

    launch, score = accelerator.kernel_launch, accelerator.score_seconds
    reached = {name: _scaled(figure, factor, why) for name, figure in known.items()}

    def peak(name: str, figure: Figure) -> Figure:
        if not has_measurement(name):
            return _scaled(figure, factor, why)
        return max(figure, reached.get(name, figure), key=lambda one: one.value)

    return replace(
        accelerator,
        peak_flops={name: peak(name, figure) for name, figure in peaks.items()},
        achievable_flops=reached,
        memory_bandwidth=_scaled(accelerator.memory_bandwidth, factor, why),
        kernel_launch=None if launch is None else _scaled(launch, 1.0 / factor, why),
        score_seconds=None if score is None else _scaled(score, 1.0 / factor, why),
    )


def scaled_tier(tier: Tier, factor: float, why: str) -> Tier:
    """Multiply the bandwidths of a tier, divide its latencies."""
    peer, peer_latency = tier.peer_bandwidth, tier.peer_latency
    return replace(
        tier,
        bandwidth=_scaled(tier.bandwidth, factor, why),
        latency=_scaled(tier.latency, 1.0 / factor, why),
        peer_bandwidth=None if peer is None else _scaled(peer, factor, why),
        peer_latency=None if peer_latency is None else _scaled(peer_latency, 1.0 / factor, why),
    )


def scaled_level(level: Level, factor: float, why: str) -> Level:
    """Multiply the bandwidths of a level of a tree, divide its latencies."""
    return replace(
        level,
        bandwidth=tuple(_scaled(figure, factor, why) for figure in level.bandwidth),
        latency=tuple(_scaled(figure, 1.0 / factor, why) for figure in level.latency),
    )


def _scaled(figure: Figure, factor: float, why: str) -> Figure:
    source = f"{figure.value:.6g} ({figure.source}) x {factor:.4g}, {why}"
    return Figure(figure.value * factor, "measured", source)


# --- files ---


def calibration_path(accelerator: str, num_gpus: int) -> Path:
    """Return the path of this machine's calibration."""
    name = "".join(c if c.isalnum() else "-" for c in accelerator).strip("-")
    return cache_folder() / f"calibration-{name}-{num_gpus}.json"


def load_calibration(accelerator: str, num_gpus: int) -> Calibration | None:
    """Return the stored calibration of this machine; None without a readable one."""
    path = calibration_path(accelerator, num_gpus)
    if not path.is_file():
        return None
    try:
        found = _read(path)
    except InputError:
        return None
    same = (found.host, found.accelerator, found.num_gpus)
    return found if same == (this_host(), accelerator, num_gpus) and found.runs else None


def save_calibration(calibration: Calibration) -> Path:
    """Write a calibration to the cache, in place of an older one, and return where it is."""
    path = calibration_path(calibration.accelerator, calibration.num_gpus)
    return write_to_cache(path, {"schema_version": SCHEMA_VERSION, **asdict(calibration)})


def forget_calibration(accelerator: str, num_gpus: int) -> None:
    """Drop what runs taught about this machine."""
    calibration_path(accelerator, num_gpus).unlink(missing_ok=True)


def _read(path: Path) -> Calibration:
    found = convert(read_json(path, "a calibration"), _CalibrationFile, str(path))
    runs = tuple(RunFactors(run.run, run.rates, run.links) for run in found.runs)
    return Calibration(found.host, found.accelerator, found.num_gpus, runs)


def write_cluster_toml(path: Path, cluster: Cluster, *, force: bool = False) -> None:
    """Write a cluster with every figure and its source, to be named as CLUSTER."""
    text = tomli_w.dumps({"cluster": _without_none(cluster_to_dict(cluster))})
    write_text_atomically(path, text, force=force)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(item) for item in value] if isinstance(value, (list, tuple)) else value
