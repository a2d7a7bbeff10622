"""How many domains of the inner link a group of ranks is in."""

from __future__ import annotations

import numpy as np

from hardware_profiles.cluster import Column, Count
from hardware_profiles.schema import Cluster


def domains_spanned(cluster: Cluster, group_size: Count, stride: Count) -> Column:
    """Return in how many NVLink domains (nodes, racks) the ranks of a group lie.

        k / m, with m = max(1, floor(gcd(k s, D) / s)) members in a domain of D

    as in ``cluster.group_link``: the group that has the fewest in one domain.

    >>> from hardware_profiles.spec import parse_cluster
    >>> cluster = parse_cluster("2xDGX-A100-80GB")
    >>> domains_spanned(cluster, np.array([8, 16, 2]), np.array([1, 1, 8])).tolist()
    [1.0, 2.0, 2.0]
    """
    size, step = np.asarray(group_size), np.asarray(stride)
    domain = cluster.tiers[0].domain_size
    if cluster.num_gpus <= domain:
        return np.ones(np.broadcast(size, step).shape)
    members = np.maximum(1, np.gcd(size * step, domain) // step)
    domains: Column = np.multiply(1.0, size) / np.minimum(members, size)
    return domains
