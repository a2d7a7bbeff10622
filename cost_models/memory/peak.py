"""Peak memory of one accelerator: the largest sum of the rows of its ledger that live at once.

Units: bytes. Every argument may be a column of a plan table whose rows share the stages
and the recomputed layers (the contents of a rank are found once for them, see ``stages``).

Leaves out: peaks between the ledger's moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import astuple, replace

from cost_models.activations.embedding_and_head import (
    head_bytes_per_token,
    loss_in_compute_precision,
)
from cost_models.activations.live import live_activations
from cost_models.arrays import FP32, Real
from cost_models.columnar.columns import by_value
from cost_models.communication.host_link import without_offload
from cost_models.memory.allocator import (
    FIRST_STREAM_ALONE,
    FIRST_STREAM_EXPANDABLE,
    free_bytes,
    untypical_bytes,
)
from cost_models.memory.autocast_copies import autocast_rows
from cost_models.memory.fsdp.fsdp2 import block_points
from cost_models.memory.head_gradients import loss_copy_bytes
from cost_models.memory.layerwise import layer_points
from cost_models.memory.ledger import (
    LOSS_BACKWARD,
    LOSS_FORWARD,
    MOMENTS,
    OPTIMIZER,
    Item,
    Ledger,
    first,
    total,
)
from cost_models.memory.model_states import rank_weights
from cost_models.memory.optimizer_states import optimizer_rows, update_bytes
from cost_models.memory.outside_torch import outside_bytes
from cost_models.memory.parts import MemoryParts, chosen_parts
from cost_models.memory.wrapper_buffers import update_with_copies, wrapper_rows
from cost_models.partition.plan_stages import pipeline_rank
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.recompute import FULL
from cost_models.scenario import Scenario
from hardware_profiles.progress import tracked


def rank_memory(view: RankView) -> tuple[MemoryParts, Real, Real]:
    """Return the parts at the peak of one pipeline rank, its moment's index, and its typical peak.

        peak = max over moments of the sum of the ledger's rows alive then + runtime

    The typical peak has the free blocks that a run typically needs; the parts are cautious
    (``allocator``). Shapes: columns of the table's length. Source: the formulas that yield the
    rows.
    """
    moments, outside = _timeline(view)
    peaks = np.stack([parts.peak for parts in moments])
    moment = np.argmax(peaks, axis=0)
    parts = chosen_parts(moments, moment)
    if not view.on_gpu:
        return parts, moment, np.max(peaks, axis=0)
    free = np.stack([at.runtime - outside for at in moments])
    typical = np.max(peaks - untypical_bytes(view.software, view.table, free), axis=0)
    return parts, moment, typical


def rank_timeline(view: RankView) -> tuple[MemoryParts, ...]:
    """Return the parts of one pipeline rank at each of ``MOMENTS``; columns, as above.

    ``rank_memory`` returns the largest of them. ``runtime`` is given for each moment: the device's
    own share, and the free blocks that the allocator needs at that moment.
    """
    return _timeline(view)[0]


def _timeline(view: RankView) -> tuple[tuple[MemoryParts, ...], Real]:
    """Return the parts at each moment, and the bytes of ``runtime`` that do not depend on it."""
    ledger, none = rank_ledger(view), np.zeros(len(view.table))
    found = [MemoryParts(**ledger.parts(moment), runtime=none) for moment in range(len(MOMENTS))]
    if not view.on_gpu:
        return tuple(found), 0.0
    kept = total(ledger.kept())
    outside = outside_bytes(view.software, view.cluster, view.table)
    gradients = np.stack([none + parts.gradients for parts in found])
    others = np.stack([parts.allocated - kept - parts.gradients for parts in found])
    free: Any = outside + free_bytes(view.software, view.table, gradients, others)
    return tuple(replace(parts, runtime=free[at]) for at, parts in enumerate(found)), outside


def timelines(
    scenario: Scenario, plan: Plan, layer_ranges: Sequence[tuple[int, int]]
) -> list[tuple[MemoryParts, ...]]:
    """Return, for every pipeline rank of one plan, the parts at each of ``MOMENTS`` as numbers."""
    table, numbers = PlanTable.from_plans([plan]), range(plan.pipeline_parallel)
    ranks = [pipeline_rank(scenario, plan, layer_ranges, number) for number in numbers]
    each = tracked(ranks, "memory of pipeline rank {number} of {total}")
    lines = [rank_timeline(RankView(scenario, table, rank)) for rank in each]
    return [tuple(MemoryParts(*map(first, astuple(at))) for at in line) for line in lines]


def stream_free_bytes(view: RankView) -> Real | None:
    """Return what torch reserves besides live tensors where several streams have blocks; else None.

        max (a - g - u + h) + max g + max u - max a + share * (max (a - g - u) - states)

    a live bytes; g reduced gradients; u gathered weights and gradients being reduced, of several
    ranks; h the block of the 16-bit logits at a loss that casts all of them to fp32; maxima over
    the step's moments. A stream reuses only its own blocks, so that each keeps what it held at its
    own peak. FSDP2 has them where a plan shards, and around weights with masters on one rank, too;
    gradients that are reduced after the last micro-batch add up on the first stream. No fp32 copy
    fits into the block of the freed 16-bit logits; the share is then of what is not logits. With
    default segments sharded runs reserve more than this: their share of all transient bytes stands
    (``allocator``). Source: c10/cuda/CUDACachingAllocator.cpp, ``get_free_block`` (a block's
    stream); replays (``python -m benchmarks.memory_truth.allocator``).
    """
    software, table, workload = view.software, view.table, view.workload
    several = by_value((table.zero_stage >= 1) & (table.shard_ranks > 1))
    masters = workload.compute_bytes != workload.master_bytes
    alone = (software.sharding.blockwise_backward and masters) & ~several
    if not software.memory.side_streams or software.memory.ragged_batches:
        return None
    if not np.all(alone | (several & software.memory.expandable_segments)):
        return None
    line = rank_timeline(view)
    gathered = np.stack([np.where(several, at.buffers, 0.0) for at in line])
    gradients = np.stack([at.gradients for at in line])
    live = np.stack([at.allocated for at in line])
    late = by_value((table.num_microbatches > 1) & (table.zero_stage < 2))
    reduced = np.where(late, line[OPTIMIZER].gradients, np.max(gradients, axis=0))
    held = live - np.where(late, 0.0, gradients) - gathered
    too_small = _freed_narrow_logits(view)
    others = held - np.where(too_small > 0.0, np.stack([at.logits for at in line]), 0.0)
    transient = np.max(others, axis=0) - line[0].weights - line[0].optimizer
    held[LOSS_BACKWARD] += too_small
    first_stream = np.max(held, axis=0)
    added = first_stream + reduced + np.max(gathered, axis=0) - np.max(live, axis=0)
    once, again = FIRST_STREAM_ALONE
    share = np.where(table.recompute == FULL, again, once)
    share = np.where(several, FIRST_STREAM_EXPANDABLE, share)
    free: Real = np.maximum(added, 0.0) + share * np.maximum(transient, 0.0)
    return free


def _freed_narrow_logits(view: RankView) -> Real:
    """Return the bytes of 16-bit logits that are freed once a loss has cast all of them to fp32."""
    loss, narrow = view.software.loss, view.workload.compute_bytes < FP32
    if loss.piece_bytes or loss.fp32_logits_copies < 2.0 or not narrow:
        return np.zeros(len(view.table))
    _, kept, *_ = head_bytes_per_token(view.at_head)
    return kept * view.at_head.tokens * (not loss_in_compute_precision(view))


def rank_ledger(view: RankView) -> Ledger:
    """Return all rows of one pipeline rank's step."""
    if not view.on_gpu:
        view = view.with_table(without_offload(view.table))
    software, table = view.software, view.table
    live = live_activations(view)
    update = update_with_copies(view, update_bytes(view))
    update = np.where(table.offloads_optimizer, 0.0, update)
    temporary = Item("buffers", "temporary tensors of the update", update, formula="s · copies · n")
    points = block_points if software.sharding.blockwise_backward else layer_points
    name, formula = "messages between stages", "received inputs · b·s · c·h"
    messages = Item("buffers", name, live.messages, formula=formula)
    rows = [*rank_weights(view), *optimizer_rows(view), messages]
    rows += [*wrapper_rows(view), *autocast_rows(view)]
    if software.loss.head_copy_bytes:
        copied, name = loss_copy_bytes(view), "copies of the projection for the loss"
        copies = Item("buffers", name, copied, formula="bytes of its copies · V h / t")
        rows.append(copies.during(LOSS_FORWARD, LOSS_BACKWARD))
    if view.on_gpu:
        single = software.memory.buffer_bytes_without_pipeline
        own = software.memory.buffer_bytes + np.where(table.pipeline_parallel > 1, 0.0, single)
        rows.append(Item("buffers", "the trainer's own", own, formula="a constant of the trainer"))
    ledger = Ledger(tuple(rows), points(view, live, temporary))
    share = software.activations.share
    return ledger if share == 1.0 else ledger.with_share(share)
