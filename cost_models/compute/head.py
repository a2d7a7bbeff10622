"""Seconds of the output projection and the cross-entropy; symbols and units as in ``compute``."""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec.structs import replace

from cost_models.arrays import Count, Real
from cost_models.compute.layer import PassSeconds, linear_seconds, matrices_seconds
from cost_models.compute.rates import Rates
from cost_models.model.lora import projection_is_frozen
from cost_models.model.spec import ModelSpec
from hardware_profiles.software.trainer import SoftwareProfile

# A 16-bit matrix with an odd number of columns has rows that start at 2 bytes: its kernels load
# element by element. Source: Netflix Technology Blog, Scaling LLM post-training at Netflix
# (February 2026): such vocabularies triple the head's time; NVIDIA, Matrix Multiplication
# Background User's Guide, sec. 2.2: rows of a multiple of 16 bytes. On an A100 the 50257 columns of
# vTrain's GPT take 2.9 times as long as others (its rows without tensor parallelism).
ODD_COLUMNS_SLOWDOWN: Final = 3.0
# of the bytes that a cross-entropy moves for a 16-bit logit, in each pass: the cast to fp32, or
# back; fp32 logits are not cast
CAST_BYTES: Final = 6.0


def odd_columns(columns: Real, compute_bytes: float, rate: Rates) -> Real:
    """Slowdown of a GPU's matmuls by an odd number of columns: a factor.

    >>> gpu = Rates(1e12, 1e12, 0.0, False, units=108.0)
    >>> odd_columns(np.array([50257.0, 50304.0]), 2.0, gpu).tolist()
    [3.0, 1.0]
    """
    slow = (np.mod(columns, 2.0) == 1.0) & (compute_bytes == 2.0) & (rate.units > 0.0)
    return np.where(slow, ODD_COLUMNS_SLOWDOWN, 1.0)


def head_seconds(
    model: ModelSpec,
    tokens: Real,
    tensor_parallel: Count,
    compute_bytes: float,
    rate: Rates,
    software: SoftwareProfile,
) -> PassSeconds:
    """Seconds of output projection and cross-entropy: matmul, and bytes moved for each logit.

    An odd vocabulary is slow unless it is padded: both gradients read the projection's output. A
    head's other matrices (a masked language model's, OPT's projection) are whole on every rank.
    """
    if not model.head_multiply:
        zero = np.zeros_like(np.multiply(1.0, tokens))
        return PassSeconds(zero, zero, zero, zero)
    rate = rate.of_core
    outputs = np.multiply(1.0, model.vocab_size) / tensor_parallel
    inputs = model.head_multiply / model.vocab_size
    others = tuple(w for w in model.head if w.sharding != "vocab")
    projection = linear_seconds(tokens, inputs, outputs, compute_bytes, rate)
    if model.vocab_size % 2 and not software.loss.pads_vocabulary:
        projection = projection.times(odd_columns(outputs, compute_bytes, rate))
    if projection_is_frozen(model):
        projection = replace(projection, weights=0.0 * projection.weights)
    matmuls = projection + matrices_seconds(others, tokens, tensor_parallel, compute_bytes, rate)
    columns = model.vocab_size if software.loss.gathers_logits else outputs
    moved = tokens * columns / rate.memory
    casts = CAST_BYTES if compute_bytes >= 4.0 else 0.0
    zero = np.zeros_like(matmuls.forward)
    return PassSeconds(
        matmuls.forward + max(0.0, software.loss.forward_bytes - casts) * moved,
        matmuls.inputs + matmuls.weights + max(0.0, software.loss.backward_bytes - casts) * moved,
        zero,
        zero,
    )
