"""Parameter servers, compared with the theorem of BytePS and a simulation of workers and links."""

import heapq

import numpy as np
import pytest

from cost_models.communication.ring_and_tree import ring_all_reduce
from cost_models.techniques.parameter_server import (
    asynchronous_seconds,
    balanced_seconds,
    colocated_bytes,
    expected_delay,
    server_bytes,
    server_seconds,
    worker_bytes,
)


def simulated(
    workers: int, servers: int, compute: float, transfer: float, rounds: int = 400
) -> tuple[float, float]:
    """Seconds per n gradients, and mean delay in updates, of workers that do not wait.

    Every server's link takes one gradient's share at a time; the pull of weights follows the push
    part by part, on the other direction of the links.
    """
    ready = [(compute * (1 + number / workers), number, 0) for number in range(workers)]
    heapq.heapify(ready)
    free, updates, delays, times = 0.0, 0, [], []
    while updates < rounds * workers:
        now, number, read = heapq.heappop(ready)
        begin = max(now, free)
        free = begin + transfer / servers  # all servers take their share at once
        done = begin + transfer  # the worker's own link
        delays.append(updates - read)
        updates += 1
        times.append(done)
        heapq.heappush(ready, (done + compute, number, updates))
    half = len(times) // 2
    return (times[-1] - times[half]) / (len(times) - 1 - half) * workers, float(
        np.mean(delays[half:])
    )


@pytest.mark.parametrize(("workers", "servers"), [(4, 4), (8, 2), (16, 4), (16, 1)])
@pytest.mark.parametrize("compute", [0.5, 4.0, 20.0])
def test_asynchronous_workers_are_limited_by_themselves_or_by_the_servers(
    workers: int, servers: int, compute: float
) -> None:
    seconds, delay = simulated(workers, servers, compute, 1.0)
    assert seconds == pytest.approx(
        float(asynchronous_seconds(compute, 1.0, workers, servers, 1.0)), rel=0.02
    )
    assert delay == pytest.approx(float(expected_delay(workers)), rel=0.05)


@pytest.mark.parametrize(("n", "k"), [(2, 1), (8, 4), (16, 16), (64, 8)])
def test_seconds_are_those_of_bytepss_table(n: int, k: int) -> None:
    """Jiang et al. (OSDI 2020), table 1: seconds of a step's communication, of M bytes over B."""
    size, link = 1.3e9, 12.5e9
    assert colocated_bytes(size, n) / link == pytest.approx(2 * (n - 1) * size / (n * link))
    apart = max(size / link, n * size / (k * link))
    assert server_seconds(size, n, k, link) == pytest.approx(apart)
    assert balanced_seconds(size, n, k, link) <= min(apart, colocated_bytes(size, n) / link) + 1e-12


def test_the_ends_of_the_theorem_are_an_all_reduce_and_servers_apart() -> None:
    n = np.array([2, 4, 16, 256])
    assert balanced_seconds(1e9, n, 0, 1e9) == pytest.approx(ring_all_reduce(1e9, n, 1e9, 0.0))
    assert balanced_seconds(1e9, n, 0, 1e9) == pytest.approx(colocated_bytes(1e9, n) / 1e9)
    assert balanced_seconds(1e9, n, n, 1e9) == pytest.approx(server_seconds(1e9, n, n, 1e9))


def test_balanced_shares_are_those_of_byteps() -> None:
    """CPU machines serve 2 (n - 1), GPU machines n - k parts of n^2 + k n - 2 k (theorem 1)."""
    n, k = 8, 4
    parts = n * n + k * n - 2 * k
    extra, own = 2 * (n - 1) / parts, (n - k) / parts
    assert k * extra + n * own == pytest.approx(1.0)  # all weights have a server
    received_extra = n * extra  # gradients of every worker
    received_own = (n - 1) * own + (1 - own)  # of the others, and the weights served elsewhere
    seconds = float(balanced_seconds(1.0, n, k, 1.0))
    assert received_extra == pytest.approx(seconds)
    assert received_own == pytest.approx(seconds)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_balanced_is_never_slower_than_either(k: int) -> None:
    seconds = balanced_seconds(1.0, 8, k, 1.0)
    assert seconds <= balanced_seconds(1.0, 8, 0, 1.0)
    assert seconds <= server_seconds(1.0, 8, k, 1.0) + 1e-12


def test_traffic_of_servers_and_workers() -> None:
    assert server_bytes(2.0, 8, np.array([1, 2, 8])).tolist() == [16.0, 8.0, 2.0]
    assert worker_bytes(2.0) == 2.0
    assert server_seconds(2.0, 8, 2, 1.0) == 8.0
    assert balanced_seconds(1.0, 1, 0, 1.0) == 0.0
