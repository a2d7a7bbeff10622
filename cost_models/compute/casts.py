"""Bytes moved by casts around 16-bit matrices where hidden states are in fp32.

Symbols   c compute_bytes   in, out elements a token of a matrix's input and output
Units     bytes a token, or an element of a weight.

``prepare_model_for_kbit_training`` of peft casts all weights that are not quantised to fp32 (norms,
embedding), so that hidden states are in fp32 too, while bitsandbytes multiplies in 16 bits: each
matrix casts its input down and its output back up (bitsandbytes nn/modules.py,
Linear4bit.forward). fms-acceleration's own loader warns of it (framework_plugin_bnb.py: "extraneous
dtype casting").

Under ``torch.autocast`` a matrix gives 16 bits, which attention, rotary embeddings and activations
go on with; what casts is a matrix that reads a norm (norms give fp32), each for itself, and every
fp32 weight (torch, aten/src/ATen/autocast_mode.cpp: cached_cast keeps copies of weights alone).
"""

from __future__ import annotations

from cost_models.arrays import Count, Real
from cost_models.model.spec import LayerKind
from cost_models.partition.tensor_sharding import cut_ranks

FP32_BYTES = 4.0


def cast_bytes_per_token(kind: LayerKind, compute_bytes: float, tensor_parallel: Count) -> Real:
    """Bytes a token of a pass: (c + 4) (in + out) of every matrix; k times for an expert's."""
    return _cast_bytes(kind, compute_bytes, tensor_parallel, autocast=False)


def autocast_bytes_per_token(kind: LayerKind, compute_bytes: float, tensor_parallel: Count) -> Real:
    """Bytes a token of a pass under autocast: (c + 4) in of every matrix that reads a norm."""
    return _cast_bytes(kind, compute_bytes, tensor_parallel, autocast=True)


def _cast_bytes(
    kind: LayerKind, compute_bytes: float, tensor_parallel: Count, *, autocast: bool
) -> Real:
    elements: Real = 0.0
    for weight in kind.weights:
        if not weight.is_matrix or weight.is_adapter or len(weight.shape) < 2:
            continue
        times = kind.feed_forward.experts_per_token if weight.role == "expert" else 1.0
        size = weight.features[0] if autocast else sum(weight.features)
        if autocast and weight.sharding == "row":
            continue
        ranks = 1.0 if autocast else cut_ranks(weight, tensor_parallel)
        elements = elements + times * size / ranks
    return (compute_bytes + FP32_BYTES) * elements
