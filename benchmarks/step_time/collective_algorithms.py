"""Seconds of collectives by algorithms that the cost model does not use, for comparison.

Symbols   n ranks   B bytes of the full tensor   W bytes/s of a link, one way, per rank
          alpha seconds of a message   s servers   m ranks of a node   N nodes   w bytes/s of a NIC
Units     seconds; every function broadcasts. n = 1 costs nothing. Links carry both ways at once.

``cost_models.communication`` has those that training uses (``ring_and_tree``) and NCCL's own model
by size (``nccl_protocols``).
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.communication.ring_and_tree import ring_all_gather, ring_all_reduce


def _of_several(ranks: Count, seconds: Real) -> Real:
    several: Real = np.where(np.greater(ranks, 1), seconds, 0.0)
    return several


def parameter_server(
    size: Real, ranks: Count, bandwidth: Real, latency: Real, servers: Count = 1
) -> Real:
    """Gradients to servers and sums back: (n + s - 2) B / (s W) + 2 alpha.

    s of the ranks are servers, each of one part of the tensor. Into a server come n - 1 gradients
    of its part, and the s - 1 other parts; sending overlaps with receiving. One server takes n / 2
    times as long as a ring, n of them as long as it, with fewer hops.

    Derived from Li et al., Scaling Distributed Machine Learning with the Parameter Server (OSDI
    2014), sec. 3.

    >>> float(parameter_server(8e9, 8, 1e9, 0.0)), float(parameter_server(8e9, 8, 1e9, 0.0, 8))
    (56.0, 14.0)
    """
    parts = np.multiply(1.0, servers)
    moved = (np.multiply(1.0, ranks) + parts - 2.0) / parts
    return _of_several(ranks, moved * size / bandwidth + 2.0 * np.multiply(1.0, latency))


def direct_one_shot(size: Real, ranks: Count, bandwidth: Real, latency: Real) -> Real:
    """Every rank reads all others' tensors and adds them up itself: (n - 1) B / W + alpha.

    >>> float(direct_one_shot(1e9, 8, 1e9, 0.5))
    7.5
    """
    steps = np.multiply(1.0, ranks) - 1.0
    return _of_several(ranks, steps * size / bandwidth + latency)


def direct_two_shot(size: Real, ranks: Count, bandwidth: Real, latency: Real) -> Real:
    """Every rank adds up its part of all, then reads the others': 2 (n - 1)/n B / W + 2 alpha.

    As many bytes as a ring and two messages, where every rank reaches every other at full speed.

    >>> float(direct_two_shot(8e9, 8, 1e9, 0.5))
    15.0
    """
    steps = np.multiply(1.0, ranks) - 1.0
    return _of_several(ranks, 2.0 * (steps / ranks * size / bandwidth + latency))


def in_network(size: Real, ranks: Count, bandwidth: Real, latency: Real) -> Real:
    """All-reduce in the switches (NVLS in NVLink's, SHARP in InfiniBand's): (1 + 1/n) B / W + 2 a.

    A rank asks the switch for its part of the sum and gives it back for all others: B (1 + 1/n)
    each way, against 2 (n - 1)/n B of a ring.

    Source: Klenk et al., An In-Network Architecture for Accelerating Shared-Memory Multiprocessor
    Collectives (ISCA 2020), sec. III.

    >>> float(in_network(8e9, 8, 1e9, 0.0))
    9.0
    """
    share = 1.0 + 1.0 / np.multiply(1.0, ranks)
    return _of_several(ranks, share * size / bandwidth + 2.0 * np.multiply(1.0, latency))


def hierarchical_all_reduce(
    size: Real, each: Count, nodes: Count, bandwidth: Real, network: Real, latency: Real, hop: Real
) -> Real:
    """Reduce-scatter in every node, all-reduce of the parts over its NICs at once, all-gather.

        2 (m-1)/m B / W + 2 (m-1) alpha  +  2 (N-1)/N (B/m) / w + 2 (N-1) hop

    ``network``: bytes/s of one rank's share of the NICs; the m parts of a node go over all of them.
    One after another; in pieces behind each other it is the longer of the two.

    >>> float(hierarchical_all_reduce(8e9, 8, 2, 1e9, 1e9, 0.0, 0.0))
    15.0
    """
    inside = 2.0 * ring_all_gather(size, each, bandwidth, latency)
    part = np.multiply(1.0, size) / each
    return inside + ring_all_reduce(part, nodes, network, hop)


def pipelined_broadcast(size: Real, ranks: Count, bandwidth: Real, latency: Real) -> Real:
    """Broadcast along a chain, in pieces: B / W + (n - 1) alpha.

    >>> float(pipelined_broadcast(1e9, 8, 1e9, 1.0))
    8.0
    """
    steps = np.multiply(1.0, ranks) - 1.0
    return _of_several(ranks, np.multiply(1.0, size) / bandwidth + steps * latency)


def tree_broadcast(size: Real, ranks: Count, bandwidth: Real, latency: Real) -> Real:
    """Broadcast by a binomial tree, whole: ceil(log2 n) (B / W + alpha).

    Source: Thakur, Rabenseifner, Gropp, IJHPCA 19 (2005), sec. 4.2.

    >>> float(tree_broadcast(1e9, 8, 1e9, 1.0))
    6.0
    """
    levels = np.ceil(np.log2(np.maximum(1, ranks)))
    return levels * (np.multiply(1.0, size) / bandwidth + latency)


def nic_share(
    nic: Real, nics: Count, members: Count, ranks_of_node: Count, oversubscription: Real = 1.0
) -> Real:
    """Bytes/s of a group with m members in a node whose NICs all groups use at once.

        nics · w · m / ranks of the node / oversubscription

    That is what ``hardware_profiles.cluster.links.groups.group_link`` gives each group: the
    bandwidth of its own members. ``oversubscription``: bandwidth below a switch over that above it.

    >>> float(nic_share(25e9, 8, 1, 8)), float(nic_share(25e9, 4, 8, 8, 2.0))
    (25000000000.0, 50000000000.0)
    """
    return np.multiply(1.0, nic) * nics * members / ranks_of_node / oversubscription
