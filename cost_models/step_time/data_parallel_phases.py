"""Data-parallel traffic by phase of a step: before forward passes, and where no pass hides it.

Units: seconds, columns of a plan table.

Source: Rajbhandari et al., ZeRO (arXiv:1910.02054), sec. 7; torch's fully_shard, which gathers the
first layer before the first forward pass. Leaves out: layers of unequal size inside the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from cost_models.arrays import Real
from cost_models.communication.traffic import Traffic
from cost_models.memory.gradients import reduces_once
from cost_models.partition.rank_parameters import RankParameters
from cost_models.plan.plan import PlanTable
from hardware_profiles.software.trainer import SoftwareProfile


class DataPhases(NamedTuple):
    """Seconds of a step, parts of all data-parallel traffic."""

    forward: Real  # gathered for forward passes: ZeRO-3, or ZeRO-1 and 2 behind the first one
    first: Real  # gathered before the first layer of each forward pass can run
    last: Real  # reduced after the first layer's last gradient


def data_phases(
    traffic: Mapping[tuple[str, str], Traffic],
    by_axis: Mapping[str, Real],
    table: PlanTable,
    params: RankParameters,
    software: SoftwareProfile,
) -> DataPhases:
    """Return the phases of a rank's data-parallel traffic.

    Half of ZeRO-3's gathering is for the m forward passes. Embedding and first layer, a share f of
    a rank's weights, are needed before any computation can hide their gathering, and their
    gradients are the last to be computed:

        first   f G / 2 under ZeRO-3, f G where the updated weights of ZeRO-1 and 2 are gathered
                during the first forward pass, else 0
        last    f R / r        r = m where every backward pass reduces, else 1

    G, R: seconds of gathering and of reducing in a step.
    """
    sharded = table.zero_stage >= 3
    gathers, reduces = np.zeros(len(table)), np.zeros(len(table))
    for axis in ("data", "expert_data"):
        if (axis, "all_gather") in traffic:
            gathered = traffic[axis, "all_gather"].size
            summed = 2.0 * traffic[axis, "all_reduce"].size
            moved = gathered + traffic[axis, "reduce_scatter"].size + summed
            share = gathered / np.maximum(moved, 1.0)
            gathers = gathers + share * by_axis[axis]
            reduces = reduces + (1.0 - share) * by_axis[axis]
    once = gathers if software.overlap.weight_gathers else 0.0
    forward = np.where(sharded, 0.5 * gathers, once)
    every = (table.zero_stage >= 2) & np.logical_not(reduces_once(software, table))
    rounds = np.where(every, table.num_microbatches, 1)
    share = (params.embedding + params.largest_layer) / np.maximum(params.total, 1.0)
    return DataPhases(forward, share * forward, share * reduces / rounds)
