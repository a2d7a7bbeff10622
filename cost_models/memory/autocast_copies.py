"""16-bit copies of fp32 weights under autocast: the points of a step at which they do not exist.

torch casts a weight when a matrix first needs it, keeps the copy until the forward pass has ended,
and autograd keeps it until that matrix's backward pass; a recomputed layer casts its weights again.
Source: torch 2.13, aten/src/ATen/autocast_mode.cpp (cached_cast); transformers' Trainer wraps the
forward pass, loss included. Compared with transformers' Llama in
``tests/cost_models/memory/test_autocast_copies.py``.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Real
from cost_models.partition.rank_parameters import RankParameters
from cost_models.partition.stages import PipelineRank
from cost_models.plan.plan import FULL, PlanTable


def absent_copies(
    params: RankParameters,
    rank: PipelineRank,
    table: PlanTable,
    compute_bytes: float,
    *,
    tied: bool,
) -> tuple[Real, ...]:
    """Bytes of copies that do not exist at each of ``memory.MOMENTS``.

        forward pass of the loss     c E          an embedding is looked up in fp32, unless tied
        its backward pass, the head  c (E + R)    recomputed layers cast theirs later
        backward pass of a layer     c (P - K)    its own copies are in the buffers
        from the last layer on       c P

    Symbols: c ``compute_bytes``, P all weights, E the embedding, R recomputed layers, K layers
    below the current one that are not recomputed. Shapes: columns of the table's length.
    """
    every = np.multiply(params.total, np.ones(len(table)))
    lookup = np.where(tied and rank.last, 0.0, params.embedding)
    again = np.zeros(len(table))
    kept = np.zeros(len(table))
    for count, recomputed, size in zip(
        rank.kind_counts, rank.recomputed, params.layers, strict=True
    ):
        repeated = np.where(table.recompute == FULL, recomputed, 0)
        again = again + repeated * size
        kept = kept + (count - repeated) * size
    below = np.maximum(kept - params.largest_layer, 0.0)
    walking = every - below
    absent = (lookup, lookup + again, lookup + again, walking, walking, every, every, every)
    return tuple(compute_bytes * numel for numel in absent)
