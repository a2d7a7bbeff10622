"""Data parallelism and ZeRO (Rajbhandari et al., arXiv:1910.02054), on torch's FSDP2.

zero_stage 0  weights on every rank, gradients added up once a step
zero_stage 1  shards between steps; weights gathered and gradients scattered once a step
zero_stage 2  the same, gradients scattered at every micro-batch: only a shard accumulates
zero_stage 3  weights gathered for each forward and each backward pass of a group, freed after it

With ``dp_replicate`` (HSDP; Zhao et al., arXiv:2304.11277, sec. 3.2.2) all this happens inside
groups of dp_shard ranks, and once a step the same shards of all groups are added up. Ranks that
share the tokens of a sequence (context parallelism) share the weights as data ranks do.

A group is the embedding, one layer, or norm and head; a tied embedding and head share one. Losses
are divided by the tokens of the whole batch before they are differentiated, so gradients are only
summed. Under a pipeline all this holds as well: a backward pass of a stage is one micro-batch.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from cost_models.workload import Precision
from executor.compat import replicate
from executor.layout import Ranges
from executor.mesh import Grid
from executor.models import COMPUTE_DTYPE, HEAD, MASTER_DTYPE, Stage


def distribute(stage: Stage, grid: Grid, precision: Precision) -> dict[str, Ranges]:
    """Share a stage's parameters over the data ranks; return the rows that this rank keeps.

    With one data rank only mixed precision needs FSDP, for its master weights.
    """
    plan, mesh = grid.plan, grid.sharding_mesh()
    master, compute = MASTER_DTYPE[precision], COMPUTE_DTYPE[precision]
    if grid.size("data") == 1 and master == compute:
        return {}
    mixed = master != compute
    policy = MixedPrecisionPolicy(compute, master) if mixed else MixedPrecisionPolicy()
    rows = {name: stage.get_parameter(name).size(0) for name in stage.layouts}
    groups = list(stage.groups())
    if plan.zero_stage == 0 and grid.size("data") > 1:
        for group in groups:
            replicate(group, mesh=mesh, mp_policy=policy)
        replicate(stage, mesh=mesh, mp_policy=policy)
        _sum_gradients(stage)
        return {}
    head = stage.get_submodule(HEAD) if stage.last else None
    for group in groups:
        # the head is used again at once: it stays whole from its forward to its backward pass
        frees = plan.zero_stage == 3 and head not in group
        fully_shard(group, mesh=mesh, mp_policy=policy, reshard_after_forward=frees)
    fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    _sum_gradients(stage)
    _set_prefetch(groups)
    if stage.first and head not in groups[0]:
        _fsdp(groups[0]).set_unshard_in_backward(False)  # a look-up's gradient reads no weight
    return {name: (_chunk(length, grid),) for name, length in rows.items()}


def before_backward(stage: nn.Module, zero_stage: int, *, last: bool) -> None:
    """Say what the coming backward pass of a micro-batch does with weights and gradients."""
    if not isinstance(stage, FSDPModule) or stage.__dict__.get("coming_is_last") == last:
        return
    stage.__dict__["coming_is_last"] = last  # setting walks through all modules
    stage.set_is_last_backward(last)
    stage.set_requires_gradient_sync(last or zero_stage >= 2)
    stage.set_requires_all_reduce(last)  # replicas add up what their shards have accumulated
    stage.set_reshard_after_backward(last or zero_stage == 3)


def _chunk(length: int, grid: Grid) -> tuple[int, int]:
    """Return the rows of a tensor that FSDP2 leaves on this data rank."""
    rank, chunk = grid.rank("data"), -(-length // grid.size("data"))
    return min(length, rank * chunk), min(length, (rank + 1) * chunk)


def _fsdp(group: list[nn.Module]) -> FSDPModule:
    """Return the module that speaks for a group."""
    module = group[0]
    assert isinstance(module, FSDPModule)
    return module


def _sum_gradients(stage: nn.Module) -> None:
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def _set_prefetch(groups: list[list[nn.Module]]) -> None:
    """Gather the next group while one runs backward.

    Named, because FSDP2 would take the order from the last forward passes, and micro-batches
    interleave; the first group names itself (nothing to do) to switch that guess off.
    """
    modules = [_fsdp(group) for group in groups]
    for module, before in zip(modules, [modules[0], *modules], strict=False):
        module.set_modules_to_backward_prefetch([before])


def synchronise_on_gpu(device: torch.device) -> None:
    """Wait until the GPU has done what was asked of it, so that its marks can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
