"""Seconds that a pass waits for the host around adapters that FSDP shards one by one.

Symbols   u group_operators · operator_seconds: the host's work around one group of weights
          d device seconds of an adapter's second matrix, scaling and addition included
Units     seconds; every function broadcasts over plan columns.

peft wraps each trained leaf as a group of its own (``fsdp_auto_wrap_policy``), two a matrix. The
rate limiter of FSDP1 (``limit_all_gathers``, the default since torch 2.1, pytorch/pytorch#104900)
blocks the host until the group before the last one is freed: it is at most one group ahead, and
after a short group the device idles. The frozen matrix hides the host's work for an adapter's first
matrix; only the device seconds of the second matrix hide it for the next group:

    wait of a pass = sum over adapters of host_wait(u, d)

Leaves out: first matrices of adapters of small frozen ones (keys and values of few heads).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.compute.adapters import adapter_bytes_per_token
from cost_models.compute.casts import FP32_BYTES
from cost_models.compute.kernel_launch import host_wait
from cost_models.compute.layer import matrices_seconds
from cost_models.compute.rates import Rates
from cost_models.model.adapter_methods import SECOND
from cost_models.model.spec import LayerKind
from hardware_profiles.software.trainer import SoftwareProfile


def adapter_wait(
    kind: LayerKind,
    tokens: Real,
    tensor_parallel: Count,
    compute_bytes: float,
    rate: Rates,
    software: SoftwareProfile,
) -> Real:
    """Seconds that a pass through one layer waits for the host around its adapters."""
    total: Real = np.zeros_like(np.multiply(1.0, tokens))
    starting = software.host.group_operators * rate.operator
    for weight in kind.weights:
        if not (weight.is_adapter and weight.name.endswith(SECOND)):
            continue
        alone = replace(kind, weights=(weight,))
        moved, _ = adapter_bytes_per_token(alone, compute_bytes, tensor_parallel, software, tokens)
        product = matrices_seconds(
            (weight,),
            tokens,
            tensor_parallel,
            compute_bytes,
            rate,
            fp32_adapters=software.adapters.in_fp32 and compute_bytes < FP32_BYTES,
        )
        device = product.forward + moved * tokens / rate.memory
        total = total + host_wait(starting, device, rate)
    return total
