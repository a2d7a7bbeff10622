"""Exposed tensor-parallel communication: traffic that matmuls do not hide. Units: seconds.

Leaves out: matmuls that are slower because they are cut into chunks.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Real, among
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.plan.plan import PlanTable
from cost_models.plan.recompute import FULL
from hardware_profiles.software.trainer import SoftwareProfile


def tensor_seconds(
    traffic: Real, weights: Real, software: SoftwareProfile, table: PlanTable
) -> tuple[Real, Real]:
    """Exposed seconds of tensor-parallel traffic in a forward and in a backward pass.

    ``traffic``: seconds of a micro-batch, half of them in the forward pass; full recomputation
    repeats the forward's, and with sequence parallelism gathering inputs again is half as much.
    ``weights``: seconds of weight gradients, which hide the reduction of input gradients where
    ``overlap.tensor_reduction`` is set (or the second gathering and their scattering: Korthikanti
    et al., arXiv:2205.05198, sec. 4.2.2), unless the backward pass is split.
    """
    each = (1.0 - software.overlap.tensor_parallel) * traffic
    recomputes = table.recompute == FULL
    again = (
        0.0
        if software.activations.keeps_gathered_inputs
        else np.where(table.sequence_parallel, 0.5, 0.0)
    )
    forward = each / (np.where(recomputes, 3.0, 2.0) + again)
    backward = each - forward
    if software.overlap.chunked_tensor_traffic:
        chunks = 1.0 * table.tensor_parallel
        share = software.overlap.data_parallel_interference
        return (
            chunked_seconds(forward, weights, chunks, share),
            chunked_seconds(backward, 2.0 * weights, chunks, share),
        )
    if software.overlap.tensor_reduction:
        split = among(table.pipeline_schedule, SPLIT_CODES) & (table.pipeline_parallel > 1)
        backward = backward - np.where(split, 0.0, np.minimum(forward, weights))
    return forward, backward


def chunked_seconds(traffic: Real, matmuls: Real, chunks: Real, interference: float) -> Real:
    """Exposed seconds of collectives that run chunk by chunk during their matmuls.

    The first of t chunks is not hidden, the others are hidden for as long as the matmuls last; a
    hidden second costs ``interference`` seconds of computation. Source: Wang et al., Overlap
    communication with dependent computation via decomposition (ASPLOS 2023), sec. 3; Transformer
    Engine's user buffers.

    >>> float(chunked_seconds(8.0, 100.0, 8.0, 0.0))
    1.0
    """
    hidden = np.minimum((1.0 - 1.0 / chunks) * traffic, matmuls)
    return traffic - (1.0 - interference) * hidden
