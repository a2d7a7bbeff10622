"""16-bit copies of fp32 weights under autocast: the points of a step at which they do not exist.

torch casts a weight when a matrix first needs it, keeps the copy until the forward pass has ended,
and autograd keeps it until that matrix's backward pass; a recomputed layer casts its weights again.
Source: torch 2.13, aten/src/ATen/autocast_mode.cpp (cached_cast); transformers' Trainer wraps the
forward pass, loss included. Of frozen weights the cache keeps no copy, autograd alone does.
Compared with transformers' Llama in ``tests/cost_models/memory/test_autocast_copies.py``.

Leaves out: weights that several matrices share, other than the tied embedding.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Flag, Real, holds
from cost_models.memory.ledger import BACKWARD, LAST_LAYER, LATER_BACKWARD, Item
from cost_models.model.lora import frozen_part, has_frozen
from cost_models.partition.rank_parameters import RankParameters, rank_parameters
from cost_models.partition.rank_view import RankView
from cost_models.plan.recompute import FULL
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import SoftwareProfile


def absent_copies(
    view: RankView, params: RankParameters, *, cached: bool = True
) -> tuple[Real, ...]:
    """Elements of copies that do not exist at each of ``MOMENTS``.

        forward pass of the loss     E        an embedding is looked up in fp32, unless tied
                                     E + R    where autograd alone keeps copies (not ``cached``)
        its backward pass, the head  E + R    recomputed layers cast theirs later
        backward pass of a layer     P - K    its own copies are in the buffers
        from the last layer on       P

    Symbols: P all of ``params``, E the embedding, R recomputed layers, K layers
    below the current one that are not recomputed. Shapes: columns of the table's length.
    """
    table, rank = view.table, view.rank
    zeros = np.zeros(len(table))
    every, again, kept = params.total + zeros, zeros, zeros
    tied = np.logical_and(view.model.tie_embeddings, rank.last)
    lookup = np.where(tied, 0.0, params.embedding)
    for count, recomputed, size in zip(
        rank.kind_counts, rank.recomputed, params.layers, strict=True
    ):
        repeated = np.where(table.recompute == FULL, recomputed, 0)
        again = again + repeated * size
        kept = kept + (count - repeated) * size
    below = every - np.maximum(kept - params.largest_layer, 0.0)
    first = lookup if cached else lookup + again
    return (first, lookup + again, lookup + again, below, below, every, every, every)


def gathered_bytes(workload: Workload, software: SoftwareProfile) -> float:
    """Bytes of an element of gathered weights, and of their gradients before the reduction.

        c    weights are cast, then gathered: MixedPrecision of torch's FSDP
        w    autocast casts what was gathered, matrix by matrix

    Source: torch 2.13, distributed/fsdp/_flat_param.py (pre_unshard: the low-precision shard is
    gathered if parameters have mixed precision, else the shard itself).
    """
    autocasts = software.precision.autocasts_weights
    return workload.master_bytes if autocasts else workload.compute_bytes


def autocast_rows(view: RankView) -> list[Item]:
    """Return the copies next to fp32 weights that are sharded or frozen: c P less the absent ones.

    Without ZeRO-3 the copies of trained weights are the weights in compute precision of
    ``model_states``. A layer's own copies live during its backward pass. Frozen weights in a flat
    parameter with trained ones count as those. Shapes: columns.
    """
    workload, software, table = view.workload, view.software, view.table
    compute, sharded = workload.compute_bytes, view.table.zero_stage >= 3
    if not software.precision.autocasts_weights or compute == workload.master_bytes:
        return []
    parts: list[tuple[RankParameters, Flag, bool]] = []
    if holds(sharded):
        parts.append((view.parameters, sharded, True))
    if has_frozen(view.model) and software.frozen.in_fp32:
        frozen = rank_parameters(frozen_part(view.model, quantised=False), view.rank, table)
        flat = software.gradients.include_frozen
        parts += [(frozen, sharded, flat), (frozen, np.logical_not(sharded), False)]
    rows = []
    for params, there, cached in parts:
        for moment, missing in enumerate(absent_copies(view, params, cached=cached)):
            own = moment in (BACKWARD, LATER_BACKWARD, LAST_LAYER)
            size = compute * (params.total - missing + own * params.largest_layer)
            copies, formula = np.where(there, size, 0.0), "c · (P − weights without a copy)"
            row = Item("buffers", "autocast's copies", copies, formula=formula)
            rows.append(row.during(moment))
    return rows
