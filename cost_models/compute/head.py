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

# of the bytes that a cross-entropy moves for a 16-bit logit, in each pass: the cast to fp32, or
# back; fp32 logits are not cast
CAST_BYTES: Final = 6.0


def head_seconds(
    model: ModelSpec,
    tokens: Real,
    tensor_parallel: Count,
    compute_bytes: float,
    rate: Rates,
    software: SoftwareProfile,
) -> PassSeconds:
    """Seconds of output projection and cross-entropy: matmul, and bytes moved for each logit.

    A vocabulary that is no multiple of 8 is slow unless it is padded (``matmul.misalignment``). A
    head's other matrices (a masked language model's, OPT's projection) are whole on every rank. A
    loss of checkpointed chunks multiplies again in the backward pass; left out: what a chunk moves
    of the whole projection (its copies, its gradient).
    """
    if not model.head_multiply:
        zero = np.zeros_like(np.multiply(1.0, tokens))
        return PassSeconds(zero, zero, zero, zero)
    rate = rate.of_core
    outputs = np.multiply(1.0, model.vocab_size) / tensor_parallel
    inputs = model.head_multiply / model.vocab_size
    others = tuple(w for w in model.head if w.sharding != "vocab")
    padded = replace(rate, pads_matmuls=software.loss.pads_vocabulary)
    projection = linear_seconds(tokens, inputs, outputs, compute_bytes, padded)
    if projection_is_frozen(model):
        projection = replace(projection, weights=0.0 * projection.weights)
    matmuls = projection + matrices_seconds(others, tokens, tensor_parallel, compute_bytes, rate)
    columns = model.vocab_size if software.loss.gathers_logits else outputs
    moved = tokens * columns / rate.memory
    casts = CAST_BYTES if compute_bytes >= 4.0 else 0.0
    zero = np.zeros_like(matmuls.forward)
    again = projection.forward if software.loss.repeats_chunks else 0.0
    backward = again + matmuls.inputs + matmuls.weights
    return PassSeconds(
        matmuls.forward + max(0.0, software.loss.forward_bytes - casts) * moved,
        backward + max(0.0, software.loss.backward_bytes - casts) * moved,
        zero,
        zero,
    )
