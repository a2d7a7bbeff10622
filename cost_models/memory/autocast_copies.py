"""Bytes of 16-bit copies of fp32 weights under autocast that do not exist at a point of a step.

torch casts a weight when a matrix first needs it and keeps the copy until the forward pass ends;
autograd keeps it until that matrix's backward pass is done. A recomputed layer casts its weights
again. Source: torch 2.13, aten/src/ATen/autocast_mode.cpp (cached_cast);
transformers' Trainer wraps the forward pass, loss included. Counted against transformers' Llama in
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
        a layer's backward pass      c (P - K)    its own copies are among the buffers
        from the last layer on       c P

    Symbols: c ``compute_bytes``, P all weights, E the embedding, R recomputed layers, K layers
    below the current one that are not recomputed. Shapes: columns of the table's length.
    """
    every = np.multiply(params.total, np.ones(len(table)))
    lookup = np.where(tied and rank.last, 0.0, params.embedding)
    recast = np.zeros(len(table))
    kept = np.zeros(len(table))
    for count, recomputed, size in zip(
        rank.kind_counts, rank.recomputed, params.layers, strict=True
    ):
        repeated = np.where(table.recompute == FULL, recomputed, 0)
        recast = recast + repeated * size
        kept = kept + (count - repeated) * size
    below = np.maximum(kept - params.largest_layer, 0.0)
    in_layer = every - below
    absent = (lookup, lookup + recast, lookup + recast, in_layer, in_layer, every, every, every)
    return tuple(compute_bytes * numel for numel in absent)
