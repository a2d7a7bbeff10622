"""Share of a run's time that is progress: checkpoints, failures, and the best interval.

Symbols   M seconds between failures of the whole job   n accelerators
          d seconds that training stops for a checkpoint   W seconds until it is on the disk
          R seconds from a failure to the first new step   t seconds of training between checkpoints
Units     seconds, bytes; every function broadcasts.

Failures are a Poisson process. All steps since the last complete checkpoint are lost. Leaves out:
failures that come in bursts, slow steps before a failure, and waits in a scheduler's queue.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Count, Real

HOUR = 3600.0


def seconds_between_failures(hours_of_one: Real, num_gpus: Count) -> Real:
    """Seconds between failures of a job over n accelerators, any of which stops it: hours / n.

    Source: the failures of independent parts add up (Poisson).

    >>> round(float(seconds_between_failures(50677.0, 16384)) / 3600, 2)
    3.09
    """
    return HOUR * np.multiply(1.0, hours_of_one) / num_gpus


def checkpoint_interval(stall: Real, between_failures: Real) -> Real:
    """Optimal seconds of training between checkpoints: Daly's higher-order form of Young's.

        sqrt(2 d M) (1 + sqrt(d / 2 M) / 3 + (d / 2 M) / 9) - d        d < 2 M
        M                                                              otherwise

    Source: Young, CACM 17 (1974), p. 530: sqrt(2 d M); Daly, Future Generation Computer Systems
    22 (2006), whose figure 3 this is, in minutes:

    >>> round(float(checkpoint_interval(5.0, 24 * 60.0)))
    117
    """
    stall, between = np.multiply(1.0, stall), np.multiply(1.0, between_failures)
    share = stall / (2.0 * between)
    series = np.sqrt(2.0 * stall * between) * (1.0 + np.sqrt(share) / 3.0 + share / 9.0) - stall
    return np.where(stall < 2.0 * between, series, between)


def goodput(interval: Real, stall: Real, between_failures: Real, restart: Real) -> Real:
    """Share of the wall-clock time that is progress: t / (M e^(R/M) (e^((t+d)/M) - 1)).

    Source: Daly (2006), the complete cost function: a run of Ts seconds is expected to take
    M e^(R/M) (e^((t+d)/M) - 1) Ts / t.

    >>> float(goodput(3600.0, 0.0, 1e12, 600.0)) > 0.999
    True
    """
    between = np.multiply(1.0, between_failures)
    at_risk = (np.multiply(1.0, interval) + stall) / between
    # e^-x / (1 - e^-x) stands for 1 / (e^x - 1), which overflows
    share: Real = (
        np.multiply(1.0, interval)
        / between
        * np.exp(-restart / between - at_risk)
        / -np.expm1(-at_risk)
    )
    return share


def checkpoint_bytes(parameters: Real, master_bytes: float, state_bytes: float) -> Real:
    """Bytes of a whole checkpoint: weights in master precision and the optimizer's states.

    >>> float(checkpoint_bytes(8.03e9, 4.0, 8.0)) / 1e9
    96.36
    """
    return (master_bytes + state_bytes) * np.multiply(1.0, parameters)


def checkpoint_stall(size: Real, writers: Count, host_bandwidth: Real) -> Real:
    """Seconds that training stops while each writer copies its part to its host.

    Writing from the host to the disk overlaps the next steps (the bundled executor, torch's
    ``async_save``).
    """
    return np.multiply(1.0, size) / writers / host_bandwidth


def write_seconds(size: Real, nodes: Count, storage: Real) -> Real:
    """Seconds until a checkpoint is on the disk: bytes / (nodes x bandwidth of a node)."""
    return np.multiply(1.0, size) / (np.multiply(1.0, nodes) * storage)
