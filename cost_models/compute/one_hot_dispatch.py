"""Slots of experts that products with one-hot masks fill and empty.

Symbols   n tokens of a rank   s sequence length   k experts of a token   f capacity factor
          h hidden size   t tensor_parallel   c compute_bytes   beta memory bandwidth [bytes/s]
Units     seconds; columns of a plan table.

All E experts together have f k s slots for a sequence, whatever the routing: tokens beyond an
expert's own are dropped, empty slots are computed. Which token is in which slot is a mask of
s x f k s elements.

Source: Lepikhin et al., GShard (arXiv:2006.16668), algorithm 1 and sec. 3.2;
AI-Hypercomputer/maxtext: src/maxtext/layers/moe.py, generate_masks and dense_matmul.
Leaves out: memory of masks and empty slots, and the products of serving.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.compute.matmul import matmul_seconds
from cost_models.compute.rates import Rates

MASKS = 2.0  # one without, one with the router's weights


def one_hot_seconds(
    slots: float,
    hidden_size: int,
    tokens: Real,
    seq_len: Count,
    tensor_parallel: Count,
    compute_bytes: float,
    rate: Rates,
) -> tuple[Real, Real]:
    """Seconds of the products with masks, in a forward and in a backward pass.

        forward    (slots x s)(s x h/t) and (s x slots)(slots x h/t); two masks written
        backward   both for their inputs' gradients, (s x h/t)(h/t x slots) for those of the
                   router's weights, which are read again

    ``slots``: of a token, f k. The FLOP of a token, 2 f k s h for each product, grow with the
    sequence: the experts' own are 6 f k h F.

    >>> gpu = Rates(1e12, 1e12, 0.0, False)
    >>> each = one_hot_seconds(2.5, 4096, 4096.0, 4096, 1, 2.0, gpu)
    >>> [round(float(seconds), 2) for seconds in each]
    [0.69, 1.03]
    """
    sequence, columns = np.multiply(1.0, seq_len), hidden_size / np.multiply(1.0, tensor_parallel)
    places, sequences = slots * sequence, tokens / np.multiply(1.0, seq_len)

    def product(rows: Real, summed: Real, width: Real) -> Real:
        shape = rows, summed, width, compute_bytes, rate
        return matmul_seconds(*shape, batch=sequences, in_memory=(columns,))

    both = product(places, sequence, columns) + product(sequence, places, columns)
    mask = compute_bytes * tokens * places / rate.memory
    return both + MASKS * mask, both + product(sequence, columns, places) + mask
