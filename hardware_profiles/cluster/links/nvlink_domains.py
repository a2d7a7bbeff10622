"""Domains of the inner link that a group of ranks is in, and what an exchange between them has."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from hardware_profiles.cluster.links.groups import Column, Count, mesh_bandwidth, of_distinct_groups
from hardware_profiles.cluster.links.tree import exchange_links, is_regular, with_network_share
from hardware_profiles.cluster.schema import Cluster


def domains_spanned(cluster: Cluster, group_size: Count, stride: Count) -> Column:
    """Return in how many NVLink domains (nodes, racks) the ranks of a group lie.

        k / m, with m = max(1, floor(gcd(k s, D) / s)) members in a domain of D

    as in ``groups.group_link``: the group that has the fewest in one domain. Orders of ranks count
    on equal domains alone.

    >>> from hardware_profiles.cluster.parse import parse_cluster
    >>> cluster = parse_cluster("2xDGX-A100-80GB")
    >>> domains_spanned(cluster, np.array([8, 16, 2]), np.array([1, 1, 8])).tolist()
    [1.0, 2.0, 2.0]
    """
    size, step = np.asarray(group_size), np.asarray(stride)
    domain = cluster.tiers[0].domain_size
    if cluster.num_gpus <= domain:
        return np.ones(np.broadcast(size, step).shape)
    if not (cluster.levels or is_regular(cluster)):

        def of_group(size: int, step: int) -> tuple[float]:
            return (size / float(exchange_links(cluster, size, step).members[1]),)

        return of_distinct_groups(of_group, 1, size, step)[0]
    members = np.maximum(1, np.gcd(size * step, domain) // step)
    domains: Column = np.multiply(1.0, size) / np.minimum(members, size)
    return domains


def exchange_bandwidth(
    cluster: Cluster,
    group_size: Count,
    stride: Count,
    *,
    copies: int = 0,
    groups: tuple[int, int] = (1, 1),
    share: float = 1.0,
) -> Column:
    """Return W such that an exchange of all with all takes (n - 1)/n B / W.

        min over the tiers crossed of  w (n - 1) / (n - m)       m members of a group in a domain

    The part of a rank's data for the n - m others leaves the domain over its own share w of the
    tier, as all ranks exchange at once. A ring leaves a domain once for all of its members there,
    which is why ``groups.group_link`` gives it m w.

    ``copies``: number of rows that are copies of one token for different experts; one of them goes
    to each domain, where it is forwarded (``domains_of_token``; ``groups``), so that the network
    has the number of these domains over that of the copies to carry. ``share``: of the bandwidth
    that a ring reaches between nodes, what this exchange does.

    On a tree of any shape, and for ranks in any order: ``links.tree``.

    >>> from hardware_profiles.cluster.parse import parse_cluster
    >>> cluster = parse_cluster("2xDGX-A100-80GB")
    >>> found = exchange_bandwidth(cluster, np.array([8, 16, 2]), np.array([1, 1, 8]))
    >>> (found / 1e9).tolist()
    [300.0, 46.875, 25.0]
    """
    if share != 1.0:
        cluster = with_network_share(cluster, share)
    if not is_regular(cluster):
        return _on_tree(cluster, group_size, stride, copies, groups)
    size, step = np.asarray(group_size), np.asarray(stride)
    span = np.where(size > 1, size * step, 1)
    inner = cluster.tiers[0].domain_size
    within = np.where(
        cluster.num_gpus <= inner, size, np.minimum(size, np.gcd(span, inner) // step)
    )
    bandwidth = mesh_bandwidth(cluster.tiers[0], np.maximum(1, within))
    for domain, outer in pairwise(cluster.tiers):
        members = np.maximum(1, np.gcd(span, domain.domain_size) // step)
        leaves = (members < size) & (cluster.num_gpus > domain.domain_size)
        others = np.where(leaves, size - np.minimum(members, size), 1)
        carried = outer.bandwidth.value * (size - 1.0) / others
        if copies:
            domains = np.maximum(1.0, size / np.minimum(members, size))
            carried = carried * copies / domains_of_token(domains, copies, groups)
        bandwidth = np.where(leaves, np.minimum(bandwidth, carried), bandwidth)
    return bandwidth


def _on_tree(
    cluster: Cluster, group_size: Count, stride: Count, copies: int, groups: tuple[int, int]
) -> Column:
    """Return W of every group."""

    def of_group(size: int, step: int) -> tuple[float]:
        bandwidth, members = exchange_links(cluster, size, step)
        inner, outer = bandwidth[0], bandwidth[1:]
        if copies:
            outer = outer * copies / domains_of_token(size / members[1:], copies, groups)
        return (float(np.min(outer, initial=inner)),)

    return of_distinct_groups(of_group, 1, group_size, stride)[0]


def domains_of_token(domains: Column, experts: int, groups: tuple[int, int] = (1, 1)) -> Column:
    """Return in how many of N domains the k experts of a token are, on average.

        N' (1 - (1 - 1/N')^k)          k experts without preference in N' of the domains
        N' = N (1 - C(G - G/N, t) / C(G, t))    t of G groups, of which a domain has G/N
             N t / G                            where a group spans domains

    ``groups``: G and t; a token's experts are of t groups of neighbours alone.
    Source: DeepSeek-V3 (arXiv:2412.19437), sec. 2.1.2, node-limited routing.

    >>> eight = np.array([8.0])
    >>> [round(float(domains_of_token(eight, 8, of)[0]), 2) for of in ((1, 1), (8, 4))]
    [5.25, 3.6]
    """
    number, chosen = groups
    reached = 1.0 * domains
    if chosen < number:
        missed = np.ones_like(reached)
        for drawn in range(chosen):
            left = number - drawn
            missed = missed * np.maximum(0.0, left - number / domains) / left
        spans = domains > number
        reached = np.where(spans, domains * chosen / number, domains * (1.0 - missed))
    reached = np.maximum(1.0, reached)
    found: Column = reached * (1.0 - (1.0 - 1.0 / reached) ** experts)
    return found
