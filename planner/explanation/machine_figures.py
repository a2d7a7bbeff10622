"""Figures of a cluster that decide between plans: memory, rates and links, each scalable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cost_models.compute.rates import best_matmul
from cost_models.scenario import Scenario
from hardware_profiles.cluster.cluster_file import with_levels
from hardware_profiles.cluster.links.tree import with_bandwidths
from hardware_profiles.cluster.schema import Accelerator, Cluster, Figure, Tier

MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class ScaledFigure:
    """One figure of a cluster in SI units, and a function that scales it."""

    name: str
    words: str
    unit: str  # bytes, bytes/s or FLOP/s
    value: float
    scaled: Callable[[float], Cluster]  # factor -> cluster


def figures(scenario: Scenario) -> tuple[ScaledFigure, ...]:
    """Return the figures of a scenario's cluster, from the device outwards."""
    cluster = scenario.cluster
    chip = cluster.accelerator
    device = "a process" if chip.device == "cpu" else "an accelerator"
    matmul = best_matmul(chip, scenario.workload.precision) or 0.0
    found = [
        ScaledFigure(
            MEMORY,
            f"memory of {device}",
            "bytes",
            chip.memory_capacity.value,
            lambda factor: _with_chip(cluster, with_memory(chip, factor)),
        ),
        ScaledFigure(
            "flops",
            f"{scenario.workload.precision} matrix products",
            "FLOP/s",
            matmul,
            lambda factor: _with_chip(cluster, _with_flops(chip, factor)),
        ),
        ScaledFigure(
            "memory_bandwidth",
            f"memory bandwidth of {device}",
            "bytes/s",
            chip.memory_bandwidth.value,
            lambda factor: _with_chip(
                cluster, replace(chip, memory_bandwidth=_times(chip.memory_bandwidth, factor))
            ),
        ),
    ]
    if cluster.levels:
        found += [_level(cluster, index) for index in range(len(cluster.levels))]
    elif cluster.num_gpus > 1:
        found += [_link(cluster, index) for index in range(len(cluster.tiers))]
    return tuple(found)


def with_memory(chip: Accelerator, factor: float) -> Accelerator:
    """Return an accelerator with more or less memory."""
    usable = chip.usable_memory
    return replace(
        chip,
        memory_capacity=_times(chip.memory_capacity, factor),
        usable_memory=None if usable is None else _times(usable, factor),
    )


def _with_flops(chip: Accelerator, factor: float) -> Accelerator:
    def every(rates: Mapping[str, Figure]) -> dict[str, Figure]:
        return {name: _times(figure, factor) for name, figure in rates.items()}

    return replace(
        chip, peak_flops=every(chip.peak_flops), achievable_flops=every(chip.achievable_flops)
    )


def _link(cluster: Cluster, index: int) -> ScaledFigure:
    tier = cluster.tiers[index]
    where = "between nodes" if index else "inside a node"
    if cluster.accelerator.device == "cpu":
        where = "between processes"
    elif tier.domain_size > cluster.gpus_per_node and index + 1 < len(cluster.tiers):
        where = f"inside a domain of {tier.domain_size}"

    def scaled(factor: float) -> Cluster:
        tiers = list(cluster.tiers)
        tiers[index] = with_bandwidth(tier, factor)
        there = replace(cluster, tiers=tuple(tiers))
        chip = cluster.accelerator
        if index or (tier.name, tier.bandwidth.value) != (chip.link, chip.link_bandwidth.value):
            return there
        # the accelerator's own link: it keeps its measured share
        return _with_chip(there, replace(chip, link_bandwidth=tiers[index].bandwidth))

    words = f"{tier.name} {where}, for each accelerator"
    return ScaledFigure(f"link_{index}", words, "bytes/s", tier.bandwidth.value, scaled)


def _level(cluster: Cluster, index: int) -> ScaledFigure:
    level = cluster.levels[index]

    def scaled(factor: float) -> Cluster:
        levels = list(cluster.levels)
        levels[index] = with_bandwidths(level, factor)
        return with_levels(cluster, tuple(levels))

    slowest = min(figure.value for figure in level.bandwidth)
    per = "for each accelerator" if level.per_accelerator else "a link"
    return ScaledFigure(f"link_{index}", f"{level.name}, {per}", "bytes/s", slowest, scaled)


def with_bandwidth(tier: Tier, factor: float) -> Tier:
    """Return a link with more or less bandwidth."""
    peer = tier.peer_bandwidth
    return replace(
        tier,
        bandwidth=_times(tier.bandwidth, factor),
        peer_bandwidth=None if peer is None else _times(peer, factor),
    )


def _times(figure: Figure, factor: float) -> Figure:
    return replace(figure, value=factor * figure.value)


def _with_chip(cluster: Cluster, chip: Accelerator) -> Cluster:
    return replace(cluster, accelerator=chip)


def format_value(value: float, unit: str) -> str:
    """Return a figure's value with its usual unit.

    >>> format_value(3.35e12, "bytes/s")
    '3,350 GB/s'
    """
    if unit == "bytes":
        return f"{value / 2**30:.1f} GiB"
    scaled, name = (value / 1e12, "TFLOP/s") if unit == "FLOP/s" else (value / 1e9, "GB/s")
    return f"{scaled:,.3g} {name}" if scaled < 1e3 else f"{scaled:,.0f} {name}"
