"""Whole tensors, assembled from the shards of all ranks one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.partition.schedules import rank_of_stage
from cost_models.partition.shared_tensors import bridge_stage
from executor.checkpoint.format.pieces import overlaps, whole_tensor
from executor.model.parameter_layout import ParameterLayout, parameter_layouts
from executor.model.shared_tensor_names import names_by_stage
from executor.parallel.tensor_parallel import UNSHARDED
from executor.training.optimizer import ParameterShard
from executor.training.trainer import Trainer


def gathered(
    trainer: Trainer, part: Callable[[ParameterShard], Tensor]
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the name of every parameter and, on rank 0, its whole tensor.

    One tensor at a time; the second copy of a tied tensor is yielded under the same name.
    """
    grid, rank_0 = trainer.grid, dist.get_rank() == 0
    shard = {h.name: h for h in trainer.shards}
    leads = all(rank == 0 for axis, rank in grid.place.items() if axis != "pipeline")
    for key, layout, pipeline_rank in _owners(trainer):
        full = None
        if grid.rank("pipeline") == pipeline_rank:
            full = _whole(trainer, shard[key], part(shard[key]))
            if leads and not rank_0:
                dist.send(full.contiguous(), 0)
        elif rank_0:
            full = torch.empty(
                layout.shape, dtype=part(trainer.shards[0]).dtype, device=trainer.device
            )
            dist.recv(full, grid.pipeline_peer(pipeline_rank))
        yield layout.name, full.cpu() if full is not None and rank_0 else None


def _owners(trainer: Trainer) -> Iterator[tuple[str, ParameterLayout, int]]:
    """Yield name in the stage, layout and pipeline rank of every parameter and second copy."""
    file = trainer.file
    stages = file.plan.num_stages
    of_layer = {
        f"{prefix}.": stage
        for stage, (first, last) in enumerate(file.layer_ranges)
        for prefix in file.model.layer_prefixes[first:last]
    }
    table = parameter_layouts(file.model, UNSHARDED)
    outer = {w.name: 0 for w in file.model.embedding}
    outer |= {w.name: stages - 1 for w in file.model.head}
    bridge = bridge_stage(file.model, file.layer_ranges)
    outer |= {w.name: bridge for w in file.model.bridge if bridge is not None}
    for name, layout in table.items():
        if layout.frozen:
            continue
        stage = outer.get(name)
        if stage is None:
            stage = next(s for prefix, s in of_layer.items() if name.startswith(prefix))
        yield name, layout, rank_of_stage(file.plan, stage)
    for name, names in names_by_stage(file).items():
        if table[name].frozen:
            continue
        for stage, copy in names.items():
            if stage != min(names):
                yield copy, table[name], rank_of_stage(file.plan, stage)


def _whole(trainer: Trainer, shard: ParameterShard, local: Tensor) -> Tensor:
    """Assemble a tensor on every rank of its stage: the sum of disjoint parts."""
    full = local.new_zeros(shard.layout.shape)
    for block in overlaps(shard.pieces, whole_tensor(shard.layout.shape)):
        source = tuple(slice(s.source, s.source + s.length) for s in block)
        target = tuple(slice(s.target, s.target + s.length) for s in block)
        full[target] = local[source]
    for axis in shard.axes:
        dist.all_reduce(full, group=trainer.grid.group(axis))
    return full
