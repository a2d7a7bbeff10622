"""Whole tensors put together from the parts that the ranks hold, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from executor.layout import Layout, layouts
from executor.models import HEAD
from executor.optimizer import Held
from executor.tensor_parallel import WHOLE, TensorAxis
from executor.train import Trainer


def gathered(
    trainer: Trainer, part: Callable[[Held], Tensor]
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield every parameter's name and, on rank 0, a whole tensor put together from its parts.

    One tensor at a time; a tied tensor's second copy is yielded under the same name.
    """
    grid, rank_0 = trainer.grid, dist.get_rank() == 0
    held = {h.name: h for h in trainer.held}
    leads = all(rank == 0 for axis, rank in grid.place.items() if axis != "pipeline")
    for key, layout, pipeline_rank in _owners(trainer):
        full = None
        if grid.rank("pipeline") == pipeline_rank:
            full = _whole(trainer, held[key], part(held[key]))
            if leads and not rank_0:
                dist.send(full.contiguous(), 0)
        elif rank_0:
            full = torch.empty(
                layout.shape, dtype=part(trainer.held[0]).dtype, device=trainer.device
            )
            dist.recv(full, grid.pipeline_peer(pipeline_rank))
        yield layout.name, full.cpu() if full is not None and rank_0 else None


def _owners(trainer: Trainer) -> Iterator[tuple[str, Layout, int]]:
    """Yield name in the stage, layout and pipeline rank of every parameter, second copies too."""
    file = trainer.file
    stages = file.plan.num_stages
    of_layer = {
        f"{prefix}.": stage
        for stage, (first, last) in enumerate(file.layer_ranges)
        for prefix in file.model.layer_prefixes[first:last]
    }
    table = layouts(file.model, WHOLE)
    outer = {w.name: 0 for w in file.model.embedding}
    outer |= {w.name: stages - 1 for w in file.model.head}
    for name, layout in table.items():
        stage = outer.get(name)
        if stage is None:
            stage = next(s for prefix, s in of_layer.items() if name.startswith(prefix))
        yield name, layout, stage % file.plan.pipeline_parallel
    if trainer.tied_name is not None and stages > 1:
        last = (stages - 1) % file.plan.pipeline_parallel
        yield f"{HEAD}.weight", table[trainer.tied_name], last


def _whole(trainer: Trainer, held: Held, local: Tensor) -> Tensor:
    """Put a tensor together on every rank of its stage."""
    plan, axis, layout = trainer.plan, trainer.axis, held.layout
    if plan.zero_stage > 0 and trainer.grid.size("data") > 1:
        rows = layout.local_shape(axis)[0]
        parts = _all_gather(local, 0, -(-rows // trainer.grid.size("data")), trainer, "data")
        local = torch.cat(parts).narrow(0, 0, rows)
    if layout.cut_dim is None or axis.size == 1:
        return local
    full = local.new_empty(layout.shape)
    longest = layout.local_shape(replace(axis, rank=0))[layout.cut_dim]
    parts = _all_gather(local, layout.cut_dim, longest, trainer, "tensor")
    for rank, slice_ in enumerate(parts):
        _place(full, slice_, layout, replace(axis, rank=rank))
    return full


def _place(full: Tensor, slice_: Tensor, layout: Layout, axis: TensorAxis) -> None:
    """Write one tensor-parallel rank's pieces to where they belong."""
    dim, offset = layout.cut_dim or 0, 0
    for start, stop in layout.ranges(axis)[dim]:
        full.narrow(dim, start, stop - start).copy_(slice_.narrow(dim, offset, stop - start))
        offset += stop - start


def _all_gather(local: Tensor, dim: int, length: int, trainer: Trainer, axis: str) -> list[Tensor]:
    """Exchange parts that are at most ``length`` long; shorter ones are filled up."""
    shape = list(local.shape)
    shape[dim] = length
    padded = local.new_zeros(shape)
    padded.narrow(dim, 0, local.size(dim)).copy_(local)
    parts = [torch.empty_like(padded) for _ in range(trainer.grid.size(axis))]
    dist.all_gather(parts, padded, group=trainer.grid.group(axis))
    return parts
