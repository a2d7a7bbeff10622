"""ZeRO++ (Wang et al., arXiv:2306.10209): a secondary copy of the weights, quantised messages.

Symbols   P parameters of a rank's stage   c compute_bytes   g bytes of a reduced gradient
          n secondary_ranks, which share the secondary copy   M = c P, a model's 16-bit weights
Units     bytes of an element, or bytes; columns of a plan table.

hpZ  ``secondary_ranks``       the backward pass gathers from a copy that n neighbours share qwZ
``quantised_weights``     weights are gathered in blocks of int8 qgZ  ``quantised_gradients``
gradients are exchanged in blocks of int4

A step of ZeRO-3 with 16-bit gradients moves 3 M over all ranks, with all three 0.75 M (table 1).
Leaves out: scales of blocks, kernels that quantise, the two stages of qgZ (one exchange is priced).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cost_models.arrays import Real
from cost_models.plan.plan import PlanTable

INT8_BYTES: Final = 1.0
INT4_BYTES: Final = 0.5


def secondary_bytes(num_params: Real, compute_bytes: float, table: PlanTable) -> Real:
    """Bytes of the secondary copy on one rank: c P / n (sec. 3.2), 0 without one.

    Source: ZeRO++, sec. 3.2; MiCS and FSDP's hybrid sharding (``dp_replicate``) have it as their
    only copy.
    """
    ranks = np.multiply(1.0, table.secondary_ranks)
    return np.where(ranks > 1, compute_bytes * num_params / ranks, 0.0)


def gathered_bytes(compute_bytes: float, table: PlanTable) -> Real:
    """Bytes of a gathered weight element: 1 with qwZ, else c."""
    return np.where(table.quantised_weights, INT8_BYTES, compute_bytes)


def scattered_bytes(reduction_bytes: Real, table: PlanTable) -> Real:
    """Bytes of a reduced gradient element in transfer: 0.5 with qgZ, else g."""
    return np.where(table.quantised_gradients, INT4_BYTES, reduction_bytes)


def gathering_buffer(table: PlanTable) -> Real:
    """Bytes per element in addition to the gathered weights: their int8 values."""
    return np.where(table.quantised_weights, INT8_BYTES, 0.0)


def reducing_buffer(reduction_bytes: Real, table: PlanTable) -> Real:
    """Bytes an element of a gradient's buffer: its copy to be reduced, or int4 messages."""
    return np.where(table.quantised_gradients, 2.0 * INT4_BYTES, reduction_bytes)
