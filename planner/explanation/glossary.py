"""Plain explanations of the parts of a plan, of its step time and of its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from cost_models.partition.schedules import SPLIT
from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from cost_models.units import format_seconds
from hardware_profiles.cluster.links.groups import group_link, point_to_point_link
from hardware_profiles.cluster.links.tree import is_regular, neighbour_link, ring_link
from hardware_profiles.cluster.schema import Cluster

ZERO: Final = {
    0: "every one of them keeps the whole weights, gradients and optimizer states (ZeRO 0)",
    1: "each keeps all weights and gradients, but updates only its share of them, so that the "
    "optimizer's states are split up (ZeRO 1)",
    2: "optimizer states and gradients are split up among them; each keeps all weights (ZeRO 2)",
    3: "weights, gradients and optimizer states are split up among them, and a layer's weights are "
    "gathered just before they are used (ZeRO 3, also called FSDP)",
}
RECOMPUTE: Final = {
    "none": "Everything that the backward pass needs is kept (no recomputation).",
    "selective": "The inside of the attention is computed a second time in the backward pass; that "
    "costs little and saves its memory (selective recomputation).",
    "selective_ops": "Results of matrix products are kept, the cheap rest is computed a second "
    "time in the backward pass.",
    "ops:every-2nd-mm": "Results of attention and of every other matrix product are kept, the rest "
    "is computed a second time in the backward pass.",
    "full": "Only the input of a layer is kept; the layer is computed a second time in the "
    "backward pass, which costs up to a third more computation and saves most of the memory (full "
    "recomputation).",
}
# explanations of the parts of a step's time
TIME_EXPLANATIONS: Final[Mapping[str, str]] = {
    "compute": "the model's own arithmetic; smaller pieces of a matrix keep the device less busy",
    "recompute": "layers that are computed a second time, to save memory",
    "host": "the device waits for the program that starts its operators",
    "tensor_communication": "tensor-parallel ranks add up their parts of every layer, twice a pass",
    "expert_communication": "tokens travel to the ranks that hold their experts, and back",
    "context_communication": "ranks that share a sequence exchange keys and values",
    "pipeline_communication": "a stage sends its results to the next one",
    "bubble": "stages wait while the pipeline fills and drains",
    "data_communication": "gradients are added up over the data-parallel ranks, and weights "
    "gathered",
    "optimizer": "the weights are updated",
}
MEMORY_EXPLANATIONS: Final[Mapping[str, str]] = {
    "weights": "the parameters that a device holds, fp32 master copies included",
    "gradients": "one number for each parameter that it trains",
    "optimizer": "the states of the optimizer, such as Adam's two moments",
    "activations": "results of the forward pass that the backward pass needs",
    "logits": "scores of every word of the vocabulary, at the loss",
    "buffers": "communication buffers and gathered layers",
    "runtime": "memory of the driver, the libraries and the allocator",
}


def describe(scenario: Scenario, plan: Plan) -> tuple[str, ...]:
    """Return a plan in sentences, from the outermost split to the innermost."""
    return tuple(_sentences(scenario, plan))


def _sentences(scenario: Scenario, plan: Plan) -> Iterator[str]:
    batch = scenario.workload.global_batch_size
    yield from _data(plan, batch)
    if plan.pipeline_parallel > 1:
        yield from _pipeline(scenario, plan)
    if plan.tensor_parallel > 1:
        yield from _tensor(scenario, plan)
    if plan.context_parallel > 1:
        ranks, tokens = plan.context_parallel, scenario.workload.seq_len
        yield (
            f"Context parallelism {ranks}: {ranks} ranks share each sequence of {tokens:,} tokens, "
            f"{place(scenario.cluster, plan, 'context')}."
        )
    if plan.expert_parallel > 1:
        ranks = plan.expert_parallel
        yield (
            f"Expert parallelism {ranks}: the experts of a layer are distributed over "
            f"{ranks} ranks; tokens travel to their experts and back, "
            f"{place(scenario.cluster, plan, 'expert')}."
        )
    setting, _, modules = plan.recompute.partition("modules:")
    named = f"Parts of a layer are computed a second time in the backward pass: {modules}."
    yield (named if modules else RECOMPUTE[setting]) + _some_layers(scenario, plan)
    if plan.offload != "none":
        yield f"Offloaded to the memory or the drives of the host: {plan.offload}."


def _sequences(count: int) -> str:
    return f"{count:,} sequence" + "s" * (count != 1)


def _data(plan: Plan, batch: int) -> Iterator[str]:
    size, count = plan.micro_batch_size, plan.num_microbatches
    each = f"{count:,} micro-batch{'es' if count > 1 else ''} of {size:,}"
    groups = plan.data_parallel
    if plan.data_parallel == 1:
        yield f"The {_sequences(batch)} of a step are processed in {each}."
        return
    yield (
        f"Data parallelism {groups}: {groups} groups train on different parts of the batch, "
        f"{_sequences(batch // groups)} each, in {each}; {ZERO[plan.zero_stage]}"
        + (
            f", inside {plan.dp_replicate} copies of {plan.dp_shard} ranks each"
            if plan.dp_replicate > 1
            else ""
        )
        + "."
    )


def _pipeline(scenario: Scenario, plan: Plan) -> Iterator[str]:
    layers = scenario.model.num_layers
    stages = f"{plan.pipeline_parallel} stages"
    if plan.virtual_stages > 1:
        stages += f", each of {plan.virtual_stages} separate pieces of the model"
    split = "; weight gradients wait for idle moments" if plan.pipeline_schedule in SPLIT else ""
    yield (
        f"Pipeline parallelism {plan.pipeline_parallel}: the {layers} layers are cut into "
        f"{stages}, and micro-batches flow through them ({plan.pipeline_schedule}{split}); stages "
        f"exchange little data, {place(scenario.cluster, plan, 'pipeline')}, but wait while the "
        "pipeline fills and drains."
    )


def _tensor(scenario: Scenario, plan: Plan) -> Iterator[str]:
    also = "; norms and dropout are split along the sequence" if plan.sequence_parallel else ""
    ranks = plan.tensor_parallel
    yield (
        f"Tensor parallelism {ranks}: every matrix is split over {ranks} ranks, which exchange "
        "results several times a layer and wait for them, "
        f"{place(scenario.cluster, plan, 'tensor')}{also}."
    )


def _some_layers(scenario: Scenario, plan: Plan) -> str:
    by_stage = scenario.stage_recompute_layers
    if plan.recompute == "none" or not (plan.recompute_layers or by_stage):
        return ""
    if by_stage is not None:
        return f" Only the first {', '.join(map(str, by_stage))} layers of the stages."
    of = f"{plan.recompute_every} layers of a stage" if plan.recompute_every else "stage's layers"
    return f" This applies only to the first {plan.recompute_layers} of every {of}."


def layout(plan: Plan, axis: str) -> tuple[int, int]:
    """Return size and stride of the groups of an axis.

    >>> layout(Plan(data_parallel=4, tensor_parallel=8, zero_stage=1), "data")
    (4, 8)
    """
    tensor, shard = plan.tensor_parallel, plan.shard_ranks
    between = tensor if plan.expert_tensor_parallel else 1
    return {
        "tensor": (tensor, 1),
        "context": (plan.context_parallel, tensor),
        "data": (shard, tensor),
        "replicate": (plan.dp_replicate, tensor * shard),
        "expert": (plan.expert_parallel, between),
        "pipeline": (plan.pipeline_parallel, tensor * shard * plan.dp_replicate),
    }[axis]


def place(cluster: Cluster, plan: Plan, axis: str) -> str:
    """Return the links over which the groups of an axis communicate, with their bandwidth.

    >>> from hardware_profiles.cluster.parse import parse_cluster
    >>> place(parse_cluster("2xDGX-A100-80GB"), Plan(tensor_parallel=16), "tensor")
    'over the network between nodes, 200 GB/s'
    """
    size, stride = layout(plan, axis)
    if axis == "pipeline":
        bandwidth, _ = point_to_point_link(cluster, stride, group_size=size)
    else:
        bandwidth, _ = group_link(cluster, size, stride)
    rate = f"{float(f'{float(np.ravel(bandwidth)[0]) / 1e9:.3g}'):g} GB/s"
    if cluster.accelerator.device == "cpu":
        return f"between processes, {rate}"
    if not is_regular(cluster):
        link = neighbour_link if axis == "pipeline" else ring_link
        level = link(cluster, size, stride, cluster.num_gpus).level
        return f"over {(cluster.levels or cluster.tiers)[level].name}, {rate}"
    inner, span = cluster.tiers[0], size * stride
    inside = plan.world_size <= inner.domain_size or inner.domain_size % span == 0
    if inside:
        return f"inside a node, {rate}" if cluster.num_nodes > 1 else f"over {inner.name}, {rate}"
    if axis == "pipeline" and size > 2 and stride < inner.domain_size:  # one neighbour is inside
        return f"partly over the network between nodes, {rate} on average"
    return f"over the network between nodes, {rate}"


AXES_OF_TIME: Final[Mapping[str, tuple[str, ...]]] = {
    "tensor_communication": ("tensor",),
    "expert_communication": ("expert",),
    "context_communication": ("context",),
    "pipeline_communication": ("pipeline",),
    "data_communication": ("data", "replicate"),
}


def explain_time(scenario: Scenario, plan: Plan, part: str) -> str:
    """Return the explanation of a part of the time; with ranks and links of communication."""
    words = TIME_EXPLANATIONS[part]
    talks = [
        f"{size} ranks, {place(scenario.cluster, plan, axis)}"
        for axis in AXES_OF_TIME.get(part, ())
        if (size := layout(plan, axis)[0]) > 1
    ]
    return f"{words}: {' and '.join(talks)}" if talks else words


def signed_seconds(seconds: float) -> str:
    """Return a difference with its sign.

    >>> signed_seconds(-0.25)
    '-250 ms'
    """
    return ("-" if seconds < 0 else "+") + format_seconds(abs(seconds))
