"""Activations beside the layers of an encoder and a decoder: the encoder's output, the positions.

Symbols  c compute_bytes   h hidden_size   a num_heads   s seq_len   t tensor_parallel
         b micro_batch_size
Units    bytes a token of one micro-batch.
"""

from __future__ import annotations

import numpy as np

from cost_models.activations import norm_bytes
from cost_models.arrays import Real
from cost_models.model import ModelSpec
from cost_models.plan import PlanTable
from cost_models.stages import PipelineRank
from cost_models.workload import Workload
from hardware_profiles.software import SoftwareProfile


def shared_bytes_per_token(
    model: ModelSpec,
    workload: Workload,
    software: SoftwareProfile,
    table: PlanTable,
    rank: PipelineRank,
) -> Real:
    """What layers of a rank's stages share.

        the norm behind the encoder, and c h / (t if sp)    where the decoder begins
        c h                                                 with sp, a stage that reads it: gathered
        c a s / t                                           a stack on a stage: added to its scores

    Without sequence parallelism a stage reads the encoder's output as it was received. The
    decoder's positions are one table for all sequences, the encoder's one for each, since what
    fills a sequence up is hidden; both are counted for each.
    """
    if not model.bridge:
        return np.zeros(len(table))
    compute = workload.compute_bytes
    kind = model.kinds[model.pattern[0]]
    along = np.where(table.sequence_parallel, 1.0 * table.tensor_parallel, 1.0)
    norm = norm_bytes(kind, model.hidden_size, compute, software) + compute * model.hidden_size
    gathered = np.where(table.sequence_parallel, compute * model.hidden_size, 0.0)
    scores = compute * kind.attention.num_heads * workload.seq_len / table.tensor_parallel
    bridge = float(bool(rank.bridge)) * norm / along
    shared: Real = bridge + rank.decoders * gathered + rank.stacks * scores
    return shared
