"""Seconds of one pipeline rank: the terms of a micro-batch, and those of a step.

    micro-batch = compute + recompute + host + tensor + experts + context + pipeline sends
    step        = data-parallel traffic + optimizer            before any overlap between the two

Units: seconds, columns of a plan table. A pair of numbers is (forward, backward).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec.structs import astuple

from cost_models.activations.document_masks import as_computed
from cost_models.activations.fp8 import gathered_bytes, gathered_matrix_share
from cost_models.arrays import Real, holds
from cost_models.communication.context_parallel import (
    computed_score_share,
    context_bytes_moved_per_token,
    exposed_context_seconds,
    is_blockwise,
    sum_bytes,
)
from cost_models.communication.expert_parallel import (
    expert_groups,
    exposed_all_to_all_seconds,
    max_experts_per_token,
    most_loaded,
)
from cost_models.communication.host_link import (
    host_accumulation_seconds,
    host_link,
    host_memory_bandwidth,
    host_update_seconds,
    nvme_seconds,
    states_link,
    without_offload,
)
from cost_models.communication.seconds import axis_seconds
from cost_models.communication.traffic import Traffic, TrafficOptions
from cost_models.communication.volumes import (
    pass_traffic,
    scattered_stage_messages,
    shared_gradient_traffic,
)
from cost_models.compute.attention import core_ratio
from cost_models.compute.elementwise import optimizer_seconds
from cost_models.compute.head import head_seconds
from cost_models.compute.kernel_launch import operator_seconds
from cost_models.compute.layer import LayerWork, PassSeconds, layer_seconds
from cost_models.compute.rates import Rates
from cost_models.memory.gradients import reduces_once
from cost_models.memory.optimizer_states import OPTIMIZER_TRAITS, updated_elements
from cost_models.model.spec import LayerKind
from cost_models.partition.rank_view import RankView
from cost_models.partition.recomputed_layers import repeated_by_setting
from cost_models.plan.plan import NVME
from cost_models.plan.recompute import CORE, FULL, by_operator, repeats_module
from cost_models.step_time.data_parallel_phases import data_phases
from cost_models.step_time.host_waits import (
    DevicePasses,
    DeviceSeconds,
    Pair,
    deferred_seconds,
    waiting_seconds,
)
from cost_models.step_time.optimizer_update import host_accesses, update_accesses, update_flops
from cost_models.step_time.overlap import exposed_message_seconds
from cost_models.step_time.parts import RankSeconds
from cost_models.step_time.tensor_parallel_overlap import tensor_seconds
from cost_models.step_time.unexplained import unexplained_factor


def rank_seconds(view: RankView, rate: Rates) -> RankSeconds:
    """Return the seconds of one pipeline rank, of a micro-batch and of a step, term by term."""
    if rate.host_is_device:
        view = view.with_table(without_offload(view.table))
    table, microbatches = view.table, view.table.num_microbatches
    device = device_seconds(view, rate)
    traffic, by_axis = step_traffic(view)
    tensor, context = exposed_inside(view, rate, by_axis, device.weights, device.core)
    inside = tensor[0] + context[0], tensor[1] + context[1]
    sent = exposed_inside(view, rate, by_axis, 0.0, 0.0)
    link = host_link(view.cluster, table, view.software)
    phases = data_phases(traffic, by_axis, table, view.parameters, view.software)
    shard = updated_elements(view)
    passes = DevicePasses(view, rate, device, inside, link)
    starts = operator_seconds(view, rate.operator)
    host = waiting_seconds(passes, starts)
    backward = device.backward + device.recompute
    seconds = RankSeconds(
        compute=device.forward + device.backward,
        recompute=device.recompute,
        host=host[0] + host[1],
        tensor_communication=tensor[0] + tensor[1],
        tensor_surplus=tensor[1] - tensor[0],
        context_surplus=context[1] - context[0],
        hidden_forward=sent[0][0] + sent[1][0] - inside[0],
        hidden_backward=sent[0][1] + sent[1][1] - inside[1],
        context_communication=context[0] + context[1],
        pipeline_communication=exposed_message_seconds(
            by_axis["pipeline"] / microbatches,
            device.forward + backward,
            table,
            view.software,
        )
        + traffic["pipeline", "send"].count * view.software.host.message_seconds / microbatches,
        backward=backward + host[1],
        host_backward=host[1],
        launches_forward=starts[0],
        launches_backward=starts[1],
        weights=deferred_seconds(passes, starts, host),
        expert_communication=exposed_all_to_all_seconds(
            by_axis["expert"] / microbatches,
            device.forward + device.backward + device.recompute,
            view,
        ),
        data_communication=by_axis["data"] + by_axis["expert_data"] + by_axis["secondary"],
        gathered_forward=phases.forward,
        first_gathers=phases.first,
        last_reductions=phases.last,
        replica_communication=by_axis["replicate"],
        replicas_use_other_links=table.shard_ranks * table.tensor_parallel
        <= view.cluster.tiers[0].domain_size,
        optimizer=optimizer_term(view, rate, by_axis["world"], link, shard),
    )
    if view.software.learned is None:
        return seconds
    return seconds.times(unexplained_factor(view.scenario, table))


def device_seconds(view: RankView, rate: Rates) -> DeviceSeconds:
    """Seconds that the device computes: all layers of the rank, and the head on the last rank.

    Layers without a backward pass are computed forward only.
    """
    forward, backward, again, later, core = (np.zeros(len(view.table)) for _ in range(5))
    layers = view.layers
    blocks = _seconds_of_blocks(view, tuple(each.kind for each in layers), rate)
    for each, one in zip(layers, blocks, strict=False):
        core = core + each.count * one.core
        forward = forward + each.count * one.forward
        backward = backward + each.trained * one.backward
        again = again + each.run_again * one.recompute
        later = later + each.trained * one.weights
    if holds(view.rank.last):
        forward = forward + view.rank.last * blocks[-1].forward
        backward = backward + view.rank.last * blocks[-1].backward
    return DeviceSeconds(forward, backward, again, later, core)


# columns of a plan on which the work of a layer and of the head depends
LAYER_COLUMNS: Final = (
    "tensor_parallel",
    "sequence_parallel",
    "context_parallel",
    "context_parallel_method",
    "expert_parallel",
    "expert_tensor_parallel",
    "micro_batch_size",
    "recompute",
)
HEAD_COLUMNS: Final = ("tensor_parallel", "context_parallel", "micro_batch_size")


def _seconds_of_blocks(
    view: RankView, kinds: tuple[LayerKind, ...], rate: Rates
) -> list[PassSeconds]:
    """Return the seconds of one layer of each kind, then of the head if the rank has it."""

    def of_kind(kind: LayerKind) -> PassSeconds:
        def price(view: RankView) -> tuple[Real, ...]:
            return astuple(layer_seconds(layer_work(view, kind, rate)))

        return PassSeconds(*view.on_known_rows(LAYER_COLUMNS, price, kind, rate))

    def price_head(view: RankView) -> tuple[Real, ...]:
        sizes = view.model, view.at_head.tokens, view.table.tensor_parallel, view.compute_bytes
        return astuple(head_seconds(*sizes, rate, view.software))

    found = [of_kind(kind) for kind in kinds]
    if holds(view.rank.last):
        found.append(PassSeconds(*view.on_known_rows(HEAD_COLUMNS, price_head, rate)))
    return found


def layer_work(view: RankView, kind: LayerKind, rate: Rates) -> LayerWork:
    """Return the work of one layer under the plans of a view."""
    view = view.own(kind)
    model, workload, table = view.model, view.workload, view.table
    around = by_operator(table.recompute)
    scores_again = (workload.attention_kernel == "eager") & ~is_blockwise(table)
    return LayerWork(
        kind=as_computed(kind, workload, view.software),
        hidden_size=model.hidden_size,
        seq_len=workload.seq_len,
        tokens=view.tokens,
        tensor_parallel=table.tensor_parallel,
        sequence_parallel=table.sequence_parallel,
        expert_tensor=table.expert_tensor,
        expert_parallel=table.expert_parallel,
        recompute_full=table.recompute == FULL,
        recompute_core=np.logical_or(repeats_module(table.recompute, CORE), around & scores_again),
        recompute_around=around,
        recompute_matrices=repeated_by_setting(kind, table),
        recompute_norms=repeats_module(table.recompute, "layernorm"),
        recompute_activation=repeats_module(table.recompute, "moe_act")
        | repeats_module(table.recompute, "moe")
        | repeats_module(table.recompute, "mlp"),
        kernel=workload.attention_kernel,
        compute_bytes=view.compute_bytes,
        rate=rate,
        software=view.software,
        computed_score_share=computed_score_share(
            workload.attention_kernel, table.context_parallel, is_blockwise(table)
        ),
        context_bytes=context_bytes_moved_per_token(
            kind.attention, view.compute_bytes, sum_bytes(view.compute_bytes, view.software), table
        ),
        hidden_dropout=model.hidden_dropout > 0,
        attention_dropout=model.attention_dropout > 0,
    )


def step_traffic(view: RankView) -> tuple[dict[tuple[str, str], Traffic], dict[str, Real]]:
    """Return the collectives of a step, and their seconds by axis."""
    software, table = view.software, view.table
    options = TrafficOptions(
        gather_bytes=gathered_bytes(view.workload, software),
        regathers_inputs=not software.activations.keeps_gathered_inputs,
        gathers_per_matrix=software.communication.gathers_by_matrix,
        gathers_logits=software.loss.gathers_logits,
        matrix_share=gathered_matrix_share(view.workload, software),
        reduces_once=reduces_once(software, table),
        all_reduces=software.gradients.all_reduced,
    )
    traffic = pass_traffic(view, options=options)
    if software.pipeline.scatters_messages:
        traffic = scattered_stage_messages(traffic, view)
    once = {
        "copies": max_experts_per_token(view.model) * software.communication.exchanges_once_a_node,
        "groups": expert_groups(view.model),
        "links": view.links,
    }
    seconds = axis_seconds(traffic, view.cluster, software, table, **once)
    mixture = max(view.model.kinds, key=lambda kind: kind.feed_forward.experts_per_token)
    loaded = most_loaded(mixture.feed_forward, table.expert_parallel, software)
    return traffic, seconds | {"expert": loaded * seconds["expert"]}


def exposed_inside(
    view: RankView, rate: Rates, by_axis: dict[str, Real], weights: Real, core: Real
) -> tuple[Pair, Pair]:
    """Seconds of tensor- and context-parallel traffic that passes do not hide.

    ``weights``, ``core``: seconds of weight gradients and of a forward pass's attention cores,
    which hide traffic; with 0, all of it is exposed.
    """
    traffic = by_axis["tensor"] / view.table.num_microbatches
    tensor = tensor_seconds(traffic, weights, view.software, view.table)
    return tensor, context_seconds(view, rate, by_axis["context"], core)


def context_seconds(view: RankView, rate: Rates, traffic: Real, core: Real) -> Pair:
    """Seconds of context-parallel traffic that the cores of a pass do not hide.

    ``traffic``: of a step; ``core``: seconds of the cores of a forward pass.
    """
    heads = [layers.kind.attention.value_head_dim for layers in view.layers]  # none: an end alone
    return exposed_context_seconds(
        traffic / view.table.num_microbatches,
        core,
        core_ratio(view.workload.attention_kernel, rate, max(heads, default=0)) * core,
        view,
        overlaps=not rate.host_is_device,
    )


def optimizer_term(view: RankView, rate: Rates, world: Real, link: float, shard: Real) -> Real:
    """Seconds of a step outside its passes: update, training loop, sums of shared gradients.

    ``world``: seconds of collectives over all ranks (the gradient norm); ``shard``: parameters that
    the rank updates.
    """
    software, table = view.software, view.table
    shared = shared_gradient_traffic(view)
    sums = axis_seconds(shared, view.cluster, software, table, links=view.links)
    on_host = offloaded_update_seconds(view, link, shard)
    products = update_flops(view) / rate.of_core.matmul
    accesses = update_accesses(view.workload, software)
    on_device = optimizer_seconds(shard, rate, accesses) + products
    loop = 0.0 if rate.host_is_device else software.host.step_seconds
    return (
        np.where(table.offloads_optimizer, on_host, on_device)
        + software.host.step_operators * rate.operator
        + loop
        + world
        + sums["tensor"]
        + sums["pipeline"]
    )


def offloaded_update_seconds(view: RankView, link: float, shard: Real) -> Real:
    """Seconds of an update on the host: its cores, and its drives if the states are there."""
    workload, gpus = view.workload, view.cluster.gpus_per_node
    moved, on_one_core = host_accesses(workload, view.software)
    memory = host_memory_bandwidth(view.cluster)
    link, updates = states_link(link, view.software), view.software.optimizer
    cast = view.compute_bytes if updates.casts_on_host else 0.0
    on_host = host_update_seconds(
        shard, workload.master_bytes, link, gpus, moved, memory, on_one_core, cast
    )
    if updates.accumulates_on_host:
        microbatches = view.table.num_microbatches
        on_host = on_host + host_accumulation_seconds(shard, view.compute_bytes, link, microbatches)
    state_bytes = OPTIMIZER_TRAITS[workload.optimizer].states * workload.state_bytes
    stored = gpus * (workload.master_bytes + state_bytes) * shard
    return on_host + np.where(view.table.offload_device == NVME, nvme_seconds(stored), 0.0)
