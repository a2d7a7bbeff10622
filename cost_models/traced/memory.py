"""Peak memory of one accelerator that trains a module of unknown layers over data ranks.

The trace gives the live bytes of every stretch of a pass; this adds the plan's part, stretch by
stretch, as FSDP2 does it block by block (``executor.trace.module_trainer``):

    weights    the shard w P / d, and whole blocks w P_block while gathered. Below ZeRO-3 from a
               block's forward pass to the end of its backward pass (later micro-batches find all
               of them gathered); under ZeRO-3 while it runs. One data rank gathers none
    gradients  of finished blocks w P / d (z >= 1), of others w P; those of earlier micro-batches
               w P (z <= 1) or w P / d
    buffers    w P_block of the last gather, before it is copied out (forward), or of ZeRO-3's
               prefetch (backward); w P_block of gradients in reduction from the end of a
               block's backward pass to the end of the next one's

Symbols   w bytes of a weight   P parameters   d ranks that share the shards   z zero_stage
Units     bytes; every argument may be a column of a plan table.

Source: torch 2.13, distributed/fsdp/_fully_shard (FSDPParamGroup, foreach_reduce). Leaves out:
memory inside kernels (convolution workspaces), allocator rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import Real, pick
from cost_models.memory.allocator import free_bytes
from cost_models.memory.optimizer_states import OPTIMIZER_TRAITS
from cost_models.memory.outside_torch import outside_bytes
from cost_models.memory.parts import MemoryParts
from cost_models.plan.plan import PlanTable
from cost_models.plan.recompute import RECOMPUTE
from cost_models.plan.workload import Workload
from cost_models.traced.module import OUTSIDE, Stretch, Tensors, TracedModule, stretches
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.software.trainer import SoftwareProfile

# maximum temporary copies of the largest tensor in an optimizer step (torch 2.13 without foreach):
# AdamW's denominator before and after its division, and the previous tensor's; SGD's gradient with
# weight decay
OPTIMIZER_COPIES: Final = {"adamw": 3.0, "adam": 3.0, "sgd": 1.0, "sgd_momentum": 1.0}
OPTIMIZER_STEP: Final = -1
LiveBytes = tuple[Real, Real, Real, Real]  # weights, gradients, activations, buffers


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Bytes of the parameters of each block (and, last, outside of blocks)."""

    weights: tuple[Real, ...]
    weight_shards: tuple[Real, ...]
    gradients: tuple[Real, ...]  # of trained ones
    gradient_shards: tuple[Real, ...]
    ranks: NDArray[np.int64]  # that share the shards

    @classmethod
    def of(cls, module: TracedModule, ranks: NDArray[np.int64]) -> BlockSizes:
        """Return the sizes of a module's blocks sharded over ``ranks``."""
        master = module.weight_bytes
        groups: tuple[Tensors, ...] = (*module.blocks, module.outside)
        one = np.ones_like(ranks)
        return cls(
            weights=tuple(master * g.elements(one) for g in groups),
            weight_shards=tuple(master * g.elements(ranks) for g in groups),
            gradients=tuple(master * g.elements(one, trainable=True) for g in groups),
            gradient_shards=tuple(master * g.elements(ranks, trainable=True) for g in groups),
            ranks=ranks,
        )

    def total(self, name: str, blocks: Iterable[int] | None = None) -> Real:
        """Sum of one size over some blocks, or over everything."""
        values = getattr(self, name)
        chosen = values if blocks is None else [values[block] for block in blocks]
        return sum(chosen, start=np.zeros(len(self.ranks)))

    def sent(self, name: str, block: int) -> Real:
        """Bytes of a block in a collective: equal shards of all ranks, padding included."""
        shards: Real = self.ranks * getattr(self, name)[block]
        return shards


def traced_memory(
    module: TracedModule,
    workload: Workload,
    software: SoftwareProfile,
    table: PlanTable,
    cluster: Cluster | None = None,
) -> tuple[MemoryParts, NDArray[np.int64]]:
    """Return the parts at the peak, and the peak's segment (OPTIMIZER_MOMENT: the optimizer step).

    ``cluster``: None leaves out the memory outside tensors, as on CPUs. Shapes: columns of the
    table's length. Activations include the gradients of the running block.
    """
    parts, moments, order = [], [], []
    for code in np.unique(table.recompute):
        rows = np.flatnonzero(table.recompute == code)
        stretches_of_pass = stretches(module.passes[RECOMPUTE[int(code)]])
        found = _memory(module, stretches_of_pass, workload, software, table.rows(rows), cluster)
        parts.append(found[0])
        moments.append(found[1])
        order.append(rows)
    back = np.argsort(np.concatenate(order), kind="stable")
    joined = {
        name: np.concatenate([getattr(p, name) for p in parts])[back]
        for name in MemoryParts.__struct_fields__
    }
    return MemoryParts(**joined), np.concatenate(moments)[back]


def _memory(
    module: TracedModule,
    stretches_of_pass: tuple[Stretch, ...],
    workload: Workload,
    software: SoftwareProfile,
    table: PlanTable,
    cluster: Cluster | None,
) -> tuple[MemoryParts, NDArray[np.int64]]:
    sizes = BlockSizes.of(module, np.where(table.zero_stage == 0, 1, table.dp_shard))
    trained, zeros = sizes.total("gradient_shards"), np.zeros(len(table))
    copies = OPTIMIZER_COPIES[workload.optimizer] * module.weight_bytes
    temporary = copies * module.tensors.largest(sizes.ranks)
    if not (software.optimizer.fused or software.optimizer.loops):  # over lists of tensors
        temporary = OPTIMIZER_TRAITS[workload.optimizer].foreach_copies * trained
    moments: list[LiveBytes] = [(zeros, trained, zeros, temporary)]
    places = [OPTIMIZER_STEP]
    for place, stretch in enumerate(stretches_of_pass):
        for moment in _moments(stretch, sizes, table):
            moments.append(moment)
            places.append(place)
    totals = np.stack([sum(moment, start=zeros) for moment in moments])
    where = np.argmax(totals, axis=0)
    gathered, gradients, activations, buffers = (
        pick([zeros + moment[part] for moment in moments], where) for part in range(4)
    )
    weights = sizes.total("weight_shards") + module.buffer_bytes + gathered
    states = OPTIMIZER_TRAITS[workload.optimizer].states * trained
    runtime: Real = zeros
    if cluster is not None and cluster.accelerator.device != "cpu":
        free = free_bytes(software, table, gradients, activations + buffers)
        runtime = outside_bytes(software, cluster, table) + free
    parts = MemoryParts(weights, gradients, states, activations, zeros, buffers, runtime)
    return parts, np.asarray(places)[where]


def _moments(stretch: Stretch, sizes: BlockSizes, table: PlanTable) -> list[LiveBytes]:
    """Live bytes at the peak of a stretch, and during the reduction of gradients at its end."""
    if not stretch.backward:
        return [_forward(stretch, sizes, table), _gathering(stretch, sizes, table)]
    moments = [_backward(stretch, sizes, table), _between(stretch, sizes, table)]
    return [*moments, _reducing(stretch, sizes, table)] if stretch.reduces else moments


def _forward(stretch: Stretch, sizes: BlockSizes, table: PlanTable) -> LiveBytes:
    """Live bytes in the forward pass of the last micro-batch."""
    shared, several = table.data_parallel > 1, table.num_microbatches > 1
    frees, every = table.zero_stage >= 3, table.zero_stage >= 2
    gathered = np.where(several, sizes.total("weights"), _with_outside(sizes, stretch.gathered))
    gathered = np.where(frees, _at_work(stretch, sizes), gathered)
    gathers = (frees | ~several) & (sizes.ranks > 1)
    gathering = np.where(gathers, sizes.sent("weight_shards", stretch.last_gathered), 0.0)
    earlier = np.where(shared & every, sizes.total("gradient_shards"), sizes.total("gradients"))
    left = np.where(shared & every & several, sizes.sent("gradient_shards", OUTSIDE), 0.0)
    return (
        np.where(shared, gathered, 0.0),
        np.where(several, earlier, 0.0),
        stretch.segment.kept.at(table.micro_batch_size),
        gathering + left,
    )


def _gathering(stretch: Stretch, sizes: BlockSizes, table: PlanTable) -> LiveBytes:
    """Live bytes at the start of a block's forward pass, with the previous block's gather buffer.

    For the first micro-batch; later ones gather under ZeRO-3 only, with gradients present.
    """
    weights, gradients, _, buffers = _forward(stretch, sizes, table)
    if stretch.gathers is None:
        return (0.0 * weights, 0.0 * gradients, 0.0 * weights, 0.0 * buffers)
    segment, before = stretch.gathers
    gathers = (table.zero_stage >= 3) | (table.num_microbatches == 1)
    both = gathers & (sizes.ranks > 1)
    return (
        np.where(both, weights, 0.0),
        np.where(both, gradients, 0.0),
        np.where(both, segment.end.at(table.micro_batch_size), 0.0),
        np.where(both, buffers + sizes.sent("weight_shards", before), 0.0),
    )


def _backward(stretch: Stretch, sizes: BlockSizes, table: PlanTable) -> LiveBytes:
    """Live bytes in the last micro-batch's backward pass (ZeRO-2: any before it, if present)."""
    segment, rows = stretch.segment, table.micro_batch_size
    live = np.where(_adds_up(table), segment.freed.at(rows), segment.kept.at(rows))
    shared = table.data_parallel > 1
    left: Real
    if stretch.last_reduced is None:  # the last reduction of an earlier micro-batch
        again = (table.zero_stage >= 2) & (table.num_microbatches > 1)
        left = np.where(again, sizes.sent("gradient_shards", OUTSIDE), 0.0)
    else:
        left = sizes.sent("gradient_shards", stretch.last_reduced)
    return (
        _gathered(stretch, sizes, table, stretch.gathered),
        _gradients(stretch, sizes, table),
        live,
        _ahead(stretch, sizes, table) + np.where(shared, left, 0.0),
    )


def _between(stretch: Stretch, sizes: BlockSizes, table: PlanTable) -> LiveBytes:
    """Live bytes in the backward pass of a middle micro-batch below ZeRO-2.

    Weights stay gathered, gradients stay whole, nothing is reduced.
    """
    whole = np.where(table.data_parallel > 1, sizes.total("weights"), 0.0)
    there = (table.num_microbatches > 2) & (table.zero_stage < 2)
    live = stretch.segment.freed.at(table.micro_batch_size)
    return (
        np.where(there, whole, 0.0),
        np.where(there, sizes.total("gradients"), 0.0),
        np.where(there, live, 0.0),
        np.zeros(len(table)),
    )


def _reducing(stretch: Stretch, sizes: BlockSizes, table: PlanTable) -> LiveBytes:
    """Live bytes at the end of a block's backward pass: weights freed, gradients copied."""
    block, shared = stretch.segment.block, table.data_parallel > 1
    end = stretch.segment.end.at(table.micro_batch_size)
    live = end - np.where(_adds_up(table), sizes.gradients[block], 0.0)
    stay = [other for other in stretch.gathered if other != block]
    # over one shard the division makes one more copy (foreach_reduce, world size 1)
    copies = np.where(sizes.ranks > 1, 1.0, 2.0)
    buffers = _ahead(stretch, sizes, table) + copies * sizes.sent("gradient_shards", block)
    return (
        _gathered(stretch, sizes, table, stay, leaves=True),
        np.where(shared, _gradients(stretch, sizes, table), 0.0),
        np.where(shared, live, 0.0),
        np.where(shared, buffers, 0.0),
    )


def _gathered(
    stretch: Stretch,
    sizes: BlockSizes,
    table: PlanTable,
    blocks: Iterable[int],
    *,
    leaves: bool = False,
) -> Real:
    """Gathered weights in the backward pass; ``leaves``: those of the running block are freed."""
    over = leaves and stretch.segment.block == OUTSIDE  # all passes are over
    outside = np.zeros(len(table)) if over else sizes.weights[OUTSIDE]
    some = sizes.total("weights", blocks) + outside
    at_work = outside if leaves else _at_work(stretch, sizes)
    stays = (table.zero_stage == 2) & (table.num_microbatches > 1)
    below = np.where(stays, sizes.total("weights"), some)
    whole = np.where(table.zero_stage >= 3, at_work, below)
    return np.where(table.data_parallel > 1, whole, 0.0)


def _gradients(stretch: Stretch, sizes: BlockSizes, table: PlanTable) -> Real:
    """Gradients present before those of the stretch itself."""
    segment, several = stretch.segment, table.num_microbatches > 1
    so_far = segment.block_gradients + segment.outside_gradients
    alone = np.where(several, sizes.total("gradients"), so_far)
    done = sizes.total("gradients", stretch.done)
    reduced = sizes.total("gradient_shards", stretch.done)
    own = so_far - done  # of this micro-batch, not reduced yet
    every = np.where(several, sizes.total("gradient_shards"), reduced) + own
    at_last = np.where(several, reduced + sizes.total("gradients") - done, reduced + own)
    shared = np.where(table.zero_stage >= 2, every, at_last)
    return np.where(table.data_parallel > 1, shared, alone)


def _ahead(stretch: Stretch, sizes: BlockSizes, table: PlanTable) -> Real:
    """Bytes of ZeRO-3's prefetch while the previous block runs."""
    if stretch.coming is None:
        return np.zeros(len(table))
    ahead = (table.zero_stage >= 3) & (sizes.ranks > 1)
    return np.where(ahead, sizes.sent("weight_shards", stretch.coming), 0.0)


def _adds_up(table: PlanTable) -> NDArray[np.bool_]:
    """Whether gradients are accumulated into whole ones of earlier micro-batches."""
    every = (table.data_parallel > 1) & (table.zero_stage >= 2)
    added: NDArray[np.bool_] = (table.num_microbatches > 1) & ~every
    return added


def _with_outside(sizes: BlockSizes, blocks: Iterable[int]) -> Real:
    return sizes.total("weights", blocks) + sizes.weights[OUTSIDE]


def _at_work(stretch: Stretch, sizes: BlockSizes) -> Real:
    block = stretch.segment.block
    inside: Real = np.zeros(len(sizes.ranks)) if block == OUTSIDE else sizes.weights[block]
    return inside + sizes.weights[OUTSIDE]
