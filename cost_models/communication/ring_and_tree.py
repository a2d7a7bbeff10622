"""Seconds of one collective by the alpha-beta model: ring, tree, pairwise exchange, message.

Symbols   n ranks in the group   B bytes of the full tensor
          beta bandwidth [bytes/s, one way, per rank]
          alpha latency [s per message]
Units     seconds; every function broadcasts. n = 1 costs nothing.

Leaves out: other traffic on the same links, the start of a kernel, and the flags of a protocol
(``nccl_protocols``).
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Count, Real

# Constant seconds of an NCCL collective, independent of bytes and hops: fitted on the all-reduces
# of at least 16 MB over 2, 4 and 8 A100 of one node (VIA-Research/vTrain@f8dda84: trace/a100), with
# hops of 3.4 us
COLLECTIVE_START = 38e-6


def ring_all_gather(size: Real, ranks: Count, bandwidth: Real, latency: Real) -> Real:
    """All-gather (or reduce-scatter) by a ring: (n - 1)/n B / beta + (n - 1) alpha.

    Source: Thakur, Rabenseifner, Gropp, IJHPCA 19 (2005), sec. 4.1; Patarasuk and Yuan, JPDC 69
    (2009).

    >>> float(ring_all_gather(8e9, 8, 1e9, 0.0))
    7.0
    """
    steps = np.subtract(ranks, 1.0)
    return steps / ranks * size / bandwidth + steps * latency


ring_reduce_scatter = ring_all_gather


def ring_all_reduce(size: Real, ranks: Count, bandwidth: Real, latency: Real) -> Real:
    """All-reduce by a ring, reduce-scatter then all-gather: 2 (n - 1)/n B / beta + 2 (n - 1) alpha.

    Source: Patarasuk and Yuan, JPDC 69 (2009), sec. 4.

    >>> float(ring_all_reduce(4e9, 4, 1e9, 0.0))
    6.0
    """
    return 2.0 * ring_all_gather(size, ranks, bandwidth, latency)


def tree_all_reduce(size: Real, ranks: Count, bandwidth: Real, latency: Real) -> Real:
    """All-reduce by two complementary binary trees: 2 B / beta + 2 log2(n) alpha.

    Source: Sanders, Speck, Traeff, Parallel Computing 35 (2009); NCCL since 2.4.

    >>> float(tree_all_reduce(1e9, 8, 1e9, 1.0))
    8.0
    """
    levels = np.ceil(np.log2(np.maximum(1, ranks)))
    moved = np.where(np.greater(ranks, 1), 2.0 * size / bandwidth, 0.0)
    return moved + 2.0 * levels * latency


def all_reduce(
    size: Real, ranks: Count, bandwidth: Real, latency: Real, hop: Real | None = None
) -> Real:
    """All-reduce by the faster of ring and tree, as libraries choose by size.

    ``hop``: the mean latency of a ring's hops, if most of them are within a node.
    """
    return np.minimum(
        ring_all_reduce(size, ranks, bandwidth, latency if hop is None else hop),
        tree_all_reduce(size, ranks, bandwidth, latency),
    )


def pairwise_all_to_all(size: Real, ranks: Count, bandwidth: Real, latency: Real) -> Real:
    """All-to-all by messages to each rank in turn: (n - 1)/n B / beta + (n - 1) alpha.

    B is one rank's data for all ranks, itself included. Source: Thakur, Rabenseifner, Gropp, IJHPCA
    19 (2005), sec. 4.4, pairwise exchange.

    >>> float(pairwise_all_to_all(8e9, 8, 1e9, 0.0))
    7.0
    """
    return ring_all_gather(size, ranks, bandwidth, latency)


def send(size: Real, bandwidth: Real, latency: Real) -> Real:
    """One message to one neighbour: B / beta + alpha."""
    return size / np.multiply(1.0, bandwidth) + latency


def received_bytes(kind: str, size: Real, ranks: Count) -> Real:
    """Bytes that a rank receives in collectives of one kind, by ring or pairwise exchange.

        all_reduce                              2 (n - 1)/n B
        all_gather, reduce_scatter, all_to_all  (n - 1)/n B
        send                                    B

    Source: Patarasuk and Yuan, JPDC 69 (2009), theorem 1: no all-reduce receives less.

    >>> float(received_bytes("all_reduce", 4e9, 4)), float(received_bytes("send", 4e9, 2))
    (6000000000.0, 4000000000.0)
    """
    if kind == "send":
        return np.multiply(1.0, size)
    share = np.subtract(ranks, 1.0) / ranks
    return (2.0 if kind == "all_reduce" else 1.0) * share * size
