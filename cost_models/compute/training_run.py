"""Whole training runs by rules of thumb: FLOP, days, tokens that a model is worth.

Symbols   N parameters   D tokens   n accelerators   X FLOP/s that each achieves
Units     FLOP, seconds, tokens. Every function broadcasts.

Leaves out: attention scores and the head, restarts and evaluations.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cost_models.arrays import Flag, Real
from cost_models.compute.flops import six_n_d

# Hoffmann et al., Chinchilla (arXiv:2203.15556), table 3: 20.2 billion tokens for 1 billion
# parameters, 1.5 trillion for 67 billion, 21.2 trillion for 1 trillion
TOKENS_PER_PARAMETER: Final = 20.0
# DeepSeek LLM (arXiv:2401.02954), eq. 1, fitted on runs of 1e17 to 2e19 FLOP
BATCH_SCALE, BATCH_EXPONENT = 0.2920, 0.3271


def training_flops(num_parameters: Real, tokens: Real, *, recomputed: Flag = False) -> Real:
    """FLOP of a training run: 6 N D, or 8 N D where every forward pass is computed again.

    Source: Kaplan et al. (arXiv:2001.08361), sec. 2.1; Narayanan et al. (arXiv:2104.04473), sec.
    5.1. Leaves out attention scores and the head.

    >>> float(training_flops(175e9, 300e9)), float(training_flops(175e9, 300e9, recomputed=True))
    (3.15e+23, 4.2e+23)
    """
    return np.where(recomputed, 8.0 / 6.0, 1.0) * six_n_d(num_parameters, tokens)


def training_seconds(flops: Real, accelerators: Real, flops_per_second: Real) -> Real:
    """Seconds of a training run: FLOP / (n X); 8 N D / (n X) with recomputation.

    Source: Narayanan et al. (arXiv:2104.04473), sec. 5.1, eq. 4.

    >>> flops = training_flops(175e9, 300e9, recomputed=True)
    >>> round(float(training_seconds(flops, 1024, 140e12)) / 86400)
    34
    """
    return np.divide(flops, np.multiply(1.0, accelerators) * flops_per_second)


def compute_optimal_tokens(num_parameters: Real) -> Real:
    """Tokens for which a model of this size is the best use of the FLOP: 20 N.

    Source: Hoffmann et al., Chinchilla (arXiv:2203.15556), table 3. Leaves out: tokens beyond,
    which pay where the model is used much afterwards.

    >>> float(compute_optimal_tokens(70e9))
    1400000000000.0
    """
    return TOKENS_PER_PARAMETER * np.multiply(1.0, num_parameters)


def best_batch_tokens(flops: Real) -> Real:
    """Tokens of the batch with which models of a compute budget train best: 0.2920 C^0.3271.

    Source: DeepSeek LLM (arXiv:2401.02954), sec. 3.1, eq. 1; C: FLOP of the whole run. Leaves out:
    data and optimizer, and how flat the optimum is. Their 67B model, 2 T tokens, had 18.9 M:

    >>> round(float(best_batch_tokens(training_flops(67e9, 2e12))) / 1e6, 1)
    19.3
    """
    return BATCH_SCALE * np.power(np.multiply(1.0, flops), BATCH_EXPONENT)
