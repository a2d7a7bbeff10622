"""Data parallelism and ZeRO (Rajbhandari et al., arXiv:1910.02054), on torch's FSDP2.

zero_stage 0  weights on every rank, gradients reduced once a step: in their own buffers
              (``executor.parallel.gradient_all_reduce``), or in mixed precision by FSDP2, which
              keeps the master weights
zero_stage 1  shards between steps; weights gathered and gradients scattered once a step
zero_stage 2  as 1, but gradients are scattered at every micro-batch: only a shard accumulates
zero_stage 3  weights gathered for each forward and each backward pass of a group, then freed

With ``dp_replicate`` (HSDP; Zhao et al., arXiv:2304.11277, sec. 3.2.2) all this happens inside
groups of dp_shard ranks, and the shards are all-reduced across groups once a step. Ranks that share
the tokens of a sequence (context parallelism) share the weights as data ranks do. Experts with
their own data axis (``executor.parallel.expert_parallel``) are sharded likewise, over the ranks
that hold the same experts.

A group is the embedding, one layer, or norm and head; a tied embedding and head share one. Losses
are divided by the tokens of the whole batch before they are differentiated, so gradients are only
summed. Under a pipeline the same holds: one backward pass of a stage is one micro-batch.
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
from executor.dtypes import COMPUTE_DTYPE, ParameterSlice, master_dtype
from executor.ops.deferred_weight_gradients import (
    DeferredGradient,
    DeferredGradients,
    compute_deferred,
    group_by_parameter,
)
from executor.parallel.gradient_all_reduce import GradientBucket, GradientReducer
from executor.parallel.mesh import ProcessGrid, data_axis
from executor.parallel.stage_interface import PipelineStage


def shard_parameters(
    stage: PipelineStage, grid: ProcessGrid, workload: Workload
) -> dict[str, ParameterSlice]:
    """Shard or replicate a stage's parameters over the data ranks; return this rank's slices.

    With one data rank FSDP2 is used in mixed precision only, for its master weights.
    """
    plan = grid.plan
    master, compute = master_dtype(workload), COMPUTE_DTYPE[workload.precision]
    sharing = _Sharing.of(stage, grid, workload)
    if not sharing.needed or (plan.zero_stage == 0 and not sharing.mixed):
        return {}
    policy = MixedPrecisionPolicy(compute, master) if sharing.mixed else MixedPrecisionPolicy()
    ignored = sharing.ignored
    slices = {} if plan.zero_stage == 0 else dict(_parameter_slices(stage, grid, ignored))
    groups = list(stage.groups())
    head = stage.get_submodule(stage.family.head) if stage.last else None

    def share(modules: list[nn.Module] | nn.Module, mesh: DeviceMesh, reshards: bool) -> None:
        # experts that one rank has, too: as roots of their own they would keep their copies
        if plan.zero_stage == 0 and grid.sharding_mesh().size() > 1:
            replicate(modules, mesh=mesh, mp_policy=policy, ignored_params=ignored)
        else:
            fully_shard(
                modules,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=reshards,
                shard_placement_fn=placement,
                ignored_params=ignored,
            )
        if mesh.size() > 1:  # otherwise torch divides by 1, into a copy
            _sum_gradients(_fsdp_module(modules if isinstance(modules, list) else [modules]))

    # tensors sharded along dimension 1 instead of 0
    inside = {stage.get_parameter(name) for name, part in slices.items() if part.dim == 1}

    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter in inside else None

    for module in [] if sharing.unshared else sharing.experts:
        share(module, grid.sharding_mesh("expert_data"), plan.zero_stage == 3)
    for group in groups:
        # the head is used again at once: it stays gathered from its forward to its backward pass
        share(group, grid.sharding_mesh(), plan.zero_stage == 3 and head not in group)
    share(stage, grid.sharding_mesh(), False)
    if plan.zero_stage > 0 or grid.sharding_mesh().size() == 1:
        _set_prefetch(stage, groups)
        looked_up = all(isinstance(module, nn.Embedding) for module in groups[0])
        if stage.first and head not in groups[0] and looked_up:
            # the gradient of a look-up needs no weight
            _fsdp_module(groups[0]).set_unshard_in_backward(False)
    return slices


def _parameter_slices(
    stage: PipelineStage, grid: ProcessGrid, ignored: set[nn.Parameter]
) -> Iterator[tuple[str, ParameterSlice]]:
    """Yield the slice of each parameter that FSDP2 leaves on this data rank."""
    for name, layout in stage.layouts.items():
        parameter = stage.get_parameter(name)
        if parameter in ignored:
            continue
        axis = data_axis(grid.plan, of_experts=layout.of_experts)
        ranks, rank = grid.size(axis), grid.rank(axis)
        dim = 0
        if layout.of_experts and parameter.dim() > 2:
            dim = int(shards_within_experts(parameter.size(0), parameter.size(1), ranks))
        length = parameter.size(dim)
        chunk = -(-length // ranks)
        yield name, ParameterSlice(dim, min(length, rank * chunk), min(length, (rank + 1) * chunk))


@dataclass(frozen=True, slots=True)
class _Sharing:
    """Sharding of the parameters of a stage over data ranks, if any."""

    mixed: bool  # compute precision differs from the optimizer's: only FSDP2 supports that
    experts: list[nn.Module]  # modules whose experts have their own data axis
    unshared: bool  # no other rank holds the same experts
    ignored: set[nn.Parameter]  # frozen weights, whole on every data rank; unshared experts
    needed: bool  # several data ranks, or two precisions

    @classmethod
    def of(cls, stage: PipelineStage, grid: ProcessGrid, workload: Workload) -> _Sharing:
        mixed = master_dtype(workload) != COMPUTE_DTYPE[workload.precision]
        experts = stage.expert_modules() if grid.plan.experts_apart else []
        unshared = bool(experts) and not mixed and grid.sharding_mesh("expert_data").size() == 1
        frozen = {p for p in stage.parameters() if not p.requires_grad}
        own = {p for module in experts for p in module.parameters()} if unshared else set()
        alone = grid.sharding_mesh().size() == 1 and (not experts or unshared)
        return cls(mixed, experts, unshared, frozen | own, mixed or not alone)


def enable_gradient_reducer(stage: PipelineStage, grid: ProcessGrid, workload: Workload) -> None:
    """Reduce the gradients of replicas in one precision without FSDP2."""
    sharing = _Sharing.of(stage, grid, workload)
    if grid.plan.zero_stage == 0 and sharing.needed and not sharing.mixed:
        stage.__dict__["gradient_sums"] = GradientReducer(list(_buckets(stage, grid, sharing)))


def _buckets(
    stage: PipelineStage, grid: ProcessGrid, sharing: _Sharing
) -> Iterator[GradientBucket]:
    """Yield the gradient buckets in backward order: a layer's experts, then its other weights."""
    seen = set(sharing.ignored)
    for group in [*reversed(list(stage.groups())), [stage]]:
        inner = [m for m in stage.expert_modules(group[0]) if m in sharing.experts]
        for axis, modules in (("expert_data", inner), ("data", group)):
            own = dict.fromkeys(p for module in modules for p in module.parameters())
            new = tuple(p for p in own if p not in seen)
            seen.update(new)
            if new:
                yield GradientBucket(new, grid.group(axis))


def gradient_reducer(stage: PipelineStage) -> GradientReducer | None:
    """Return the gradient reducer of a stage, or None where FSDP2 reduces."""
    found: GradientReducer | None = stage.__dict__.get("gradient_sums")
    return found


def configure_backward(
    stage: PipelineStage, zero_stage: int, *, last: bool, complete: bool = True
) -> None:
    """Configure gradient reduction and resharding for the next backward pass of a micro-batch.

    ``last``: the stage's last backward pass in this step. Not ``complete``: the layers' weight
    gradients follow (``compute_weight_gradients``) and are not reduced before.
    """
    reducer = gradient_reducer(stage)
    if reducer is not None:
        reducer.expect(last=last, complete=complete)
        return
    mode = (last, complete)
    if not isinstance(stage, FSDPModule) or stage.__dict__.get("backward_mode") == mode:
        return
    stage.__dict__["backward_mode"] = mode  # the setters below visit every module
    stage.set_is_last_backward(last and complete)
    stage.set_reshard_after_backward((last and complete) or zero_stage == 3)
    reduces = last or zero_stage >= 2
    stage.set_requires_gradient_sync(reduces and complete)
    if not complete:
        for group in stage.groups():
            if group[0] not in stage.layers():
                _fsdp_module(group).set_requires_gradient_sync(reduces)
    # replicas reduce what their shards have accumulated; this overrides the setting above
    stage.set_requires_all_reduce(last)


def defer_other_gradients(
    stage: PipelineStage, zero_stage: int, deferred: DeferredGradients
) -> None:
    """Defer the other gradients of a backward pass until its weight gradients are reduced.

    Applies where every micro-batch is reduced on its own (ZeRO 2 and 3) and other micro-batches run
    in between.
    """
    if isinstance(stage, FSDPModule) and zero_stage >= 2:
        for group in parameter_groups(stage):
            for parameter, gradient in group.take():
                deferred.append(DeferredGradient((parameter,), partial(list, (gradient,))))


def compute_weight_gradients(
    stage: PipelineStage, zero_stage: int, deferred: DeferredGradients, *, last: bool
) -> None:
    """Compute and reduce the weight gradients that an input-only backward pass deferred.

    A group (a layer) is reduced as soon as its gradients are complete, overlapping the computation
    of the next group's gradients.
    """
    reducer = gradient_reducer(stage)
    if reducer is not None:
        reducer.complete(deferred, last=last)
        return
    if not isinstance(stage, FSDPModule):
        compute_deferred(deferred)
        return
    configure_backward(stage, zero_stage, last=last)
    remaining = group_by_parameter(deferred)
    for group in parameter_groups(stage):
        for parameter in group.whole:
            compute_deferred(remaining.pop(id(parameter), []))
        group.end()
    for alone in remaining.values():  # weights that no other rank holds
        compute_deferred(alone)
    end_backward(stage)


def finish_backward(stage: PipelineStage) -> None:
    """Start the remaining gradient reductions after the last backward pass of a step."""
    reducer = gradient_reducer(stage)
    if reducer is not None:
        reducer.finish()


def wait_for_gradients(stage: PipelineStage) -> None:
    """Wait for all gradient reductions of a step."""
    reducer = gradient_reducer(stage)
    if reducer is not None:
        reducer.wait()


def _fsdp_module(group: list[nn.Module]) -> FSDPModule:
    """Return the module that represents a group in FSDP2."""
    module = group[0]
    assert isinstance(module, FSDPModule)
    return module


def _sum_gradients(module: FSDPModule) -> None:
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def _set_prefetch(stage: PipelineStage, groups: list[list[nn.Module]]) -> None:
    """Prefetch the next group's weights in the backward pass; experts form an inner group.

    The order is set explicitly, because FSDP2 would take it from the last forward passes, and
    micro-batches interleave; the first group names itself (a no-op) to disable that guess.
    """
    modules: list[FSDPModule] = []
    for group in groups:
        inner = [m for m in stage.expert_modules(group[0]) if isinstance(m, FSDPModule)]
        modules += [*inner, _fsdp_module(group)]
    for module, before in zip(modules, [modules[0], *modules], strict=False):
        module.set_modules_to_backward_prefetch([before])


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on the GPU, so that CUDA events can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
