"""Bytes that an optimizer's update reads and writes, and its FLOP.

Symbols   g gradient bytes   k s bytes of all states of a parameter   w master_bytes
Units     bytes of a parameter; FLOP of a rank, a column of a plan table.

Source: torch's optimizers (optim/*.py), access by access. Leaves out: the rates of both memories
(``compute.elementwise``, ``communication.host_link``).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cost_models.arrays import Real
from cost_models.communication.volumes import communication_units
from cost_models.memory.model_states import optimizer_shards
from cost_models.memory.optimizer_states import OPTIMIZER_TRAITS, is_layer_matrix, is_projected
from cost_models.partition.rank_view import RankView
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import SoftwareProfile

ITERATIONS: Final = 5.0  # of Newton and Schulz, torch's default
# accesses that last as long as the system takes to hand out and take back memory; measured in fp32
# (python -m benchmarks.step_time.host_updates: AdamW's operators take 5.1 times as long as its
# kernel, a third of it in the system), 7.5 to 14.5 by DeepSpeed's "5x to 7x" (ops/adam/cpu_adam.py)
NEW_MEMORY_ACCESSES: Final = 8.0


def update_accesses(workload: Workload, software: SoftwareProfile) -> float:
    """Bytes that clipping and update move for each parameter: the trainer's for fp32 AdamW, and

        + 2 (w - 4) + n (g - 4) + 2 (k s - 8)

    since the weight is read and written, and every state. n, accesses to the gradient: read by
    norm, clipping and update, written by clipping; one less where the update clips as it goes.
    AdamW over lists of tensors takes one step after another (torch 2.4, optim/adamw.py,
    _multi_tensor_adamw: decay, lerp, mul, addcmul, sqrt, div, add, addcdiv): it reads and writes
    the weight twice, reads the gradient twice, and reads or writes states, and the root that is as
    large as one, 14 times in all; clipping and its norm 3 gradients more:

        4 w + 5 g + 7 k s

    Projected updates (GaLore, APOLLO) have small states, but an update as large as the weight is
    written, scaled and read: 3 w. Leaves out factors and scales; products: ``update_flops``.

    >>> from hardware_profiles.software.trainer import software_profile
    >>> update_accesses(Workload(1, 1, optimizer="sgd"), software_profile("shardplan"))
    20.0
    """  # noqa: D400
    traits = OPTIMIZER_TRAITS[workload.optimizer]
    state_bytes = traits.states * (traits.bits / 8.0 if traits.bits else workload.state_bytes)
    if traits.projected:
        state_bytes = 1.5 * workload.master_bytes
    if workload.optimizer == "adamw" and not software.optimizer.fused:
        clipping = software.optimizer.gradient_accesses - 1.0  # what the fused update does not read
        gradients = (2.0 + clipping) * workload.reduction_bytes
        return 4.0 * workload.master_bytes + gradients + 7.0 * state_bytes
    weights = 2.0 * (workload.master_bytes - 4.0)
    gradients = software.optimizer.gradient_accesses * (workload.reduction_bytes - 4.0)
    return software.optimizer.moved_bytes + weights + gradients + 2.0 * (state_bytes - 8.0)


def host_accesses(workload: Workload, software: SoftwareProfile) -> tuple[float, float]:
    """Bytes of each parameter that an update on the host moves, and that one core reads.

    As many as on the device, but where torch clips and updates what is offloaded (FSDP): its norm
    of a tensor runs on one core, g if gradients are clipped; and on CPU tensors ``torch.optim``
    takes one operator after another unless told ``fused=True``. The root of the second moments and
    its quotient then lie in memory that the system hands out and takes back for each tensor:

        2 * 8 s    besides update_accesses

    DeepSpeed takes norms on the device, scales gradients, and updates in one kernel without
    temporaries (csrc/adam/cpu_adam_impl.cpp); copies write the gradient and read the weight:

        2 w + 2 k s + g    the kernel
        2 g + g + w        scaling; copies
        2 c + 8 c          ZeRO-3: weights cast to new memory, from which they are copied

    Leaves out: cores as the limit of casts.

    >>> from hardware_profiles.software.trainer import software_profile
    >>> host_accesses(Workload(1, 1), software_profile("torch-trainer"))
    (152.0, 4.0)
    """
    moved = update_accesses(workload, software)
    if not software.optimizer.torch_on_host:
        if workload.optimizer == "adamw" and not software.optimizer.fused:
            moved = 3.0 * workload.master_bytes + 4.0 * workload.reduction_bytes
            moved = moved + 4.0 * workload.state_bytes
            if software.optimizer.casts_on_host:
                moved = moved + (2.0 + NEW_MEMORY_ACCESSES) * workload.compute_bytes
        return moved, 0.0
    norm = workload.reduction_bytes if software.optimizer.gradient_accesses > 1.0 else 0.0
    if workload.optimizer == "adamw" and not software.optimizer.fused:
        moved = moved + 2.0 * NEW_MEMORY_ACCESSES * workload.state_bytes
    return moved - norm, norm


def update_flops(view: RankView) -> Real:
    """FLOP in 16 bits of the update on one rank: Muon's iterations, or projections of gradients.

        5 (4 r^2 c + 2 r^3)    of every matrix of r rows and c >= r columns, over d from ZeRO-1 on
        2 k r c                the projection to rank k, and as much for the way back (GaLore)

    Source: torch 2.13, optim/_muon.py: five times X X^T, its square, and their product with X. Liu
    et al. (arXiv:2502.16982), sec. 2.3: a rank works on the whole matrices of which it has a shard.
    """
    workload, table = view.workload, view.table
    traits, flops = OPTIMIZER_TRAITS[workload.optimizer], np.zeros(len(table))
    if not (traits.whole_matrices or traits.projected):
        return flops
    ways = 4.0 if traits.projected == "svd" else 2.0
    for block in communication_units(view.trained_model, view.rank):
        for weight in filter(is_layer_matrix, block.weights):
            least, most = sorted(float(length) for length in weight.shape[-2:])
            count: Real = float(weight.numel) / (least * most) * block.repeats
            each = ITERATIONS * (4.0 * least**2 * most + 2.0 * least**3)
            if traits.projected:
                kept = min(float(workload.optimizer_rank), least)
                each = ways * kept * least * most * is_projected(traits, weight)
                count = count / table.tensor_parallel
            flops = flops + each * count
    return flops / optimizer_shards(table.shard_ranks, table.zero_stage)
