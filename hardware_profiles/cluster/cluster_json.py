"""A cluster as plain values: the part of plan.json, and of a calibrated cluster's TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from hardware_profiles.cluster.irregular_tree import check_above, check_levels
from hardware_profiles.cluster.schema import MAX_GPUS, Accelerator, Cluster, Kind, Precision
from hardware_profiles.fields import Amount, Line, Positive, convert, struct_of, tidied, wrong_value

_Count = Annotated[int, Meta(ge=1, le=MAX_GPUS)]
_Number = Annotated[int, Meta(ge=0, le=MAX_GPUS)]


class _Figure(Struct, frozen=True, forbid_unknown_fields=True):
    value: Positive
    kind: Kind
    source: Line


class _Share(_Figure, frozen=True, forbid_unknown_fields=True):
    value: Annotated[float, Meta(ge=1e-12, le=1.0)]


class _Latency(_Figure, frozen=True, forbid_unknown_fields=True):
    value: Amount


class _Tier(Struct, frozen=True, forbid_unknown_fields=True):
    name: Line
    domain_size: _Count
    bandwidth: _Figure
    latency: _Latency
    peer_bandwidth: _Figure | None = None
    peer_latency: _Latency | None = None


class _Level(Struct, frozen=True, forbid_unknown_fields=True):
    name: Line
    above: tuple[_Number, ...]
    bandwidth: tuple[_Figure, ...]
    latency: tuple[_Latency, ...]
    per_accelerator: bool = False


_FIGURES: Final[dict[str, Any]] = {  # names and types of the figures of an accelerator
    "memory_capacity": _Figure,
    "memory_bandwidth": _Figure,
    "link_bandwidth": _Figure,
    "link_share": _Share | None,
    "usable_memory": _Figure | None,
    "host_bandwidth": _Figure | None,
    "host_memory_bandwidth": _Figure | None,
    "power": _Figure | None,
    "power_limit": _Figure | None,
    "price": _Figure | None,
    "compute_units": _Figure | None,
    "l2_cache": _Figure | None,
    "systolic_array": _Figure | None,
    "kernel_launch": _Figure | None,
    "score_seconds": _Figure | None,
    "core_share": _Figure | None,
}
_Accelerator: Final = struct_of(
    Accelerator,
    peak_flops=dict[Precision, _Figure],
    achievable_flops=(dict[Precision, _Figure], {}),
    **_FIGURES,
)
ClusterFields: Final = struct_of(
    Cluster,
    without=("rank_order",),  # of a plan, which is written separately
    accelerator=_Accelerator,
    num_nodes=_Count,
    gpus_per_node=_Count,
    tiers=tuple[_Tier, ...],
    host_memory=_Figure | None,
    nvme=_Figure | None,
    host_links=_Number,
    levels=tuple[_Level, ...],
)


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Return plain JSON values with every figure, so that a file is self-contained."""
    plain: dict[str, Any] = asdict(cluster)
    del plain["rank_order"]  # of a plan, which is written separately
    if not cluster.levels:
        del plain["levels"]
    plain["accelerator"]["aliases"] = list(cluster.accelerator.aliases)
    plain["tiers"] = list(plain["tiers"])
    plain["notes"] = list(cluster.notes)
    return plain


def cluster_from_dict(values: Mapping[str, Any], where: str) -> Cluster:
    """Read and check the output of ``cluster_to_dict``, edited by hand or not.

    ``where``: the file, and the path inside it, for errors.
    """
    found = convert(tidied(values), ClusterFields, where)
    if not found.accelerator.peak_flops:
        raise wrong_value(f"{where}: accelerator", "peak_flops", {}, "at least one precision")
    num_gpus = found.num_nodes * found.gpus_per_node
    if num_gpus > MAX_GPUS:
        allowed = f"such that nodes times accelerators is at most {MAX_GPUS:,}"
        raise wrong_value(where, "num_nodes", found.num_nodes, allowed)
    sizes = [tier.domain_size for tier in found.tiers]
    if not sizes or sizes != sorted(set(sizes)) or sizes[-1] != num_gpus:
        allowed = f"domain sizes that grow from the innermost tier to all {num_gpus:,}"
        raise wrong_value(where, "tiers", sizes, allowed)
    for index, level in enumerate(found.levels):
        check_above(level.above, f"{where}: levels[{index}]")
    cluster = msgspec.convert(found, Cluster, from_attributes=True)
    check_levels(cluster.levels, num_gpus, where)
    return cluster
