"""Logits at the loss: saved bytes, and copies that are alive.

Symbols   c compute_bytes   V vocab_size   t tensor_parallel
Units     bytes a token of one micro-batch.

Source: tensors alive in the losses of the trainers, traced (``python -m benchmarks.memory_truth``);
the trainers' code. Leaves out: labels and the loss itself, a few bytes a token.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from cost_models.arrays import FP32, Count, Real
from hardware_profiles.software.trainer import SoftwareProfile


class Logits(Struct, frozen=True):
    """Bytes a token of logits: saved for the backward pass, and alive at the loss."""

    kept: Real
    forward: Real
    backward: Real


def logits_bytes_per_token(
    vocab_size: int,
    compute_bytes: float,
    tensor_parallel: Count,
    software: SoftwareProfile,
    tokens: Real = 1.0,
    *,
    upcasts: bool = True,
    caps: bool = False,
) -> Logits:
    """Logits and their copies at the loss, split with the vocabulary (t 1 where gathered whole).

    kept      c l V / t                              l 1, or the share of a chunk's tokens; V of
                                                     the predicted share of all tokens
    forward   (c (l + k - 1) + w n) V / t            k copies in compute precision, the logits one
                                                     of them, n copies of w = max(4, c) bytes, of
                                                     w = c unless the loss ``upcasts``
    backward  (c (l + k - 1) + w n + c g [16 bits]) V / t    g gradients that are cast back

    Where the model ``caps`` its logits, one k more is kept, what tanh gives (torch's autograd).
    A loss that works on chunks has one chunk's n and k - 1 copies at once. One that works on pieces
    of p of the tokens, as many as ``loss.piece_bytes`` hold in w, writes a gradient of its own:

    forward   (c + w p (n + 1 [16 bits])) V / t      16-bit logits are cast, piece by piece
    backward  (2 c + w p (n + 1) [16 bits]) V / t
    """
    wide = max(FP32, compute_bytes) if upcasts else compute_bytes
    narrow = compute_bytes < wide
    cast = compute_bytes * software.loss.logits_gradient_copies if narrow else 0.0
    over = 1.0 if software.loss.gathers_logits else np.multiply(1.0, tensor_parallel)
    share = software.loss.predicted_share * vocab_size / over
    if software.loss.piece_bytes:
        rows = np.maximum(1.0, software.loss.piece_bytes // (wide * share))
        piece = np.minimum(1.0, rows / np.multiply(1.0, tokens))
        copies = wide * (software.loss.fp32_logits_copies + narrow) * piece
        back = 2.0 * compute_bytes + (copies if narrow else 0.0)
        return Logits(compute_bytes * share, (compute_bytes + copies) * share, back * share)
    chunk: Real = software.loss.chunk_share
    if software.loss.chunk_tokens:
        chunk = np.minimum(1.0, software.loss.chunk_tokens / np.multiply(1.0, tokens))
    kept = compute_bytes * (chunk if software.loss.chunks_logits else 1.0)
    if caps:
        kept = kept * (1.0 + software.loss.capped_copies)
    copies = (
        compute_bytes * (software.loss.logits_copies - 1.0)
        + wide * software.loss.fp32_logits_copies
    )
    at_loss = kept + copies * chunk
    back = at_loss + cast * (chunk if software.loss.chunks_logits else 1.0)
    return Logits(kept * share, at_loss * share, back * share)
