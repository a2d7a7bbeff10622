"""Memory that torch reserves, and that nvidia-smi shows, from the bytes of live tensors.

Three figures, largest bytes on one device:

    allocated  tensors
    reserved   segments of the caching allocator: tensors and free blocks
    device     what nvidia-smi shows: segments, the CUDA context, NCCL's communicators

Weights and optimizer states are requested once and stay; free blocks come of transient tensors:
gradients, activations, logits and buffers, whose sizes and order change within a step. What is
reserved beyond the tensors is therefore a share of the transient bytes alone:

    reserved = allocated + share * transient

A stream reuses only its own blocks, so the share is larger where gathered weights and gradients
have streams of their own (FSDP); ``peak.stream_free_bytes`` counts stream by stream where that is
closer to runs that say what they reserved. On one stream with default segments the share is small,
unless layers are computed again: their tensors come and go between gradients that stay.

Near the limit torch returns segments without a live block, so a run needs less than it reserves
where memory is plentiful; a verdict uses the needed bytes. How many they are depends on the order
of sizes, hence two shares: with the upper quartile of the replays a plan is said to fit, and only
what exceeds the budget with the median is said not to.

Units: bytes. Source: replays of torch's allocator (``executor.counters.caching_allocator``) over
traced steps (``python -m benchmarks.memory_truth.allocator``): medians of reserved bytes; upper
quartiles and medians of needed bytes.

Leaves out: allocators other than torch's own (cudaMallocAsync).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from msgspec import Struct

from cost_models.arrays import Real
from cost_models.columnar.columns import by_value
from cost_models.memory.parts import MemoryParts
from cost_models.plan.plan import PlanTable
from cost_models.plan.recompute import FULL
from cost_models.uncertainty import MemoryKind
from hardware_profiles.software.trainer import SoftwareProfile


class FreeShares(Struct, frozen=True):
    """Free blocks in reserved segments, as shares of the transient bytes at the peak."""

    needed: Real  # at the smallest limit under which the steps succeed: upper quartile
    typical: Real  # the same: median
    cached: Real  # where memory is plentiful


# of the first of several streams' transient bytes, where memory is plentiful: expandable segments,
# 8 sharded plans; default segments, the executor's plans of one GPU without and with full
# recomputation, 29 and 5 whole models (--measured: one H200 reserved what their replays do, within
# 0.2 % in the median). Trainers that have no other stream reserved as much there: 0.057 and 0.325
# (11 and 3 runs that state both figures, hardware_profiles/cluster/measured)
FIRST_STREAM_EXPANDABLE: Final = 0.050
FIRST_STREAM_ALONE: Final = (0.053, 0.241)

# upper quartiles (needed) and medians (typical, cached) of ``python -m
# benchmarks.memory_truth.allocator``, by (expandable segments, side streams, ragged batches); on
# one stream its replays cast weights as the executor does, hence the first stream's for ``cached``
FREE_SHARES: Final[Mapping[tuple[bool, bool, bool], FreeShares]] = {
    (False, False, False): FreeShares(needed=0.220, typical=0.072, cached=FIRST_STREAM_ALONE[0]),
    (False, True, False): FreeShares(needed=0.110, typical=0.105, cached=0.382),
    (True, False, False): FreeShares(needed=0.016, typical=0.013, cached=0.083),
    (True, True, False): FreeShares(needed=0.015, typical=0.012, cached=0.281),
    (False, False, True): FreeShares(needed=0.332, typical=0.244, cached=0.577),
    (False, True, True): FreeShares(needed=0.242, typical=0.202, cached=1.324),
    (True, False, True): FreeShares(needed=0.028, typical=0.022, cached=0.350),
    (True, True, True): FreeShares(needed=0.013, typical=0.011, cached=0.139),
}


def free_shares(software: SoftwareProfile, table: PlanTable) -> FreeShares:
    """Return the shares of a trainer's plans: its segments, streams and batches.

    Side streams exist where a plan shards; a trainer that empties its cache keeps what it needs.
    """
    one, several = _by_streams(software)
    alone = not (software.memory.expandable_segments or software.memory.ragged_batches)
    again = FIRST_STREAM_ALONE[1] if alone else one.cached
    shards = by_value((table.zero_stage >= 1) & (table.shard_ranks > 1))
    needed = np.where(shards, several.needed, one.needed)
    typical = np.where(shards, several.typical, one.typical)
    cached = np.where(np.equal(table.recompute, FULL), again, one.cached)
    cached = np.where(shards & software.memory.side_streams, several.cached, cached)
    return FreeShares(needed, typical, typical if software.memory.empties_cache else cached)


def _by_streams(software: SoftwareProfile) -> tuple[FreeShares, FreeShares]:
    """Return the shares of a trainer's plans without side streams and with its own."""
    memory = software.memory
    one, several = (
        FREE_SHARES[memory.expandable_segments, streams, memory.ragged_batches]
        for streams in (False, memory.side_streams)
    )
    return one, several


def free_bytes(software: SoftwareProfile, table: PlanTable, gradients: Real, others: Real) -> Real:
    """Return the free blocks that a run needs: share * (G + A).

    ``gradients``: G, transient unless the trainer keeps one buffer of them all; ``others``: A, of
    activations, logits and buffers.
    """
    transient = transient_bytes(software, gradients, others)
    return free_shares(software, table).needed * np.maximum(transient, 0.0)


def untypical_bytes(software: SoftwareProfile, table: PlanTable, free: Real) -> Real:
    """Return the part of needed free blocks (``free_bytes``) beyond the typical ones."""
    shares = free_shares(software, table)
    return free * (1.0 - shares.typical / shares.needed)


def over_typical(software: SoftwareProfile, table: PlanTable) -> Real:
    """Return the largest ratio of a peak to the same peak with typical free blocks, by plan."""
    return _over_typical(free_shares(software, table))


def most_over_typical(software: SoftwareProfile) -> float:
    """Return the largest ratio of a peak to the same peak with typical free blocks, of any plan.

    >>> from hardware_profiles.software.trainer import software_profile
    >>> round(most_over_typical(software_profile("shardplan")), 3)
    1.138
    """
    return max(float(np.max(_over_typical(one))) for one in _by_streams(software))


def _over_typical(shares: FreeShares) -> Real:
    return (1.0 + shares.needed) / (1.0 + shares.typical)


def transient_bytes(software: SoftwareProfile, gradients: Real, others: Real) -> Real:
    """Return the bytes that a step frees, of gradients and of all other transient tensors."""
    return others if software.gradients.whole_buffer else gradients + others


def shown_bytes(
    kind: MemoryKind,
    parts: MemoryParts,
    outside: Real,
    software: SoftwareProfile,
    table: PlanTable,
    budget: float,
    paged: Real = 0.0,
    free: Real | None = None,
) -> Real:
    """Return a peak as torch or the device shows it: allocated, reserved, or in use.

    reserved  a + cached * transient, at most the device's memory, at least a + typical *
              transient; ``free``: what stands for cached * transient (``peak.stream_free_bytes``)
    device    the same and ``outside``: context and communicators; and ``paged`` optimizer states,
              as many as there is room for: managed memory is no allocation of torch's
              (bitsandbytes-foundation/bitsandbytes, issue 801: NVML counts it)
    """
    allocated: Real = parts.allocated
    if kind == "allocated":
        return allocated
    others = parts.activations + parts.logits + parts.buffers
    transient = transient_bytes(software, parts.gradients, others)
    shares = free_shares(software, table)
    least = allocated + shares.typical * transient
    most = np.maximum(least, budget - outside)
    cached = shares.cached * transient if free is None else free
    reserved = np.minimum(allocated + cached, most)
    if kind == "reserved":
        return reserved
    room: Real = np.maximum(budget - outside - reserved, 0.0)
    return reserved + outside + np.minimum(paged, room)
