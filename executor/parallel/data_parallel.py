"""Data parallelism and ZeRO (Rajbhandari et al., arXiv:1910.02054), on torch's FSDP2.

zero_stage 0  weights on every rank, gradients added up once a step: where they lie
              (``executor.parallel.gradient_all_reduce``), by FSDP2 in mixed precision, for its
              master weights
zero_stage 1  shards between steps; weights gathered and gradients scattered once a step
zero_stage 2  the same, gradients scattered at every micro-batch: only a shard accumulates
zero_stage 3  weights gathered for each forward and each backward pass of a group, freed after it

With ``dp_replicate`` (HSDP; Zhao et al., arXiv:2304.11277, sec. 3.2.2) all this happens inside
groups of dp_shard ranks, and once a step the same shards of all groups are added up. Ranks that
share the tokens of a sequence (context parallelism) share the weights as data ranks do. Experts
that are apart (``executor.parallel.expert_parallel``) are shared likewise, by the ranks with the
same ones.

A group is the embedding, one layer, or norm and head; a tied embedding and head share one. Losses
are divided by the tokens of the whole batch before they are differentiated, so gradients are only
summed. Under a pipeline all this holds as well: a backward pass of a stage is one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from cost_models.partition.tensor_sharding import shards_within_experts
from cost_models.plan.workload import Workload
from executor.compat import end_backward, parameter_groups, replicate
from executor.dtypes import COMPUTE_DTYPE, Kept, master_dtype
from executor.ops.deferred_weight_gradients import Due, Store, by_parameter, compute
from executor.parallel.gradient_all_reduce import Block, GradientSums
from executor.parallel.mesh import Grid, data_axis
from executor.parallel.stage_interface import PipelineStage


def distribute(stage: PipelineStage, grid: Grid, workload: Workload) -> dict[str, Kept]:
    """Share a stage's parameters over the data ranks; return what this rank keeps of them.

    With one data rank only mixed precision needs FSDP, for its master weights.
    """
    plan = grid.plan
    master, compute = master_dtype(workload), COMPUTE_DTYPE[workload.precision]
    sharing = _Sharing.of(stage, grid, workload)
    if not sharing.needed or (plan.zero_stage == 0 and not sharing.mixed):
        return {}
    policy = MixedPrecisionPolicy(compute, master) if sharing.mixed else MixedPrecisionPolicy()
    left_alone = sharing.left_alone
    kept = {} if plan.zero_stage == 0 else dict(_kept(stage, grid, left_alone))
    groups = list(stage.groups())
    head = stage.get_submodule(stage.family.head) if stage.last else None

    def share(modules: list[nn.Module] | nn.Module, mesh: DeviceMesh, frees: bool) -> None:
        if plan.zero_stage == 0 and mesh.size() > 1:
            replicate(modules, mesh=mesh, mp_policy=policy, ignored_params=left_alone)
        else:
            fully_shard(
                modules,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=frees,
                shard_placement_fn=placement,
                ignored_params=left_alone,
            )
        if mesh.size() > 1:  # else torch would divide by 1, into a copy
            _sum_gradients(_fsdp(modules if isinstance(modules, list) else [modules]))

    # the tensors that are cut along another dimension than the first
    inside = {stage.get_parameter(name) for name, part in kept.items() if part.dim == 1}

    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter in inside else None

    for module in [] if sharing.unshared else sharing.experts:
        share(module, grid.sharding_mesh("expert_data"), plan.zero_stage == 3)
    for group in groups:
        # the head is used again at once: it stays whole from its forward to its backward pass
        share(group, grid.sharding_mesh(), plan.zero_stage == 3 and head not in group)
    share(stage, grid.sharding_mesh(), False)
    if plan.zero_stage > 0 or grid.sharding_mesh().size() == 1:
        _set_prefetch(stage, groups)
        if stage.first and head not in groups[0] and _looks_up_only(groups[0]):
            _fsdp(groups[0]).set_unshard_in_backward(False)  # a look-up's gradient reads no weight
    return kept


def _kept(
    stage: PipelineStage, grid: Grid, left_alone: set[nn.Parameter]
) -> Iterator[tuple[str, Kept]]:
    """Yield what FSDP2 leaves of each parameter on this data rank: a chunk of its rows."""
    for name, layout in stage.layouts.items():
        parameter = stage.get_parameter(name)
        if parameter in left_alone:
            continue
        axis = data_axis(grid.plan, of_experts=layout.of_experts)
        ranks, rank = grid.size(axis), grid.rank(axis)
        dim = 0
        if layout.of_experts and parameter.dim() > 2:
            dim = int(shards_within_experts(parameter.size(0), parameter.size(1), ranks))
        length = parameter.size(dim)
        chunk = -(-length // ranks)
        yield name, Kept(dim, min(length, rank * chunk), min(length, (rank + 1) * chunk))


@dataclass(frozen=True, slots=True)
class _Sharing:
    """Which parameters of a stage data ranks share, and whether at all."""

    mixed: bool  # computes in another precision than the optimizer: only FSDP2 does that
    experts: list[nn.Module]  # that are apart
    unshared: bool  # no other rank holds the same experts
    left_alone: set[nn.Parameter]  # frozen weights, whole on every data rank, and such experts
    needed: bool  # there are other ranks, or there are two precisions

    @classmethod
    def of(cls, stage: PipelineStage, grid: Grid, workload: Workload) -> _Sharing:
        mixed = master_dtype(workload) != COMPUTE_DTYPE[workload.precision]
        experts = stage.experts_modules() if grid.plan.experts_apart else []
        unshared = bool(experts) and not mixed and grid.sharding_mesh("expert_data").size() == 1
        frozen = {p for p in stage.parameters() if not p.requires_grad}
        own = {p for module in experts for p in module.parameters()} if unshared else set()
        alone = grid.sharding_mesh().size() == 1 and (not experts or unshared)
        return cls(mixed, experts, unshared, frozen | own, mixed or not alone)


def add_up_gradients(stage: PipelineStage, grid: Grid, workload: Workload) -> None:
    """Let replicas in one precision add up the gradients of their weights, which have memory."""
    sharing = _Sharing.of(stage, grid, workload)
    if grid.plan.zero_stage == 0 and sharing.needed and not sharing.mixed:
        stage.__dict__["gradient_sums"] = GradientSums(list(_blocks(stage, grid, sharing)))


def _blocks(stage: PipelineStage, grid: Grid, sharing: _Sharing) -> Iterator[Block]:
    """Yield what is added up, as a backward pass completes it: a layer's experts, then the rest."""
    seen = set(sharing.left_alone)
    for group in [*reversed(list(stage.groups())), [stage]]:
        inner = [m for m in stage.experts_modules(group[0]) if m in sharing.experts]
        for axis, modules in (("expert_data", inner), ("data", group)):
            own = dict.fromkeys(p for module in modules for p in module.parameters())
            new = tuple(p for p in own if p not in seen)
            seen.update(new)
            if new:
                yield Block(new, grid.group(axis))


def gradient_sums(stage: PipelineStage) -> GradientSums | None:
    """Return what adds up the gradients of a stage, where that is not FSDP2."""
    found: GradientSums | None = stage.__dict__.get("gradient_sums")
    return found


def before_backward(
    stage: PipelineStage, zero_stage: int, *, last: bool, complete: bool = True
) -> None:
    """Say what the coming backward pass of a micro-batch does with weights and gradients.

    ``last``: it is the stage's last one in this step. Not ``complete``: the layers' weight
    gradients follow (``finish_gradients``), and are not reduced before.
    """
    sums = gradient_sums(stage)
    if sums is not None:
        sums.expect(last=last, complete=complete)
        return
    coming = (last, complete)
    if not isinstance(stage, FSDPModule) or stage.__dict__.get("coming_backward") == coming:
        return
    stage.__dict__["coming_backward"] = coming  # setting walks through all modules
    stage.set_is_last_backward(last and complete)
    stage.set_reshard_after_backward((last and complete) or zero_stage == 3)
    reduces = last or zero_stage >= 2
    stage.set_requires_gradient_sync(reduces and complete)
    if not complete:
        for group in stage.groups():
            if group[0] not in stage.layers():
                _fsdp(group).set_requires_gradient_sync(reduces)
    # replicas add up what their shards have accumulated; the setting before decides it too
    stage.set_requires_all_reduce(last)


def keep_apart(stage: PipelineStage, zero_stage: int, due: Store) -> None:
    """Put what a backward pass gave beside its weight gradients: all are reduced together.

    Where every micro-batch is reduced for itself (ZeRO 2 and 3), and others are in between.
    """
    if isinstance(stage, FSDPModule) and zero_stage >= 2:
        for group in parameter_groups(stage):
            for parameter, gradient in group.take():
                due.append(Due((parameter,), partial(list, (gradient,))))


def finish_gradients(stage: PipelineStage, zero_stage: int, due: Store, *, last: bool) -> None:
    """Compute the weight gradients that a backward pass left, and reduce them as it would have.

    A group (a layer) is reduced as soon as its gradients are complete, behind those of the next.
    """
    sums = gradient_sums(stage)
    if sums is not None:
        sums.complete(due, last=last)
        return
    if not isinstance(stage, FSDPModule):
        compute(due)
        return
    before_backward(stage, zero_stage, last=last)
    waiting = by_parameter(due)
    for group in parameter_groups(stage):
        for parameter in group.whole:
            compute(waiting.pop(id(parameter), []))
        group.end()
    for alone in waiting.values():  # of weights that no other rank holds
        compute(alone)
    end_backward(stage)


def after_last_backward(stage: PipelineStage) -> None:
    """Start to add up what the last backward pass of a step has left."""
    sums = gradient_sums(stage)
    if sums is not None:
        sums.finish()


def wait_for_gradients(stage: PipelineStage) -> None:
    """Wait until a step's gradients are added up, behind all of its backward passes."""
    sums = gradient_sums(stage)
    if sums is not None:
        sums.wait()


def _looks_up_only(group: list[nn.Module]) -> bool:
    return all(isinstance(module, nn.Embedding) for module in group)


def _fsdp(group: list[nn.Module]) -> FSDPModule:
    """Return the module that speaks for a group."""
    module = group[0]
    assert isinstance(module, FSDPModule)
    return module


def _sum_gradients(module: FSDPModule) -> None:
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def _set_prefetch(stage: PipelineStage, groups: list[list[nn.Module]]) -> None:
    """Gather the next group while one runs backward; experts apart are a group inside a layer's.

    Named, because FSDP2 would take the order from the last forward passes, and micro-batches
    interleave; the first group names itself (nothing to do) to switch that guess off.
    """
    modules: list[FSDPModule] = []
    for group in groups:
        inner = [m for m in stage.experts_modules(group[0]) if isinstance(m, FSDPModule)]
        modules += [*inner, _fsdp(group)]
    for module, before in zip(modules, [modules[0], *modules], strict=False):
        module.set_modules_to_backward_prefetch([before])


def synchronise_on_gpu(device: torch.device) -> None:
    """Wait until the GPU has done what was asked of it, so that its marks can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
