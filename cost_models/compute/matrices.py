"""Device seconds of weight matrices in training: three matmuls each.

Symbols   t tensor_parallel   k experts of a token
Units     seconds; every function broadcasts over plan columns.

Source: ``matmul``, which prices each product.
"""

from __future__ import annotations

from dataclasses import replace as without

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from cost_models.arrays import Count, Real
from cost_models.compute.casts import FP32_BYTES
from cost_models.compute.matmul import matmul_seconds
from cost_models.compute.rates import Rates
from cost_models.model.adapter_methods import is_composed
from cost_models.model.spec import Weight


class Matmuls(Struct, frozen=True):
    """Seconds of matrices: forward, gradients of inputs, gradients of weights."""

    forward: Real
    inputs: Real
    weights: Real

    def __add__(self, other: Matmuls) -> Matmuls:
        return Matmuls(
            self.forward + other.forward, self.inputs + other.inputs, self.weights + other.weights
        )


def linear_seconds(
    tokens: Real,
    inputs: Real,
    outputs: Real,
    compute_bytes: float,
    rate: Rates,
    *,
    batch: Real = 1.0,
) -> Matmuls:
    """Seconds of one matrix: y = x W, dx = dy W', dW = x' dy; each sums over another dimension.

    ``batch``: equal matrices in one kernel (experts). Rows in memory are inputs or outputs of a
    token, of a weight too.
    """

    def one(rows: Real, summed: Real, columns: Real) -> Real:
        sizes = rows, summed, columns, compute_bytes, rate
        return matmul_seconds(*sizes, batch=batch, in_memory=(inputs, outputs))

    return Matmuls(
        one(tokens, inputs, outputs), one(tokens, outputs, inputs), one(inputs, tokens, outputs)
    )


def _weight_seconds(
    weight: Weight,
    tokens: Real,
    tensor_parallel: Count,
    compute_bytes: float,
    rate: Rates,
    *,
    batch: Real = 1.0,
) -> Matmuls:
    inputs, outputs = (np.multiply(1.0, length) for length in weight.features)
    if weight.sharding == "row":
        inputs = inputs / tensor_parallel
    elif weight.sharding != "replicate":
        outputs = outputs / tensor_parallel
    seconds = linear_seconds(tokens, inputs, outputs, compute_bytes, rate, batch=batch)
    return replace(seconds, weights=0.0 * seconds.weights) if weight.frozen else seconds


def matrices_seconds(
    weights: tuple[Weight, ...],
    tokens: Real,
    tensor_parallel: Count,
    compute_bytes: float,
    rate: Rates,
    *,
    experts_per_token: Real = 0.0,
    expert_tensor: Count | None = None,
    expert_parallel: Count = 1,
    fp32_adapters: bool = False,
    source_tokens: Real | None = None,
) -> Matmuls:
    """Seconds of all matrices of a block; an expert receives m k / E tokens (balanced routing).

    A rank has E / ep of E experts, to which ep ranks send tokens; where each tensor-parallel rank
    has whole experts (``expert_tensor`` 1), it sends its share of the tokens. Frozen weights have
    no weight gradients. ``source_tokens``: those that cross-attention reads; None: ``tokens``.
    """
    cut = tensor_parallel if expert_tensor is None else expert_tensor
    zero = np.zeros_like(np.multiply(1.0, tokens))

    def seconds(weight: Weight) -> Matmuls:
        rows = source_tokens if weight.reads_source and source_tokens is not None else tokens
        if weight.is_adapter and fp32_adapters:
            return _weight_seconds(weight, rows, tensor_parallel, FP32_BYTES, rate.of_single)
        if weight.role == "linear":
            return _weight_seconds(weight, rows, tensor_parallel, compute_bytes, rate)
        experts = weight.shape[0] / np.multiply(1.0, expert_parallel)
        routed = tokens * np.multiply(1.0, cut) / tensor_parallel
        share = routed * experts_per_token / experts
        return _weight_seconds(weight, share, cut, compute_bytes, rate, batch=experts)

    total = Matmuls(zero, zero, zero)
    known: dict[Weight, Matmuls] = {}  # such as keys and values: equal but for their names
    for weight in weights:
        if is_composed(weight):  # an adapter's matrix is added to it, which has a gradient
            total += seconds(without(weight, is_adapter=True, frozen=False))
        if weight.is_matrix:
            unnamed = without(weight, name="", part="other")
            known[unnamed] = known.get(unnamed) or seconds(unnamed)
            total += known[unnamed]
    return total
