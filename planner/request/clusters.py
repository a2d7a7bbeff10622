"""Clusters from text: one, lists and ranges of several, and parts of a larger one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from cost_models.model.presets import is_preset
from hardware_profiles.cluster.build import share_of
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.power_limit import with_power_limit
from hardware_profiles.cluster.schema import MAX_GPUS, Cluster
from hardware_profiles.cluster.subset import part_of as part_of_tree
from hardware_profiles.errors import InputError
from planner.request.divisors import divisors
from planner.request.options.choices import ClusterLike

MOST_CLUSTERS: Final = 1024  # of one question
_RANGE: Final = re.compile(r"^\s*(?P<low>\d+)\s*\.\.\s*(?P<high>\d+)\s*[x*×](?P<rest>.+)$", re.I)


def split_clusters(text: str) -> list[str]:
    """Return the clusters that a text names, one word each.

    >>> split_clusters("8xA100-80GB, 1..3x8xH100-SXM")
    ['8xA100-80GB', '1x8xH100-SXM', '2x8xH100-SXM', '3x8xH100-SXM']
    """
    if Path(text).suffix == ".toml" and Path(text).exists():
        return [text]  # a comma in a file's name
    if not text.isprintable():
        raise InputError(f"cluster {text[:60]!r}: its text holds control characters")
    names: list[str] = []
    for part in text.split(","):
        names += _range(part) if ".." in part and not part.strip().endswith(".toml") else [part]
    named = [name.strip() for name in names]
    if len(named) > 1 and not all(named):
        raise InputError(f"{text[:60]!r}: a cluster is missing before or after a comma")
    if len(named) > MOST_CLUSTERS:
        raise InputError(
            f"{text[:60]}: {len(named):,} clusters are too many (at most {MOST_CLUSTERS:,})"
        )
    return list(dict.fromkeys(named))


def _range(part: str) -> list[str]:
    match = _RANGE.match(part)
    shown = part.strip()[:60]
    if match is None:
        raise InputError(f"{shown}: a range of clusters is written 1..64x8xH100-SXM")
    if len(match["low"]) > 9 or len(match["high"]) > 9:
        raise InputError(f"{shown}: at most {MAX_GPUS:,} accelerators")
    low, high = int(match["low"]), int(match["high"])
    if not 1 <= low <= high:
        raise InputError(f"{shown}: a range goes from a number above 0 to one that is not smaller")
    if high - low >= MOST_CLUSTERS:
        raise InputError(
            f"{shown}: {high - low + 1:,} clusters are too many (at most {MOST_CLUSTERS:,})"
        )
    return [f"{count}x{match['rest'].strip()}" for count in range(low, high + 1)]


def part_of(cluster: Cluster, num_gpus: int) -> Cluster:
    """Return a part of a cluster with ``num_gpus`` accelerators: whole nodes, or some of one node.

    >>> from hardware_profiles.cluster.parse import parse_cluster
    >>> [tier.domain_size for tier in part_of(parse_cluster("4x8xH100-SXM"), 16).tiers]
    [8, 16]
    """
    if num_gpus == cluster.num_gpus:
        return cluster
    per_node = min(num_gpus, cluster.gpus_per_node)
    num_nodes = num_gpus // per_node
    name = f"{num_nodes}x{per_node}x{cluster.accelerator.words}"
    if cluster.levels:
        return replace(part_of_tree(cluster, num_gpus), name=f"{name} of {cluster.name}")
    inner = [tier for tier in cluster.tiers if tier.domain_size < num_gpus]
    outer = next(tier for tier in cluster.tiers if tier.domain_size >= num_gpus)
    share = per_node / cluster.gpus_per_node
    return replace(
        cluster,
        name=name,
        num_nodes=num_nodes,
        gpus_per_node=per_node,
        tiers=(*inner, replace(outer, domain_size=num_gpus)),
        host_memory=share_of(cluster.host_memory, share),
        nvme=share_of(cluster.nvme, share),
    )


def parts_of(cluster: Cluster, at_most: int | None = None) -> list[Cluster]:
    """Return the parts of a cluster that are worth trying, the largest first.

    Whole nodes whose number divides that of all nodes, and the divisors of one node; and the most
    whole nodes within ``at_most``. CPU processes share one machine: they are taken as they are.

    >>> from hardware_profiles.cluster.parse import parse_cluster
    >>> [c.num_gpus for c in parts_of(parse_cluster("6x4xH100-SXM"))]
    [24, 12, 8, 4, 2, 1]
    >>> [c.num_gpus for c in parts_of(parse_cluster("6x4xH100-SXM"), 20)]
    [20, 12, 8, 4, 2, 1]
    """
    if cluster.accelerator.device == "cpu":
        return [cluster]
    per_node = cluster.gpus_per_node
    sizes = {nodes * per_node for nodes in divisors(cluster.num_nodes)} | set(divisors(per_node))
    if at_most is not None:
        whole = min(at_most, cluster.num_gpus) // per_node * per_node
        sizes = {size for size in sizes if size <= at_most} | ({whole} if whole else set())
    return [part_of(cluster, size) for size in sorted(sizes, reverse=True)]


def named_cluster(text: str) -> Cluster:
    """Return the cluster of a text; a model in its place is named as such."""
    try:
        return parse_cluster(text)
    except InputError:
        if is_preset(text.strip()):
            raise InputError(f"{text} is a model: MODEL comes first, then CLUSTER") from None
        raise


def cluster_of(cluster: ClusterLike, watts: float | None = None) -> Cluster:
    """Return the only cluster of a text or a path, its boards held to ``watts`` if given."""
    if watts is not None:
        return with_power_limit(cluster_of(cluster), _number_of_watts(watts))
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, (str, Path)):
        named = split_clusters(str(cluster))
        if len(named) > 1:
            raise InputError(
                f"{str(cluster)[:60]}: one cluster is expected (shardplan plan compares several; "
                "accelerators of two kinds in one cluster are not priced)"
            )
        return named_cluster(str(cluster))
    raise InputError(f"cluster = {cluster!r} (must be a name, a path or a Cluster)")


def clusters_of(
    clusters: ClusterLike | Sequence[ClusterLike], watts: float | None = None
) -> list[Cluster]:
    """Return the clusters that a text or a list names (``8xA100-80GB,1..4x8xH100-SXM``).

    ``watts``: the power limit of every board, if given.
    """
    if watts is not None:
        return [
            with_power_limit(cluster, _number_of_watts(watts)) for cluster in clusters_of(clusters)
        ]
    if isinstance(clusters, str):
        return [named_cluster(name) for name in split_clusters(clusters)]
    if not isinstance(clusters, Sequence):
        return [cluster_of(clusters)]
    if not 1 <= len(clusters) <= MOST_CLUSTERS:
        raise InputError(f"{len(clusters)} clusters (must be 1 to {MOST_CLUSTERS:,})")
    return [cluster_of(cluster) for cluster in clusters]


def _number_of_watts(watts: object) -> float:
    if isinstance(watts, bool) or not isinstance(watts, (int, float)):
        raise InputError(f"power = {watts!r} (must be a number of watts)")
    return float(watts)
