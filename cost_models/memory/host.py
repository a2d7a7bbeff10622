"""Bytes of offloaded tensors on a node: host memory, and NVMe drives.

Symbols   P parameters that a rank updates   c compute_bytes, w master_bytes, g gradient bytes
          k s bytes of all states of a parameter
Units     bytes; columns of a plan table. All ranks of a node are assumed to be as full as the
          fullest pipeline rank: an upper bound.

The offloaded parts go to the host, and with ``offload_device`` nvme to the drives: optimizer states
and the updated copy of the weights. Gradients stay in host memory. ZeRO-Infinity keeps 16-bit
weights in addition to the fp32 ones (18 bytes a parameter, not 16); FSDP2 has the fp32 ones only.

Leaves out: the host's own programs, data loaders, and the page cache.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from cost_models.activations.live import live_activations
from cost_models.arrays import Real
from cost_models.memory.optimizer_states import OPTIMIZER_TRAITS, rank_states, updated_elements
from cost_models.partition.frozen_weights import offloaded_frozen_bytes
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import NVME, PlanTable

# DeepSpeed's defaults (docs/_pages/config-json.md): offload_optimizer buffer_count 4 of a
# sub_group_size of 1e9 elements; offload_param buffer_count 5 of buffer_size 1e8 elements
STATE_BUFFERS: Final = 4.0
STATE_BUFFER_ELEMENTS: Final = 1e9
WEIGHT_BUFFERS: Final = 5.0
WEIGHT_BUFFER_ELEMENTS: Final = 1e8


class HostBytes(Struct, frozen=True):
    """Bytes of one rank that are off its accelerator."""

    memory: Real
    nvme: Real

    def of_node(self, table: PlanTable, gpus_per_node: int) -> HostBytes:
        """Bytes of all ranks of a node."""
        ranks = np.minimum(table.world_size, gpus_per_node)
        return HostBytes(ranks * self.memory, ranks * self.nvme)


def rank_host_bytes(view: RankView) -> HostBytes:
    """Bytes of one rank off its accelerator; 0 where the accelerator is the host.

        optimizer   w P + k s P, and g P of gradients     16 P with AdamW in fp32
        activations what layers saved, of all micro-batches in flight
        frozen      a rank's shards of frozen weights, which go where the weights go
        paged       as much as the driver may move
        nvme        w P + k s P on the drives; in host memory g P and pinned buffers:
                    4 w min(P, 1e9), with the weights 5 c min(P, 1e8) more

    Source: ZeRO-Offload (arXiv:2101.06840), sec. 3; ZeRO-Infinity (arXiv:2104.07857), sec. 5 and 6;
    DeepSpeed's estimate_zero3_model_states_mem_needs (16 and 18 bytes a parameter).
    """
    workload, table = view.workload, view.table
    zeros, paged = np.zeros(len(table)), OPTIMIZER_TRAITS[workload.optimizer].paged
    if not view.on_gpu or not (paged or np.any(table.offload > 0)):
        return HostBytes(zeros, zeros)
    states, updated = rank_states(view), updated_elements(view)
    frozen = offloaded_frozen_bytes(view)
    moves = np.where(table.offloads_optimizer, 1.0, 0.0)
    of_states = states.resident + states.paged
    kept = moves * (workload.master_bytes * updated + of_states + frozen)
    gradients = moves * workload.reduction_bytes * updated
    on_drives = np.where(table.offload_device == NVME, 1.0, 0.0)
    buffers = STATE_BUFFERS * workload.master_bytes * np.minimum(updated, STATE_BUFFER_ELEMENTS)
    swapped = WEIGHT_BUFFERS * workload.compute_bytes * np.minimum(updated, WEIGHT_BUFFER_ELEMENTS)
    buffers = moves * (buffers + np.where(table.offloads_weights, swapped, 0.0))
    activations = live_activations(view).offloaded
    memory = gradients + (1.0 - on_drives) * kept + on_drives * buffers + activations
    return HostBytes(memory + np.where(moves > 0, 0.0, states.paged), on_drives * kept)
