"""Adapters: bytes that their elementwise operations move, and waits where FSDP shards each alone.

Symbols   c compute_bytes
          u group_operators · operator_seconds: the host's work around one group of weights
          d device seconds since the last group: of an adapter's second matrix, scaling and addition
            included, or of its first one and the frozen matrix before it
Units     bytes a token; seconds. Every function broadcasts over plan columns.

Source: huggingface/peft, src/peft/utils/other.py (``fsdp_auto_wrap_policy``); torch 2.13,
torch/distributed/fsdp/_limiter_utils.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.compute.casts import FP32_BYTES
from cost_models.compute.kernel_launch import host_wait
from cost_models.compute.matrices import matrices_seconds
from cost_models.compute.rates import Rates
from cost_models.model.adapter_methods import FIRST, METHODS, SECOND
from cost_models.model.lora import adapter_names, first_adapters
from cost_models.model.parameters import shard_numel
from cost_models.model.spec import LayerKind, Weight
from cost_models.partition.tensor_sharding import cut_ranks
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
        # rank x inputs, or outputs x rank
        elements = max(weight.shape) / cut_ranks(weight, tensor_parallel)
        forward = forward + (element * ahead + cast) * elements
        backward = backward + (element * back + cast) * elements
    for weight in (w for w in kind.weights if w.adapter):
        method, outputs = METHODS[weight.adapter], weight.features[1]
        over: Real = np.multiply(1.0, tensor_parallel if weight.sharding == "column" else 1)
        forward = forward + element * method.accesses * outputs / over
        backward = backward + element * method.gradient_accesses * outputs / over
        made = element * shard_numel(weight, tensor_parallel) / tokens
        forward, backward = forward + method.making[0] * made, backward + method.making[1] * made
    return forward, backward


def adapter_wait(
    kind: LayerKind,
    tokens: Real,
    tensor_parallel: Count,
    compute_bytes: float,
    rate: Rates,
    software: SoftwareProfile,
) -> Real:
    """Seconds that a pass through one layer waits for the host around adapters sharded one by one.

        sum over matrices of adapters of host_wait(u, d)

    peft wraps each trained leaf as a group of its own (``fsdp_auto_wrap_policy``), two a matrix.
    The rate limiter of FSDP1 (``limit_all_gathers``, the default since torch 2.1,
    pytorch/pytorch#104900) blocks the host until the group before the last one is freed: it is at
    most one group ahead, and after a short group the device idles. The frozen matrix hides the
    host's work for an adapter's first matrix, if it is large; only the device seconds of the second
    matrix hide it for the next group.

    Leaves out: dropout of adapters.
    """
    total: Real = np.zeros_like(np.multiply(1.0, tokens))
    starting = software.host.group_operators * rate.operator
    adapted = {adapter_names(weight.name)[0]: weight for weight in kind.weights}
    for weight in kind.weights:
        moved: Real = 0.0
        run: tuple[Weight, ...] = (weight,)
        if weight.name.endswith(FIRST):
            run = (adapted[weight.name], weight)
        elif weight.name.endswith(SECOND):
            alone = replace(kind, weights=run)
            moved, _ = adapter_bytes_per_token(
                alone, compute_bytes, tensor_parallel, software, tokens
            )
        else:
            continue
        product = matrices_seconds(
            run,
            kind.rows_of(weight, tokens),
            tensor_parallel,
            compute_bytes,
            rate,
            fp32_adapters=software.adapters.in_fp32 and compute_bytes < FP32_BYTES,
        )
        device = product.forward + moved * tokens / rate.memory
        total = total + host_wait(starting, device, rate)
    return total
