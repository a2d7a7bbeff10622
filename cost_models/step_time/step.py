"""Seconds of one training step, in parts that add up.

    step = ideal compute + recompute + tensor-parallel + experts + context-parallel
           + pipeline sends + host + bubble + exposed data-parallel + optimizer

A pipeline of stages r = 1..p that need tau_r seconds a micro-batch takes, for m micro-batches and v
virtual stages,

    m max(tau) + (sum(tau) - max(tau)) / v

the critical path of 1F1B and GPipe alike (Narayanan et al., arXiv:2104.04473, sec. 2.2). Units:
seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cost_models.activations.document_masks import as_computed
from cost_models.activations.fp8 import gathered_bytes
from cost_models.activations.live import layer_bytes
from cost_models.arrays import Real, pick
from cost_models.communication.context_parallel import (
    computed_score_share,
    exposed_context_seconds,
    is_blockwise,
    rank_tokens,
)
from cost_models.communication.expert_parallel import (
    exposed_all_to_all_seconds,
    max_experts_per_token,
)
from cost_models.communication.host_link import (
    activation_offload_seconds,
    host_link,
    host_update_seconds,
    nvme_seconds,
    weight_fetch_seconds,
    without_offload,
)
from cost_models.communication.seconds import axis_seconds
from cost_models.communication.traffic import TrafficOptions
from cost_models.communication.volumes import (
    pass_traffic,
    scattered_stage_messages,
    shared_gradient_traffic,
)
from cost_models.compute.adapter_groups import adapter_wait
from cost_models.compute.head import head_seconds
from cost_models.compute.kernel_launch import host_wait, operator_seconds
from cost_models.compute.layer import core_ratio, layer_seconds, optimizer_seconds
from cost_models.compute.rates import Rates
from cost_models.memory.gradients import reduces_once
from cost_models.memory.optimizer_states import RULES, update_accesses, update_flops
from cost_models.model.lora import trainable_part
from cost_models.model.spec import ModelSpec
from cost_models.partition.rank_parameters import table_parameters
from cost_models.partition.stages import PipelineRank
from cost_models.plan.plan import FULL, NVME, SELECTIVE, SELECTIVE_OPS, PlanTable
from cost_models.plan.workload import Workload
from cost_models.step_time.data_parallel_phases import data_phases
from cost_models.step_time.overlap import Hiding, at_the_end
from cost_models.step_time.parts import RankSeconds, TimeParts
from cost_models.step_time.pipeline_bound import owners, pipeline_bound
from cost_models.step_time.tensor_parallel_overlap import tensor_seconds
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.software.trainer import SoftwareProfile


def rank_seconds(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    software: SoftwareProfile,
    rate: Rates,
    table: PlanTable,
    rank: PipelineRank,
) -> RankSeconds:
    """Price one pipeline rank; columns of the table's length."""
    if rate.host_is_device:
        table = without_offload(table)
    compute_bytes = workload.compute_bytes
    tokens = rank_tokens(workload, table)
    tensor = table.tensor_parallel
    work = computed_score_share(
        workload.attention_kernel, table.context_parallel, is_blockwise(table)
    )
    around = table.recompute == SELECTIVE_OPS
    scores_again = (workload.attention_kernel == "eager") & ~is_blockwise(table)
    forward, backward, again, later, core = (np.zeros(len(table)) for _ in range(5))
    held_forward, held_backward = np.zeros(len(table)), np.zeros(len(table))
    wraps = software.sharding.adapters_apart & (table.zero_stage >= 3) & (table.shard_ranks > 1)
    for count, recomputed, kind in zip(rank.kind_counts, rank.recomputed, model.kinds, strict=True):
        if not count:
            continue
        one = layer_seconds(
            as_computed(kind, workload, software),
            model.hidden_size,
            workload.seq_len,
            tokens,
            tensor_parallel=tensor,
            sequence_parallel=table.sequence_parallel,
            expert_tensor=table.expert_tensor,
            expert_parallel=table.expert_parallel,
            recompute_full=table.recompute == FULL,
            recompute_core=(table.recompute == SELECTIVE) | (around & scores_again),
            recompute_around=around,
            kernel=workload.attention_kernel,
            compute_bytes=compute_bytes,
            rate=rate,
            software=software,
            computed_score_share=work,
            hidden_dropout=model.hidden_dropout > 0,
            attention_dropout=model.attention_dropout > 0,
        )
        core = core + count * one.core
        forward = forward + count * one.forward
        if kind.forward_only:  # frozen, as is all below it
            continue
        if np.any(wraps):
            wait = adapter_wait(kind, tokens, tensor, compute_bytes, rate, software)
            wait = np.where(wraps, wait, 0.0)
            held_forward = held_forward + count * wait
            walked = count + np.where(table.recompute == FULL, recomputed, 0.0)
            held_backward = held_backward + walked * wait
        backward = backward + count * one.backward
        again = again + recomputed * one.recompute
        later = later + count * one.weights
    if rank.last:
        head = head_seconds(model, tokens, tensor, compute_bytes, rate, software)
        forward, backward = forward + head.forward, backward + head.backward

    options = TrafficOptions(
        gather_bytes=gathered_bytes(workload, software),
        regathers_inputs=not software.activations.keeps_gathered_inputs,
        gathers_per_matrix=software.communication.gathers_by_matrix,
        gathers_logits=software.loss.gathers_logits,
        reduces_once=reduces_once(software, table),
    )
    traffic = pass_traffic(model, workload, table, rank, options=options)
    if software.pipeline.scatters_messages:
        traffic = scattered_stage_messages(traffic, table)
    by_axis = axis_seconds(
        traffic,
        cluster,
        software,
        table,
        copies=max_experts_per_token(model) * software.communication.exchanges_once_a_node,
    )
    sums = axis_seconds(
        shared_gradient_traffic(model, workload, table, rank), cluster, software, table
    )
    tensor_forward, tensor_backward = tensor_seconds(
        by_axis["tensor"] / table.num_microbatches, later, software, table
    )
    starts_forward, starts_backward = operator_seconds(
        model, software, workload, table, rank, rate.operator
    )
    # collectives between the matrices of a layer stand in the same queue as these
    host_forward = host_wait(starts_forward, forward + tensor_forward, rate) + held_forward
    host_backward = (
        host_wait(starts_backward, backward + again + tensor_backward, rate) + held_backward
    )
    link = host_link(cluster, table, software)
    if np.any(table.offloads_activations):
        saved = layer_bytes(model, workload, software, table, rank)
        saved = np.where(table.offloads_activations, saved, 0.0)
        down, up = activation_offload_seconds(
            saved,
            forward + host_forward,
            backward + again + host_backward,
            link,
            prefetched=software.overlap.activation_prefetch,
        )
        host_forward, host_backward = host_forward + down, host_backward + up
    params = table_parameters(trainable_part(model), rank, table)
    phases = data_phases(traffic, by_axis, table, params, software)
    sharded = table.zero_stage >= 1
    shard = (params.total - params.expert_total) / np.where(sharded, table.shard_ranks, 1)
    shard = shard + params.expert_total / np.where(
        sharded, np.maximum(1, table.expert_shard_ranks), 1
    )
    if np.any(table.offloads_weights):
        fetched = np.where(table.offloads_weights, workload.master_bytes * shard, 0.0)
        down, up = weight_fetch_seconds(
            fetched, forward + host_forward, backward + host_backward, link
        )
        host_forward, host_backward = host_forward + down, host_backward + up
    exposed = exposed_context_seconds(
        by_axis["context"] / table.num_microbatches,
        core,
        core_ratio(workload.attention_kernel, rate) * core,
        table,
        compute_bytes,
        overlaps=not rate.host_is_device,
        recomputed_share=rank.recomputed_share,
    )
    accesses = update_accesses(workload, software)
    on_host = host_update_seconds(
        shard, workload.master_bytes, link, cluster.gpus_per_node, accesses
    )
    state_bytes = RULES[workload.optimizer].states * workload.state_bytes
    stored = cluster.gpus_per_node * (workload.master_bytes + state_bytes) * shard
    on_host = on_host + np.where(table.offload_device == NVME, nvme_seconds(stored), 0.0)
    products = update_flops(model, workload, table, rank) / rate.of_core.matmul
    on_device = optimizer_seconds(shard, rate, accesses) + products
    return RankSeconds(
        compute=forward + backward,
        recompute=again,
        host=host_forward + host_backward,
        tensor_communication=tensor_forward + tensor_backward,
        surplus=tensor_backward - tensor_forward,
        context_communication=exposed,
        pipeline_communication=by_axis["pipeline"] / table.num_microbatches,
        backward=backward + again + host_backward,
        # a pass that waits for its host waits in both of its halves
        weights=later * (backward + again + host_backward) / (backward + again),
        expert_communication=exposed_all_to_all_seconds(
            by_axis["expert"] / table.num_microbatches,
            forward + backward + again,
            cluster,
            software,
            table,
        ),
        data_communication=by_axis["data"] + by_axis["expert_data"] + by_axis["secondary"],
        gathered_forward=phases.forward,
        first_gathers=phases.first,
        last_reductions=phases.last,
        replica_communication=by_axis["replicate"],
        replicas_apart=table.shard_ranks * table.tensor_parallel <= cluster.tiers[0].domain_size,
        optimizer=np.where(table.offloads_optimizer, on_host, on_device)
        + software.host.step_operators * rate.operator
        + by_axis["world"]
        + sums["tensor"]
        + sums["pipeline"],
    )


def step_seconds(
    ranks: Sequence[RankSeconds],
    places: Sequence[Sequence[int]],
    table: PlanTable,
    hiding: Hiding,
    *,
    on_gpu: bool,
    core_share: float = 1.0,
    bound: Real | None = None,
) -> tuple[TimeParts, Real]:
    """Put the ranks of a pipeline together; return the parts and which rank is the slowest.

    ``places``: the pipeline ranks that each of ``ranks`` stands for. The bubble is what the
    schedule takes (``pipeline_time``, a lower bound; ``bound``, where it is known) over the time
    of the slowest rank.
    ``core_share`` below one: processes share cores, and what one leaves while it waits the others
    use. With s of a core each, of p stages c = s p work at a time, and nothing idles but at the
    start and the end, while fewer than c have work (mean(tau), with tau at s of a core):

        m max(mean(tau), s max(tau)) + s (c - 1)/(p - 1) bubble
    """
    each = np.stack([rank.microbatch for rank in ranks])
    slowest = np.argmax(each, axis=0)
    microbatches = 1.0 * table.num_microbatches
    longest = np.max(each, axis=0)
    owner = owners(places)
    if bound is None:
        forward, backward, weights = (
            np.stack([getattr(rank, name) for rank in ranks])[owner]
            for name in ("forward_pass", "backward_pass", "weights")
        )
        bound = pipeline_bound(table, forward, backward, weights)
    bubble = np.maximum(0.0, bound - microbatches * longest)  # rounding
    if core_share < 1.0:
        summed = np.sum(each[owner], axis=0)
        stages = 1.0 * table.pipeline_parallel
        at_work = np.maximum(0.0, core_share * stages - 1.0) / np.maximum(1.0, stages - 1.0)
        mean = summed / stages
        waits = microbatches * (np.maximum(mean, core_share * longest) - mean)
        bubble = waits + core_share * at_work * bubble

    def of_slowest(name: str) -> Real:
        columns = [getattr(rank, name) for rank in ranks]
        if core_share < 1.0:  # all ranks' work, one after another
            weighed: Real = np.zeros(len(table))
            for ranks_of, column in zip(places, columns, strict=True):
                weighed = weighed + len(ranks_of) * column
            return microbatches * weighed / table.pipeline_parallel
        return microbatches * pick(columns, slowest)

    exposed, optimizer = at_the_end(ranks, table, hiding, on_gpu=on_gpu)
    parts = TimeParts(
        compute=of_slowest("compute"),
        recompute=of_slowest("recompute"),
        host=of_slowest("host"),
        tensor_communication=of_slowest("tensor_communication"),
        expert_communication=of_slowest("expert_communication"),
        context_communication=of_slowest("context_communication"),
        pipeline_communication=of_slowest("pipeline_communication"),
        bubble=bubble,
        data_communication=exposed,
        optimizer=optimizer,
    )
    return parts, slowest
