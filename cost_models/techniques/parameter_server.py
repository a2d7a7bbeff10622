"""Parameter servers: traffic of servers and workers, asynchronous steps, delay.

Symbols   n workers   k servers   M bytes of the weights, and of a gradient
          beta bandwidth of a machine [bytes/s, one way; both ways at once]
          t seconds of a worker's computation
Units     bytes, seconds. Every function broadcasts.

Workers pull M bytes of weights and push M bytes of gradients a step; the servers share the weights
evenly. Machines with workers and servers of their own are "apart"; a server on every worker's
machine is "colocated", and costs what a ring all-reduce costs.

Leaves out: latency of messages, and the updates that the servers compute.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Count, Real


def worker_bytes(size: Real) -> Real:
    """Bytes that a worker receives in a step: the weights, M. It sends as many.

    Source: Li et al., Parameter Server (OSDI 2014): push and pull.

    >>> float(worker_bytes(1e9))
    1000000000.0
    """
    return np.multiply(1.0, size)


def server_bytes(size: Real, workers: Count, servers: Count) -> Real:
    """Bytes that a server apart from the workers receives in a step: n M / k. It sends as many.

    Source: Li et al., Parameter Server (OSDI 2014); Jiang et al., BytePS (OSDI 2020).

    >>> float(server_bytes(1e9, 16, 4))
    4000000000.0
    """
    return np.multiply(1.0, size) * workers / servers


def colocated_bytes(size: Real, workers: Count) -> Real:
    """Bytes that a machine with a worker and 1/n of the weights receives: 2 (n - 1)/n M.

    Gradients of its weights from n - 1 others, and their weights. As a ring all-reduce. Source:
    Jiang et al., BytePS (OSDI 2020).

    >>> float(colocated_bytes(1e9, 4))
    1500000000.0
    """
    n = np.multiply(1.0, workers)
    return 2.0 * (n - 1.0) / n * size


def server_seconds(size: Real, workers: Count, servers: Count, bandwidth: Real) -> Real:
    """Seconds of push and pull, one behind the other on full-duplex links: max(1, n / k) M / beta.

    The servers' links limit while k < n. Source: Jiang et al., BytePS (OSDI 2020).

    >>> float(server_seconds(1e9, 16, 4, 1e9)), float(server_seconds(1e9, 4, 4, 1e9))
    (4.0, 1.0)
    """
    share = np.maximum(1.0, np.divide(workers, np.multiply(1.0, servers)))
    return share * size / bandwidth


def balanced_seconds(size: Real, workers: Count, servers: Count, bandwidth: Real) -> Real:
    """Seconds with k extra machines and servers on the workers too, shares of the weights balanced.

        2 n (n - 1) / (n^2 + k n - 2 k) M / beta        0 <= k <= n

    The least possible: an all-reduce at k = 0, servers apart at k = n. Source: Jiang et al., BytePS
    (OSDI 2020), theorem 1.

    >>> float(balanced_seconds(1.0, 4, 0, 1.0)), float(balanced_seconds(1.0, 4, 4, 1.0))
    (1.5, 1.0)
    """
    n, k = np.multiply(1.0, workers), np.multiply(1.0, servers)
    pairs = n * n + k * n - 2.0 * k
    return np.where(n > 1.0, 2.0 * n * (n - 1.0) / np.where(n > 1.0, pairs, 1.0), 0.0) * (
        np.multiply(1.0, size) / bandwidth
    )


def asynchronous_seconds(
    compute: Real, size: Real, workers: Count, servers: Count, bandwidth: Real
) -> Real:
    """Seconds in which the servers take n gradients of workers that do not wait.

        max(t + M / beta, n M / (k beta))

    A worker computes, then pushes; its pull follows part by part. The servers take at most k beta /
    M gradients a second. Derived here; compared with a simulation of workers and links.

    Source: Li et al., Parameter Server (OSDI 2014), sec. 3.4 and 3.5, for the asynchronous push and
    pull.

    >>> float(asynchronous_seconds(1.0, 1e9, 16, 4, 1e9))
    4.0
    """
    alone = np.add(compute, np.divide(size, np.multiply(1.0, bandwidth)))
    return np.maximum(alone, server_bytes(size, workers, servers) / bandwidth)


def expected_delay(workers: Count) -> Real:
    """Updates between a worker's pull and its push, in the mean: n - 1.

    Exact where all workers push equally often: in each worker's round the others push n - 1 times.
    Source: Zhang et al., Staleness-aware Async-SGD (arXiv:1511.05950), about n; compared
    with a simulation.

    >>> float(expected_delay(16))
    15.0
    """
    return np.subtract(workers, 1.0)
