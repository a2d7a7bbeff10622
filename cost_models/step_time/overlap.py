"""Exposed data-parallel communication: seconds that no computation hides.

Units: seconds, columns of a plan table.

Leaves out: links that other axes use at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from cost_models.arrays import Flag, Real, holds, pick
from cost_models.plan.plan import SCHEDULES, PlanTable
from cost_models.step_time.parts import RankSeconds
from hardware_profiles.software.trainer import SoftwareProfile

INTERLEAVED: Final = SCHEDULES.index("interleaved_1f1b")


class Hiding(NamedTuple):
    """Properties of a trainer that hide data-parallel communication (software profiles)."""

    overlap: float  # share of the backward pass that can hide it
    interference: float = 0.0  # seconds of computation that a hidden second costs
    gathers_during_forward: bool = (
        False  # ZeRO-1 and 2: updated weights, during the first forward pass
    )

    @classmethod
    def of(cls, software: SoftwareProfile) -> Hiding:
        """Return the overlap of a trainer."""
        return cls(
            software.overlap.data_parallel,
            software.overlap.data_parallel_interference,
            software.overlap.weight_gathers,
        )


def exposed_data_seconds(
    rank: RankSeconds, table: PlanTable, hiding: Hiding, *, on_gpu: bool
) -> Real:
    """Data-parallel seconds that no computation hides, and computation lost to interference.

    ZeRO 0 and 1 reduce during the last micro-batch's backward pass; without a pipeline ZeRO 2
    reduces during every one. ZeRO 3 gathers for forward passes during these, and again, before it
    reduces, during backward passes: neither hides the rest of the other, because a layer is
    gathered just before it is used. Without overlap they are in the queue of the kernels, and are
    hidden where that waits for the host. Replicas always reduce during the last backward pass, in
    parallel to all other traffic where that stays in a node. Links work while a GPU computes or
    waits for its host, but not during collectives that a pass hides already; a CPU's cores do both
    jobs. A hidden second costs seconds of computation: collectives take multiprocessors and memory
    bandwidth.

    Each of v interleaved stages has its share of the traffic W, and of the pass T that hides it. A
    rank runs one stage after another with n = min(p, m) micro-batches each, so that (v - 1) n / v
    more passes hide the traffic of the other stages, and its own pass that of one stage:

        exposed = max(0, (W - T)/v, W - T ((v - 1) n + 1)/v)

    Source: Megatron-LM core/pipeline_parallel/schedules.py, grad_sync_func and param_sync_func of a
    model chunk, called after its last micro-batch's backward pass, and before its first
    micro-batch.
    """
    return at_the_end([rank], table, hiding, on_gpu=on_gpu)[0]


def exposed_message_seconds(
    traffic: Real, passes: Real, table: PlanTable, software: SoftwareProfile
) -> Real:
    """Seconds of a micro-batch's messages between stages that are not hidden.

    ``overlap.stage_messages``: interleaved stages send and receive while ``passes`` of other
    micro-batches run, but not before the first backward pass and after the last forward pass: of m
    micro-batches the first and last p wait. A hidden second costs computation
    ``overlap.data_parallel_interference`` seconds.

        traffic - (1 - interference) · min(traffic, passes) · (1 - p/m)

    Source: Megatron-LM core/pipeline_parallel/schedules.py,
    forward_backward_pipelining_with_interleaving, overlap_p2p_comm without
    overlap_p2p_comm_warmup_flush.

    >>> import numpy as np
    >>> from cost_models.plan.plan import Plan
    >>> from hardware_profiles.software.trainer import software_profile
    >>> plan = Plan(pipeline_parallel=4, virtual_stages=2, num_microbatches=16,
    ...             pipeline_schedule="interleaved_1f1b")
    >>> sizes = np.array([0.1]), np.array([2.0]), PlanTable.from_plans([plan])
    >>> round(float(exposed_message_seconds(*sizes, software_profile("nemo"))[0]), 4)
    0.0437
    """
    overlap = software.overlap
    if not overlap.stage_messages:
        return traffic
    interleaved = (table.pipeline_schedule == INTERLEAVED) & (table.virtual_stages > 1)
    paired = np.maximum(0.0, 1.0 - 1.0 * table.pipeline_parallel / table.num_microbatches)
    hidden = np.where(interleaved, np.minimum(traffic, passes) * paired, 0.0)
    return traffic - (1.0 - overlap.data_parallel_interference) * hidden


def least_message_share(software: SoftwareProfile) -> float:
    """Share of a rank's messages with one stage that it exposes at least with any number of stages.

        min(1, v interference), v = 2    where interleaved stages hide messages

    With v stages it sends v times as many and hides all but the interference
    (``exposed_message_seconds``). Source: derived. Leaves out: what passes are too short to hide.

    >>> from hardware_profiles.software.trainer import software_profile
    >>> least_message_share(software_profile("shardplan"))
    1.0
    """
    overlap = software.overlap
    return min(1.0, 2.0 * overlap.data_parallel_interference) if overlap.stage_messages else 1.0


def _exposed(
    rank: RankSeconds, table: PlanTable, hiding: Hiding, stages: Real | None, *, on_gpu: bool
) -> Real:
    """Exposed seconds where each of ``stages`` of a rank sends at a different time; None: one."""
    hides = hiding.overlap if on_gpu else 0.0
    each = (table.zero_stage >= 2) & (table.pipeline_parallel == 1)
    gathers = table.zero_stage >= 3
    every = np.where(each | gathers, 1.0 * table.num_microbatches, 1.0)
    passes = rank.compute + rank.recompute + rank.host
    ahead = passes - rank.backward - rank.hidden_forward
    back = rank.backward - rank.hidden_backward
    behind = (table.zero_stage >= 1) & hiding.gathers_during_forward & ~gathers
    # without reductions behind the backward pass, gathers are hidden alone
    apart = gathers | (behind & (hides == 0.0) & on_gpu)
    idle = every * np.where(gathers & on_gpu, 1.0 - hides, 0.0)  # the queue waits for the host
    forward = np.where(apart & behind, 1.0, hides * every) * ahead
    forward = forward + idle * (rank.host - rank.host_backward)
    window = hides * every * back + np.where(behind & ~apart, forward, 0.0)
    window = window + idle * rank.host_backward
    last = rank.replica_communication - hides * back
    whole = rank.data_communication + rank.replica_communication
    first = np.where(apart, rank.gathered_forward, 0.0)
    rest = whole - first - np.where(rank.replicas_use_other_links, rank.replica_communication, 0.0)
    beyond = rest - window
    if stages is not None:
        of_round = 1.0 * np.minimum(table.pipeline_parallel, table.num_microbatches)
        later = rest - window * ((stages - 1.0) * of_round + 1.0) / stages
        beyond = np.maximum(later, beyond / stages)
    before = np.minimum(first, rank.first_gathers)
    at_ends = rank.last_reductions + np.where(apart, 0.0, rank.first_gathers)
    exposed = np.maximum(np.minimum(rest, at_ends), np.maximum(last, beyond))
    exposed = np.maximum(0.0, exposed) + np.maximum(before, first - forward)
    interferes = hiding.interference * np.where(gathers, hides, 1.0)
    found: Real = exposed + interferes * (whole - exposed)
    return found


def at_the_end(
    ranks: Sequence[RankSeconds], table: PlanTable, hiding: Hiding, *, on_gpu: bool
) -> tuple[Real, Real]:
    """Return ``exposed_data_seconds`` and optimizer seconds of the rank that ends last.

    Stages that send separately are selected at the end, since that depends on few rows.
    """

    def last(stages: Real | None) -> tuple[Real, Real]:
        exposed = [_exposed(rank, table, hiding, stages, on_gpu=on_gpu) for rank in ranks]
        optimizer = [rank.optimizer for rank in ranks]
        once = [e + o for e, o in zip(exposed, optimizer, strict=True)]
        ends_last = np.argmax(np.stack(once), axis=0)
        return pick(exposed, ends_last), pick(optimizer, ends_last)

    together, separate = last(None), _stages_send_separately(table, hiding)
    if not holds(separate):
        return together
    each = last(1.0 * table.virtual_stages)
    return np.where(separate, each[0], together[0]), np.where(separate, each[1], together[1])


def _stages_send_separately(table: PlanTable, hiding: Hiding) -> Flag:
    """Whether all stages of a rank can hide their traffic, each at a different time."""
    interleaved = table.pipeline_schedule == INTERLEAVED
    hides = (table.zero_stage == 0) | ((table.zero_stage == 1) & hiding.gathers_during_forward)
    found: Flag = interleaved & hides & (table.virtual_stages > 1)
    return found
