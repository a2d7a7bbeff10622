"""Memory of a device outside torch's allocator: the CUDA context and NCCL's communicators.

The context holds the driver's structures and the kernels that were loaded. A communicator holds
buffers for all its channels, and one FIFO per channel for every rank that it is connected to: its
neighbours in rings and trees, and in an all-to-all every rank of the node.

Units: bytes. Source: each figure's, in the trainers' profiles and in
``hardware_profiles/software/nccl.toml``. Leaves out: NVLink SHARP's buffers, communicators of
pairs.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cost_models.arrays import Real
from cost_models.plan.plan import PlanTable
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.software.nccl import nccl_tuning
from hardware_profiles.software.trainer import SoftwareProfile

NEIGHBOURS: Final = 2  # of a rank in a ring, and in most nodes of a tree


def outside_bytes(software: SoftwareProfile, cluster: Cluster, table: PlanTable) -> Real:
    """Return the bytes of the context and of the communicators of each plan."""
    context = context_bytes(software, cluster.accelerator.architecture)
    return context + communicator_bytes(cluster, table)


def context_bytes(software: SoftwareProfile, architecture: str) -> float:
    """Return the bytes of the context of a generation of accelerators."""
    by_architecture = software.memory.context_bytes
    return by_architecture.get(architecture, by_architecture["default"])


def communicator_bytes(cluster: Cluster, table: PlanTable) -> Real:
    """Return the bytes of the communicators of every axis with several ranks.

        ring, tree  channels * (channel + connection * min(2, n - 1))
        all-to-all  channels * channel + exchange * (n' - 1), n' of the n ranks in a node

    With several axes one more communicator spans all ranks.
    """
    if cluster.accelerator.device != "gpu":
        return np.zeros(len(table))
    memory = nccl_tuning().memory
    channels = memory.channels.get(cluster.accelerator.link, memory.channels["other"])
    alone = channels * memory.channel

    def ring(ranks: Real) -> Real:
        return alone + channels * memory.connection * np.minimum(NEIGHBOURS, ranks - 1.0)

    axes = (
        table.shard_ranks,
        table.dp_replicate,
        table.tensor_parallel,
        table.pipeline_parallel,
        table.context_parallel,
    )
    inside = np.maximum(1, cluster.gpus_per_node // table.tensor_parallel)
    experts = table.expert_parallel
    found = np.where(
        experts > 1, alone + memory.exchange * (np.minimum(experts, inside) - 1.0), 0.0
    )
    groups = np.where(experts > 1, 1, 0)
    world: Real = table.data_parallel * table.tensor_parallel
    world = world * table.pipeline_parallel * table.context_parallel
    for ranks in axes:
        found = found + np.where(ranks > 1, ring(ranks), 0.0)
        groups = groups + np.where(ranks > 1, 1, 0)
    return found + np.where(groups > 1, ring(world), 0.0)
