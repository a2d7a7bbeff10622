"""Parts of a cluster."""

from __future__ import annotations

from dataclasses import replace

from hardware_profiles.cluster.links.tree import part_of_levels, tiers_of_levels
from hardware_profiles.cluster.schema import Cluster, Figure
from hardware_profiles.errors import InputError


def part_of(cluster: Cluster, accelerators: int) -> Cluster:
    """Return a part of a cluster with a number of accelerators: whole nodes, or a part of one.

    >>> from hardware_profiles.cluster.parse import parse_cluster
    >>> part = part_of(parse_cluster("4x8xH100-SXM"), 16)
    >>> part.num_nodes, part.gpus_per_node, [tier.domain_size for tier in part.tiers]
    (2, 8, [8, 16])
    """
    nodes, rest = divmod(accelerators, cluster.gpus_per_node)
    if not 1 <= accelerators <= cluster.num_gpus or (nodes and rest):
        raise InputError(
            f"{accelerators} accelerators of {cluster.name} (must be whole nodes of "
            f"{cluster.gpus_per_node}, or fewer than one holds; at most {cluster.num_gpus})"
        )
    share = 1.0 if nodes else accelerators / cluster.gpus_per_node
    part = replace(
        cluster,
        name=f"{accelerators} of {cluster.name}",
        num_nodes=max(1, nodes),
        gpus_per_node=cluster.gpus_per_node if nodes else accelerators,
        host_memory=_part(cluster.host_memory, share),
        nvme=_part(cluster.nvme, share),
        rank_order=None,
    )
    if cluster.levels:
        levels = part_of_levels(cluster.levels, accelerators)
        return replace(part, levels=levels, tiers=tiers_of_levels(levels, accelerators))
    outer = next(tier for tier in cluster.tiers if tier.domain_size >= accelerators)
    inner = [tier for tier in cluster.tiers if tier.domain_size < accelerators]
    return replace(part, tiers=(*inner, replace(outer, domain_size=accelerators)))


def _part(figure: Figure | None, share: float) -> Figure | None:
    return None if figure is None else replace(figure, value=share * figure.value)
