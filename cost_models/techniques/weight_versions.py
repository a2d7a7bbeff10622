"""Pipelines without a flush: versions of the weights, stale gradients, their memory.

Symbols   p pipeline_parallel   r rank in the pipeline   m num_microbatches
          P parameters of a rank   c compute_bytes
Units     versions, updates, bytes. Every function broadcasts.

                     update after     versions on rank r    gradient is late by     bubble
    PipeDream        a micro-batch    p - r                 p - 1 - r updates       none
    PipeDream-2BW    m micro-batches  2                     1 update                none
    PipeDream-Flush  m micro-batches  1                     0                       (p - 1)/m

PipeDream-Flush is the schedule 1f1b (``cost_models.partition.schedules``). The tests count versions
and delays in the order of passes of 1f1b, and compare versions with the authors' runtime. Not
compared: the papers' measurements of memory and time.

Leaves out: steps that stale gradients cost or save: none of these formulas is about convergence.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Count, Real


def stashed_versions(pipeline_parallel: Count, rank: Count) -> Real:
    """Versions of its weights that a rank of PipeDream keeps: p - r, the newest included.

    A micro-batch's backward pass reads the weights of its forward pass, and p - r micro-batches are
    in flight. Source: Narayanan et al., PipeDream (SOSP 2019), sec. 3.3, "weight stashing"; their
    runtime has as many (msr-fiddle/pipedream, main_with_runtime.py: num_versions).

    >>> [int(stashed_versions(4, rank)) for rank in range(4)]
    [4, 3, 2, 1]
    """
    return np.subtract(pipeline_parallel, np.multiply(1.0, rank))


def stashed_delay(pipeline_parallel: Count, rank: Count) -> Real:
    """Updates between the weights that a gradient of PipeDream is of and those it changes.

        w(t + 1) = w(t) - nu grad f(w_1(t - p + 1), w_2(t - p + 2), ..., w_p(t))

    is p - 1 - r on rank r = 0 ... p - 1. Vertical sync: p - 1 on every rank. Source: Narayanan et
    al., PipeDream (SOSP 2019), sec. 3.3.

    >>> int(stashed_delay(4, 0)), int(stashed_delay(4, 3))
    (3, 0)
    """
    return np.subtract(pipeline_parallel, 1.0) - rank


def double_buffered_versions(pipeline_parallel: Count) -> Real:
    """Versions of PipeDream-2BW: 2 on every rank of a pipeline, if m >= p.

        W(t + 1) = W(t) - nu grad f(W(t - 1))

    Source: Narayanan et al., PipeDream-2BW (arXiv:2006.09503), sec. 3.1.

    >>> int(double_buffered_versions(8)), int(double_buffered_versions(1))
    (2, 1)
    """
    return np.where(np.greater(pipeline_parallel, 1), 2.0, 1.0)


def version_bytes(num_params: Real, compute_bytes: Real, versions: Real) -> Real:
    """Bytes of the versions beyond the newest one: (versions - 1) c P.

    Of PipeDream on equal stages of a model with N parameters, p (p - 1)/2 c N / p on all ranks.

    >>> float(version_bytes(1e9, 2.0, 4.0))
    6000000000.0
    """
    return np.multiply(1.0, num_params) * compute_bytes * (np.multiply(1.0, versions) - 1.0)


def flush_bubble(pipeline_parallel: Count, num_microbatches: Count) -> Real:
    """Time of a flush over that of the passes: (p - 1)/m, which pipelines without a flush save.

    Source: Narayanan et al. (arXiv:2104.04473), sec. 2.2.1.

    >>> float(flush_bubble(4, 8))
    0.375
    """
    return np.subtract(pipeline_parallel, 1.0) / num_microbatches
