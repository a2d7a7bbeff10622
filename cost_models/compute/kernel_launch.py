"""Seconds that the host needs to start what the device runs.

Every operator costs the host a fixed time, whatever its size; how many there are is a matter of the
software. Units: seconds.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import Real
from cost_models.compute.rates import Rates
from cost_models.model.spec import ModelSpec
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import FULL, SELECTIVE_OPS, PlanTable
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import SoftwareProfile

# How well a GPU's work and the host's hide each other. Fitted: GPT of 3 to 16 ms a layer under
# Megatron-LM on one node (shardplan validate --time --only vtrain-single); the same value halves
# the median error of BERT, whose 68 runs were not looked at (7.1 to 3.3 %: --only nvidia-bert)
HOST_OVERLAP = 4.0


def operator_seconds(view: RankView, operator: float) -> tuple[Real, Real]:
    """Host seconds that starting the operators of a forward and of a backward pass takes.

    Recomputation of layers starts the forward operators again (with ``selective_ops`` the host
    walks through all of them, and the device leaves the matmuls out); those outside the layers are
    shared out like a layer's. Weights that are shared, or apart from their master copy, are
    handled in groups: every layer, the embedding, the head.
    """
    model, workload, software = view.model, view.workload, view.software
    table, rank = view.table, view.rank
    layers = sum(rank.kind_counts)
    more = _unfused(model, software, workload, table)
    forward = software.host.layer_operators_forward + more
    backward = software.host.layer_operators_backward + more
    outside = software.host.microbatch_operators / (forward + backward)
    walked_again = (table.recompute == FULL) | (table.recompute == SELECTIVE_OPS)
    again = np.where(walked_again, forward, 0.0)
    mixed = workload.compute_bytes != workload.master_bytes
    outer = rank.first + rank.last + (rank.bridge == "between")
    groups = np.where((table.shard_ranks > 1) | mixed, layers + outer, 0.0)
    around = groups * software.host.group_operators
    starts_forward = layers * forward + outside * forward + around
    counts = zip(rank.kind_counts, rank.recomputed, model.kinds, strict=True)
    walked = [(n, repeats) for n, repeats, kind in counts if not kind.forward_only]
    repeated = sum(repeats for _, repeats in walked) * again
    starts_backward = sum(n for n, _ in walked) * backward + repeated
    starts_backward = starts_backward + outside * backward + around
    return operator * starts_forward, operator * starts_backward


def _unfused(
    model: ModelSpec, software: SoftwareProfile, workload: Workload, table: PlanTable
) -> Real:
    """Operators a pass where a fused softmax does not take the number of attention matrices."""
    if workload.attention_kernel != "eager" or not software.host.fused_softmax_batch:
        return np.zeros(len(table))
    heads = max(kind.attention.num_heads for kind in model.kinds)
    matrices = 1.0 * table.micro_batch_size * heads / table.tensor_parallel
    refused = np.mod(matrices, software.host.fused_softmax_batch) != 0.0
    return np.where(refused, software.host.unfused_softmax_operators, 0.0)


def host_wait(starting: Real, device: Real, rate: Rates, *, overlap: float | None = None) -> Real:
    """Seconds that starting a pass adds to it.

        (s^g + d^g)^(1/g) - d    s seconds of starting, d of the device, g ``overlap``

    A GPU runs while the host starts the next kernels, but neither is even: the device runs dry
    behind short kernels, and the host is late behind synchronisations. g = 1 would hide nothing,
    an infinite one all but the longer of the two; HOST_OVERLAP by default. Source of the form:
    Qiao et al., Pollux (arXiv:2008.12260), sec. 3.2, for gradients and their synchronisation. On a
    CPU the two add up.

    >>> from dataclasses import replace
    >>> gpu = Rates(1e12, 1e12, 0.0, False)
    >>> round(float(host_wait(1.0, 1.0, gpu)), 3), round(float(host_wait(1.0, 3.0, gpu)), 3)
    (0.189, 0.009)
    >>> float(host_wait(1.0, 3.0, replace(gpu, host_is_device=True)))
    1.0
    """
    if rate.host_is_device:
        return starting
    power = HOST_OVERLAP if overlap is None else overlap
    longer = np.maximum(starting, device)
    share = np.minimum(starting, device) / np.where(longer > 0.0, longer, 1.0)
    waits: Real = longer * (1.0 + share**power) ** (1.0 / power) - device
    return waits
