"""Seconds in which the driver moves paged optimizer states between host and accelerator.

Units: seconds and bytes; every function broadcasts over plan columns.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Real
from hardware_profiles.cluster.schema import Accelerator


def usable_bytes(accelerator: Accelerator) -> float:
    """Return what a process can get of an accelerator's memory, where that is known."""
    capacity, usable = accelerator.memory_capacity, accelerator.usable_memory
    return capacity.value if usable is None else min(usable.value, capacity.value)


def paged_seconds(paged: Real, peak: Real, usable: float, link: float) -> Real:
    """Seconds a step of states that do not fit beside everything else.

        2 min(paged, max(0, paged + peak - usable)) / link

    ``peak``: bytes of all else. A block comes when its update is due, in the place of one that
    leaves, and nothing is computed meanwhile. Source: bitsandbytes, optim/optimizer.py: ``step``
    fetches the states of one tensor, updates it, and waits for the device before the next.

    >>> [float(x) for x in paged_seconds(np.array([4e9, 12e9]), 16e9, 24e9, 16e9)]
    [0.0, 0.5]
    """
    moved = np.clip(np.add(paged, peak) - usable, 0.0, paged)
    return 2.0 * moved / link
