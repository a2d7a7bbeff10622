"""Whole tensors, assembled from the shards of all ranks a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import prod
from typing import Final

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

BATCH: Final = 2**23  # values of whole tensors that are assembled together


def gathered(
    trainer: Trainer, part: Callable[[ParameterShard], Tensor]
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the name of every parameter and, on rank 0, its whole tensor.

    About ``BATCH`` values are assembled at a time; the second copy of a tied tensor is yielded
    under the same name.
    """
    grid, rank_0 = trainer.grid, dist.get_rank() == 0
    shard = {h.name: h for h in trainer.shards}
    leads = all(rank == 0 for axis, rank in grid.place.items() if axis != "pipeline")
    for batch, pipeline_rank in _batches(trainer):
        sizes = [prod(layout.shape) for _, layout in batch]
        full = None
        if grid.rank("pipeline") == pipeline_rank:
            held = [shard[key] for key, _ in batch]
            full = _whole(trainer, held, [part(each) for each in held])
            if leads and not rank_0:
                dist.send(full, 0)
        elif rank_0:
            dtype = part(trainer.shards[0]).dtype
            full = torch.empty(sum(sizes), dtype=dtype, device=trainer.device)
            dist.recv(full, grid.pipeline_peer(pipeline_rank))
        if full is None or not rank_0:
            yield from ((layout.name, None) for _, layout in batch)
            continue
        for (_, layout), values in zip(batch, full.cpu().split(sizes), strict=True):
            yield layout.name, values.view(layout.shape)


def _batches(trainer: Trainer) -> Iterator[tuple[list[tuple[str, ParameterLayout]], int]]:
    """Yield names in the stage and layouts of successive tensors of one pipeline rank, and it."""
    for pipeline_rank, owned in groupby(_owners(trainer), key=lambda owner: owner[2]):
        batch: list[tuple[str, ParameterLayout]] = []
        values = 0
        for key, layout, _ in owned:
            size = prod(layout.shape)
            if batch and values + size > BATCH:
                yield batch, pipeline_rank
                batch, values = [], 0
            batch.append((key, layout))
            values += size
        yield batch, pipeline_rank


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


def _whole(trainer: Trainer, shards: Sequence[ParameterShard], local: Sequence[Tensor]) -> Tensor:
    """Assemble tensors, flat, on every rank of their stage: the sums of disjoint parts.

    Those that are cut along the same axes are added up together.
    """
    by_axes: dict[tuple[str, ...], list[Tensor]] = {}
    wholes = []
    for shard, values in zip(shards, local, strict=True):
        full = values.new_zeros(shard.layout.shape)
        for block in overlaps(shard.pieces, whole_tensor(shard.layout.shape)):
            source = tuple(slice(s.source, s.source + s.length) for s in block)
            target = tuple(slice(s.target, s.target + s.length) for s in block)
            full[target] = values[source]
        wholes.append(full.flatten())
        if shard.axes:
            by_axes.setdefault(shard.axes, []).append(wholes[-1])
    for axes, alike in by_axes.items():
        flat = torch.cat(alike)
        for axis in axes:
            dist.all_reduce(flat, group=trainer.grid.group(axis))
        for whole, values in zip(alike, flat.split([each.numel() for each in alike]), strict=True):
            whole.copy_(values)
    return torch.cat(wholes)
