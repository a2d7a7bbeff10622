"""Bytes moved by the elementwise operations of adapters: dropout, scaling, addition, casts.

Symbols   c compute_bytes
Units     bytes a token.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.compute.casts import FP32_BYTES
from cost_models.model.spec import LayerKind
from cost_models.partition.tensor_sharding import shard_dim
from hardware_profiles.software.trainer import SoftwareProfile


def adapter_bytes_per_token(
    kind: LayerKind, compute_bytes: float, tensor_parallel: Count, software: SoftwareProfile
) -> tuple[Real, Real]:
    """Bytes a token that dropout, scaling and addition of adapters move, forward and backward.

    Adapters in fp32 move 4 bytes where others move c, and cast their input and their output (c + 4
    more at each end). Leaves out: their matmuls.
    """
    casts = software.adapters.in_fp32 and compute_bytes < FP32_BYTES
    element = FP32_BYTES if casts else compute_bytes
    cast = compute_bytes + FP32_BYTES if casts else 0.0
    forward: Real = 0.0
    backward: Real = 0.0
    for weight in kind.weights:
        if not weight.is_adapter:
            continue
        over: Real = np.multiply(1.0, tensor_parallel if shard_dim(weight) is not None else 1)
        elements = max(weight.shape) / over
        if weight.shape[0] < weight.shape[1]:  # rank x inputs; the second is outputs x rank
            accesses, accesses_back = (
                software.adapters.input_accesses,
                software.adapters.input_gradient_accesses,
            )
        else:
            accesses = software.adapters.output_accesses
            accesses_back = software.adapters.output_gradient_accesses
        forward = forward + (element * accesses + cast) * elements
        backward = backward + (element * accesses_back + cast) * elements
    return forward, backward
