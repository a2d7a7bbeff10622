"""The cluster of a row."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from hardware_profiles.cluster.build import build_cluster
from hardware_profiles.cluster.catalogue import (
    find_accelerator,
    match_accelerator,
    match_node,
    usual_node,
)
from hardware_profiles.cluster.local_machine import describe_here
from hardware_profiles.cluster.power_limit import with_power_limit
from hardware_profiles.cluster.schema import Accelerator, Cluster, Figure
from hardware_profiles.errors import InputError, NeedsMeasurement
from planner.validation.reading import Reading, Unpriceable
from planner.validation.words import look_up, words_table

HERE: Final = "here"  # in the column gpu: the CPU processes or GPUs of this machine
Key = tuple[Any, ...]


def cluster_of(reading: Reading) -> tuple[Cluster, Key]:
    """Return the cluster of a row and a key that is equal for equal clusters."""
    row = reading.row
    if row.words("gpu") == HERE:
        return _this_machine(reading.need("num_gpus")), (HERE, row.num_gpus)
    accelerator = accelerator_of(reading)
    total = reading.need("num_gpus")
    usual = usual_node(accelerator)
    each = row.get("gpus_per_node")
    if each is None:
        most = min(usual.gpus_per_node if usual else 8, total)
        each = max(size for size in range(1, most + 1) if total % size == 0)
        each = reading.value("gpus_per_node", each, "usual node, or the largest that divides")
    each = min(each, total)
    if total % each:
        raise Unpriceable(f"{total} accelerators are no whole nodes of {each}")
    speed = row.get("inter_link_gbps_per_gpu") if total > each else None
    if row.node is not None and match_node(row.node) is None:
        raise Unpriceable(
            f"node {row.node!r} is not in the catalogue (shardplan hardware lists it)"
        )
    key = (accelerator.name, total // each, each, speed, row.node, row.power)
    return _build(*key), key


@cache
def _this_machine(processes: int) -> Cluster:
    try:
        return describe_here(processes)
    except (InputError, NeedsMeasurement) as error:
        raise Unpriceable(f"gpu here: {error}; shardplan fit MODEL here measures it") from None


@cache
def _build(
    name: str,
    num_nodes: int,
    gpus_per_node: int,
    gigabits: float | None,
    node: str | None,
    watts: float | None,
) -> Cluster:
    kind = None if node is None else match_node(node)
    network = None
    if gigabits is not None:
        network = Figure(gigabits * 1e9 / 8.0, "published", "inter_link_gbps_per_gpu of the row")
    cluster = build_cluster(
        find_accelerator(name),
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        node=None if kind is None else kind.entry,
        network_bandwidth=network,
    )
    if watts is None:
        return cluster
    try:
        return with_power_limit(cluster, watts)
    except InputError as error:
        raise Unpriceable(str(error)) from None


def accelerator_of(reading: Reading) -> Accelerator:
    """Return the accelerator that ``gpu`` and ``gpu_mem_gb`` name, and record the convention."""
    row = reading.row
    name, memory = row.get("gpu"), row.get("gpu_mem_gb")
    if name is None:
        raise Unpriceable("gpu is empty")
    names = [f"{name}-{memory:g}GB"] if memory is not None else []
    entry = look_up(words_table().gpu, row)
    usual = [entry.accelerator] if entry else []
    known = usual + names if entry and entry.before_name else names + usual
    for candidate in [*known, name]:
        try:
            found = match_accelerator(candidate)
        except InputError:
            continue
        if found.note is not None and candidate == name:
            reading.defaults.append(found.note)
        return found.entry
    raise Unpriceable(f"gpu {name!r} is not in the catalogue (shardplan hardware lists it)")
