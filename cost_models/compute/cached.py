"""Memory traffic that a large last-level cache saves between two kernels.

Symbols   C bytes of the cache   T bytes of a tensor
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cost_models.arrays import Real

# Of the tensors that a kernel reads and writes, those which the kernel before it has written: of a
# forward pass one of two (read, written), of a backward pass one of three (gradient, saved input,
# gradient written)
FOUND_FORWARD: Final = 1.0 / 2.0
FOUND_BACKWARD: Final = 1.0 / 3.0


def traffic_share(cache: float, tensor: Real, found: float) -> Real:
    """Share of the bytes moved by kernels on a tensor that still go through memory.

        1 - found · min(1, max(0, 3/2 - 2 T / C))    between two uses pass 2 T

    The kernel after finds what fits in the cache; kernels on more or fewer tensors blur the
    edge. 1 where C is 0: no cache, or one that saves no time (``Accelerator.l2_cache``).

    Leaves out: written tensors that are freed before they leave the cache; operands of matmuls;
    logits. Source: what 96 MiB of an L40 hold is read at 5.2 TB/s up to 92 MB, at its memory's
    0.85 from 120 MB on (te42kyfo/gpu-benches@3088b33379: gpu-l2-cache/l40.txt).

    >>> [round(float(traffic_share(96.0, tensor, FOUND_FORWARD)), 2) for tensor in (8, 48, 80)]
    [0.5, 0.75, 1.0]
    """
    if not cache:
        return 1.0
    held = np.clip(1.5 - 2.0 * np.multiply(1.0, tensor) / cache, 0.0, 1.0)
    share: Real = 1.0 - found * held
    return share
