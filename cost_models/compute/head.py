"""Seconds of the output projection and the cross-entropy; symbols and units as in ``compute``."""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec.structs import replace

from cost_models.arrays import Count, Real
from cost_models.compute.casts import FP32_BYTES
from cost_models.compute.layer import PassSeconds
from cost_models.compute.matrices import Matmuls, linear_seconds, matrices_seconds
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
    loss of checkpointed chunks multiplies again in the backward pass; left out: what such a chunk
    moves of the whole projection (its copies, its gradient). Liger's: ``_chunk_bytes``. Of the
    tokens, ``loss.predicted_share`` reach the head; left out: gathering them.
    """
    tokens = software.loss.predicted_share * tokens
    if not model.head_multiply:
        zero = np.zeros_like(np.multiply(1.0, tokens))
        return PassSeconds(zero, zero, zero, zero)
    rate = rate.of_core
    outputs = np.multiply(1.0, model.vocab_size) / tensor_parallel
    inputs = model.head_multiply / model.vocab_size
    others = tuple(w for w in model.head if w.sharding != "vocab")
    padded = replace(rate, pads_matmuls=software.loss.pads_vocabulary)
    chunk, chunks = _chunks(model, tokens, software)
    one = linear_seconds(chunk, inputs, outputs, compute_bytes, padded)
    projection = Matmuls(chunks * one.forward, chunks * one.inputs, chunks * one.weights)
    if projection_is_frozen(model):
        projection = replace(projection, weights=0.0 * projection.weights)
    matmuls = projection + matrices_seconds(others, tokens, tensor_parallel, compute_bytes, rate)
    columns = model.vocab_size if software.loss.gathers_logits else outputs
    moved = tokens * columns / rate.memory
    casts = CAST_BYTES if compute_bytes >= 4.0 else 0.0
    zero = np.zeros_like(matmuls.forward)
    repeated = _chunk_bytes(model, compute_bytes, software) * inputs * outputs / rate.memory
    again = projection.forward if software.loss.repeats_chunks else 0.0
    backward = again + matmuls.inputs + matmuls.weights
    return PassSeconds(
        matmuls.forward
        + max(0.0, software.loss.forward_bytes - casts) * moved
        + np.where(chunks > 1.0, chunks * repeated, 0.0),
        backward + max(0.0, software.loss.backward_bytes - casts) * moved,
        zero,
        zero,
    )


def _chunks(model: ModelSpec, tokens: Real, software: SoftwareProfile) -> tuple[Real, Real]:
    """Tokens of a chunk of Liger's loss, and chunks: 2^ceil(log2(tokens / ceil(V / h)))."""
    whole = np.multiply(1.0, tokens)
    if not software.loss.hidden_sized_chunks:
        return whole, np.ones_like(whole)
    shares = np.ceil(model.vocab_size / model.hidden_size)
    chunk = np.minimum(whole, 2.0 ** np.ceil(np.log2(np.ceil(whole / shares))))
    return chunk, np.ceil(whole / chunk)


def _chunk_bytes(model: ModelSpec, compute_bytes: float, software: SoftwareProfile) -> float:
    """Bytes that a chunk moves for each element of the projection, besides its three matmuls.

        c                       the gradient to which it adds, of a trained projection
        w + (w - c) + (w + c)   under autocast: that gradient in w = 4 bytes, read and written, and
                                a cast of the transposed weight: autocast caches no copy of a view

    Source: Liger Kernel, fused_linear_cross_entropy_forward (addmm into grad_weight; weight.t());
    torch 2.13, aten/src/ATen/autocast_mode.cpp (cached_cast).
    """
    if projection_is_frozen(model):
        return 0.0
    if software.precision.autocasts_weights and compute_bytes < FP32_BYTES:
        return 3.0 * FP32_BYTES
    return compute_bytes
