"""Bytes moved by the elementwise operations of adapters: dropout, scaling, addition, casts.

Symbols   c compute_bytes
Units     bytes a token.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.compute.casts import FP32_BYTES
from cost_models.model.adapter_methods import METHODS, SECOND
from cost_models.model.lora import features, first_adapters
from cost_models.model.parameters import shard_numel
from cost_models.model.spec import LayerKind
from cost_models.partition.tensor_sharding import shard_dim
from hardware_profiles.software.trainer import SoftwareProfile


def adapter_bytes_per_token(
    kind: LayerKind,
    compute_bytes: float,
    tensor_parallel: Count,
    software: SoftwareProfile,
    tokens: Real,
) -> tuple[Real, Real]:
    """Bytes a token that dropout, scaling and addition of adapters move, forward and backward.

    Adapters in fp32 move 4 bytes where others move c, and cast their input and their output (c + 4
    more at each end). A matrix that a pass makes of them is shared by its tokens. Leaves out:
    matmuls.
    """
    casts = software.adapters.in_fp32 and compute_bytes < FP32_BYTES
    element = FP32_BYTES if casts else compute_bytes
    cast = compute_bytes + FP32_BYTES if casts else 0.0
    adapters = software.adapters
    first = first_adapters(kind, of_fused_matrices=adapters.of_fused_matrices)
    second = [w for w in kind.weights if w.is_adapter and w.name.endswith(SECOND)]
    accesses = [(w, adapters.input_accesses, adapters.input_gradient_accesses) for w in first]
    accesses += [(w, adapters.output_accesses, adapters.output_gradient_accesses) for w in second]
    forward: Real = 0.0
    backward: Real = 0.0
    for weight, ahead, back in accesses:
        over: Real = np.multiply(1.0, tensor_parallel if shard_dim(weight) is not None else 1)
        elements = max(weight.shape) / over  # rank x inputs, or outputs x rank
        forward = forward + (element * ahead + cast) * elements
        backward = backward + (element * back + cast) * elements
    for weight in (w for w in kind.weights if w.adapter):
        method, outputs = METHODS[weight.adapter], features(weight)[1]
        over = np.multiply(1.0, tensor_parallel if weight.sharding == "column" else 1)
        forward = forward + element * method.accesses * outputs / over
        backward = backward + element * method.gradient_accesses * outputs / over
        made = element * shard_numel(weight, tensor_parallel) / tokens
        forward, backward = forward + method.making[0] * made, backward + method.making[1] * made
    return forward, backward
