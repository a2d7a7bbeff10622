"""Messages between stages in parts: what trainers that scatter them move."""

from __future__ import annotations

import numpy as np

from cost_models.communication.traffic import Traffic
from cost_models.plan.plan import PlanTable


def scattered(
    traffic: dict[tuple[str, str], Traffic], table: PlanTable
) -> dict[tuple[str, str], Traffic]:
    """Stage messages of which every tensor-parallel rank sends its part, gathered over there.

    Source: Narayanan et al. (arXiv:2104.04473), sec. 4.1. With sequence parallelism they are split
    already.
    """
    tensor = np.where(table.sequence_parallel, 1.0, 1.0 * table.tensor_parallel)
    whole = traffic["pipeline", "send"]
    parts = Traffic(whole.count, whole.size / tensor)
    gathers = whole.times(np.where(tensor > 1.0, 1.0, 0.0))
    found = {**traffic, ("pipeline", "send"): parts}
    key = ("tensor", "all_gather")
    found[key] = found[key] + gathers if key in found else gathers
    return found
